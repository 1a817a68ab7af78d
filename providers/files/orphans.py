"""OrphanQueue: one process of all that share a KVStore deletes the objects that no file has.

A blob that may still appear has a guard, so an object without a record and without a guard is one that will never be
read, however old it is. Both are read in one snapshot. A file that was deleted in half has its record deleted first.
"""

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final

from apis.errors import StorageCorrupt, StoreUnavailable
from apis.storage.kv_store import Delete, Entry, KVStore
from apis.storage.lease import Lease
from apis.storage.records import decode_record
from providers.common.jobs import LeaderQueue
from providers.common.state.blobs import ABANDONED
from providers.common.state.scan import decode_or_skip
from providers.files.blob_objects import BlobRecord, blob_folder, blob_key, parse_folder
from providers.files.object_claim import find_claim_key
from providers.files.object_config import ObjectStoreConfig
from providers.files.objects import Objects, StoredObject
from providers.files.records import pending_key, record_key

LEASE_S: Final = 10.0
"""Seconds after which another process goes on where the one that sweeps was killed."""
_log = logging.getLogger(__name__)


class OrphanQueue(LeaderQueue):
    """The job of looking at all objects, every `sweep_interval_s`."""

    title = "objects without a file"
    rest_factor = 4.0
    """Looking at very many objects takes a fifth of the time."""

    def __init__(
        self,
        kv_store: KVStore,
        objects: Objects,
        config: ObjectStoreConfig,
        claims: tuple[Callable[[], Awaitable[str]], Callable[[], Awaitable[str]]],
    ) -> None:
        """`claims` return the id of the object store, or raise a StackError if it belongs to another KVStore. The
        second one looks at its folder each time."""
        super().__init__(kv_store, sweep_key(config.url), LEASE_S, config.sweep_interval_s)
        self._objects = objects
        self._grace_s = config.orphan_grace_s
        self._claim, self._check_claim = claims

    async def work(self, lease: Lease) -> None:
        store_id, count = await self._claim(), 0
        if not (claim_key := await find_claim_key(self.kv, store_id)):
            raise _records_lost()
        await self._check_claim()  # the objects of another KVStore would seem to be orphans
        async with aclosing(self._objects.list()) as pages:
            async for page in pages:
                lease.check()
                count += await self._sweep(page, store_id, claim_key)
        cutoff = time.time() - self._grace_s
        if cut := await self._objects.delete_cut_writes(lambda name: parse_folder(name) is not None, cutoff):
            _log.info("deleted %d files of writes that were cut off", cut)
        if count:
            _log.info("deleted the objects of %d blobs that no file has", count)

    async def _sweep(self, page: Sequence[StoredObject], store_id: str, claim_key: str) -> int:
        """Delete the orphans among these objects; return the number of their blobs. Raises StoreUnavailable where the
        store has lost its records, and therefore the claim: a backup of them would still need all objects."""
        cutoff = time.time() - self._grace_s
        names = [parse_folder(each.name) for each in page if each.modified_at < cutoff]
        blobs = list(dict.fromkeys(name for name in names if name is not None))
        if not blobs:
            return 0
        keys = [blob_key(*blob) for blob in blobs] + [pending_key(*blob) for blob in blobs]
        claim, *entries = await self.kv.get_many([claim_key, *keys])
        if claim is None:
            raise _records_lost()
        count = 0
        for blob, entry, guard in zip(blobs, entries, entries[len(blobs) :], strict=False):
            if not _may_appear(guard) and await self._delete_record(blob, entry, store_id):
                await self._objects.delete_folder(blob_folder(*blob))
                count += 1
        return count

    async def _delete_record(self, blob: tuple[str, str], entry: Entry | None, store_id: str) -> bool:
        """Delete the record of a blob whose file is gone; return False if the blob is not an orphan."""
        if entry is None:
            return True
        tenant, _ = blob
        record = decode_or_skip(self.kv, blob_key(*blob), entry, BlobRecord)
        if record is None or record.object_store != store_id or not record.file_id:
            return False
        if await self.kv.get(record_key(tenant, record.file_id)) is not None:
            return False
        return await self.kv.write([Delete(blob_key(*blob), entry.version)]) is not None


def sweep_key(url: str) -> str:
    """Return the key of the lease of the process that sweeps the object store at this URL."""
    return f"/file_sweep/{hashlib.sha256(url.encode()).hexdigest()}"


def _records_lost() -> StoreUnavailable:
    return StoreUnavailable("The store has lost the records of its files. No object is deleted.")


def _may_appear(guard: Entry | None) -> bool:
    try:
        return guard is not None and decode_record(guard, float) != ABANDONED
    except StorageCorrupt:
        return True
