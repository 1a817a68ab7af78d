"""FileMove: the bytes of all files of a KVStore go from one provider of files to another; their records stay.

~file_moved/TENANT/FILE       bytes of a moved file that are still where they were

A file is copied, read again and compared. One write then changes its record, on the condition that nothing else has
changed it, and only then the old bytes are deleted. So a move that broke off is repeated, and moves the rest.
"""

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from apis.documents.files import Files
from apis.errors import ConfigError, NotFound, StackError, StorageCorrupt
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.records import encode_record, scan_groups
from providers.common.state.blobs import new_blob
from providers.common.state.scan import decode_or_skip, scan_records
from providers.files.object_store import ObjectStoreFiles
from providers.files.recorded import RecordedFiles
from providers.files.records import UploadRecord, pending_key, record_key

_log = logging.getLogger(__name__)
_MOVED_PREFIX: Final = "~file_moved/"
_SIGN_PREFIX: Final = "/worker_sign/"
_MIB: Final = 1024 * 1024


class OldBytes(msgspec.Struct):
    """Bytes of a moved file that are to be deleted: the id of their object store, and their blobs."""

    object_store: str
    blob_ids: list[str]


class FileMove:
    """A move of all files of `source` to `target`, which are over the same KVStore."""

    def __init__(self, source: Files, target: Files, show: Callable[[str], None]) -> None:
        """`show` is given a line about the progress, now and then."""
        if not isinstance(source, RecordedFiles) or not isinstance(target, RecordedFiles):
            raise ConfigError("files.provider: only files of `kv` and `object_store` can be moved.")
        self._source = source
        self._target = target
        self._kv: KVStore = target.kv
        self._show = show
        self._source_id = self._target_id = ""
        self._total = self._done = self._moved_bytes = 0
        self._failures: list[str] = []

    async def run(self) -> str:
        """Move the files and return a line about it. Raises ConfigError where that is not safe or has no sense, and
        StackError at the end if some could not be moved."""
        self._source_id, self._target_id = await self._source.claim(), await self._target.claim()
        if self._source_id == self._target_id:
            raise ConfigError("Both run configs keep their files in the same place: there is nothing to move.")
        await self._require_safety()
        await self._delete_old_bytes()
        self._total = len([None async for _ in self._list()])
        async with aclosing(self._list()) as files:
            async for tenant, file_id in files:
                await self._try_move(tenant, file_id)
        line = self._describe()
        if self._failures:
            raise StackError(f"{line}; {len(self._failures)} failed, run it again: {self._failures[0]}")
        return line

    def _describe(self) -> str:
        return f"moved {self._done}/{self._total} files, {self._moved_bytes / _MIB:.1f} MiB"

    async def _require_safety(self) -> None:
        """Raise ConfigError if a server runs that could not read what is moved: a server with an object store also
        reads files in the KVStore, and that is all."""
        if not await self._kv.scan(_SIGN_PREFIX, limit=1):
            return
        if self._source_id == "" and isinstance(self._target, ObjectStoreFiles):
            if await self._kv.get(self._target.orphans.lease_key) is not None:
                return
            raise ConfigError("Servers use this store without the new files.provider: restart them with it first.")
        raise ConfigError("Servers use this store, or did a minute ago: stop them, because they read one place alone.")

    async def _list(self) -> AsyncGenerator[tuple[str, str]]:
        """Yield the tenants and ids of the files that are still in the source."""
        async with aclosing(scan_groups(self._kv, "", limit=1)) as tenants:
            async for tenant, _ in tenants:
                if not tenant or tenant.startswith("~"):
                    continue
                async with aclosing(scan_records(self._kv, record_key(tenant, ""), UploadRecord)) as rows:
                    async for key, record, _ in rows:
                        if record.object_store == self._source_id:
                            yield tenant, key.rpartition("/")[2]

    async def _try_move(self, tenant: str, file_id: str) -> None:
        try:
            self._moved_bytes += await self._move(tenant, file_id)
            self._done += 1
        except NotFound:
            self._total -= 1  # deleted meanwhile
        except StackError as exc:
            if isinstance(exc, StorageCorrupt) and await self._has_left(tenant, file_id):
                self._total -= 1  # another move has deleted the bytes while they were read
            else:
                _log.warning("the file %s is not moved: %s", file_id, exc.message)
                self._failures.append(f"{file_id}: {exc.message}")
        self._show(self._describe())

    async def _move(self, tenant: str, file_id: str) -> int:
        """Move a file; return its size in bytes. Raises NotFound where it was deleted or moved meanwhile."""
        source, target = self._source, self._target
        record, version = await target.load(file_id, tenant)
        if record.object_store != self._source_id:
            raise NotFound("The file was moved already.")
        life_s = None if record.expires_at is None else max(1.0, record.expires_at - time.time())
        blob_id = target.new_blob_id(file_id)
        content = target.new_bytes(tenant, blob_id, life_s)
        # Its guard is not that of the file, whose bytes a sweep of guards would delete. Another move of this file, from
        # now on, takes the guard and so ends this one; one that has moved it meanwhile has changed the record.
        unchanged = Put(record_key(tenant, file_id), encode_record(record), life_s, version)
        guard_key = pending_key(tenant, f"{file_id}.moved" if blob_id == file_id else blob_id)
        blob_ids: Sequence[str] = ()

        async def prepare() -> Sequence[Op]:
            nonlocal blob_ids
            current, version = await target.load(file_id, tenant)
            if current.object_store != self._source_id:
                raise NotFound("The file was moved already.")
            blob_ids = await source.list_blobs(file_id, tenant)
            moved = msgspec.structs.replace(current, object_store=self._target_id)
            ops: list[Op] = [
                *source.build_deletion_ops(file_id, blob_ids, tenant),
                *content.build_ops(file_id, life_s),
                Put(record_key(tenant, file_id), encode_record(moved), life_s, version),
                Put(_moved_key(tenant, file_id), encode_record(OldBytes(self._source_id, list(blob_ids)))),
            ]
            return list({op.key: op for op in ops}.values())

        async with new_blob(self._kv, content, guard_key, ttl_s=content.guard_ttl_s, also=[unchanged]) as blob:
            read = hashlib.sha256()
            size = await blob.write(_digest(source.read_bytes(file_id, record, tenant), read.update))
            written = hashlib.sha256()
            async with aclosing(_digest(content.read(), written.update)) as chunks:
                async for _ in chunks:
                    pass
            if size != record.size or read.digest() != written.digest():
                raise StorageCorrupt("The copy of the file differs from it.")
            await blob.publish(prepare)
        await source.delete_bytes(blob_ids, tenant)
        await self._kv.write([Delete(_moved_key(tenant, file_id))])
        return record.size

    async def _delete_old_bytes(self) -> None:
        """Delete the bytes that an earlier move has left in the source."""
        async for key, old, _ in scan_records(self._kv, _MOVED_PREFIX, OldBytes):
            tenant, _, file_id = key.removeprefix(_MOVED_PREFIX).rpartition("/")
            if old.object_store == self._source_id and await self._is_elsewhere(tenant, file_id, old.object_store):
                await self._source.delete_bytes(old.blob_ids, tenant)
                await self._kv.write([Delete(key)])

    async def _has_left(self, tenant: str, file_id: str) -> bool:
        """Return true if the file is known not to be in the source any more."""
        try:
            return await self._is_elsewhere(tenant, file_id, self._source_id)
        except StackError:
            return False

    async def _is_elsewhere(self, tenant: str, file_id: str, object_store: str) -> bool:
        """Return true if no file needs the bytes that are in this place. A damaged record may."""
        key = record_key(tenant, file_id)
        if (entry := await self._kv.get(key)) is None:
            return True
        record = decode_or_skip(self._kv, key, entry, UploadRecord)
        return record is not None and record.object_store != object_store


async def _digest(data: AsyncGenerator[bytes], add: Callable[[bytes], object]) -> AsyncGenerator[bytes]:
    async with aclosing(data) as chunks:
        async for chunk in chunks:
            add(chunk)
            yield chunk


def _moved_key(tenant: str, file_id: str) -> str:
    return f"{_MOVED_PREFIX}{tenant}/{file_id}"
