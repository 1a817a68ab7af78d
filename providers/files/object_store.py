"""ObjectStoreFiles: files in an object store, in objects of at most 8 MiB, with their records in the KVStore.

TENANT/file_object/BLOB       the objects of one blob: of a file that was one body, or of a part of an upload
TENANT/file_blobs/FILE        the blobs of a file in their order, where they are not the one of its own id
/file_store/DIGEST            the object store at a URL with this SHA-256

The objects of a blob are TENANT_FOLDER/BLOB/NUMBER. An object without a record is an orphan: of a file that was
deleted, has expired or was never whole. A part that joins a file stays where it is: its record is changed.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from openai.types.file_object import FileObject

from apis.documents.files import CreateFile, FileCommit, FileParts, FileSource, PartCommit, commit_nothing
from apis.errors import ConfigError, PayloadTooLarge, StackError, StorageCorrupt, StoreUnavailable
from apis.fair_share import FairShare
from apis.storage.keys import new_id_key
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.common.jobs import LeasedJobs
from providers.common.state.blobs import StoredChunks, delete_blob, new_blob, read_chunks
from providers.common.state.scan import StoredRecord, decode_or_skip
from providers.common.state.worker_signs import WorkerSign
from providers.files.blob_objects import (
    OBJECT_BYTES,
    BlobRecord,
    NewObjects,
    blob_folder,
    blob_key,
    blobs_key,
    read_objects,
    tenant_folder,
)
from providers.files.object_claim import claim_folder
from providers.files.object_config import ObjectStoreConfig
from providers.files.objects import Objects, ObjectStoreRefused
from providers.files.orphans import LEASE_S, OrphanQueue
from providers.files.recorded import RecordedFiles, check_md5
from providers.files.records import UploadRecord, chunk_prefix, pending_key, record_to_file

_log = logging.getLogger(__name__)
_CLOSE_S: Final = 5.0
_DELETED_BLOBS: Final = 64
"""Blobs that are deleted while the client waits. The orphan sweep deletes the others."""


class ObjectStoreFiles(RecordedFiles):
    """Files in S3, Google Cloud Storage, Azure or a folder of a file system, for fleets; the `kv_store` has their small
    records. Parts of uploads go to the object store at once, and completing an upload copies nothing."""

    class Config(ObjectStoreConfig):
        __doc__ = ObjectStoreConfig.__doc__

    def __init__(self, config: Config, kv_store: KVStore) -> None:
        super().__init__(config, kv_store)
        self.objects = Objects(config)
        self.object_bytes = OBJECT_BYTES
        self._url = config.url
        self._writes = FairShare("objects of files being written", config.parallel_writes)
        self._store_id = ""
        self._is_claimed = False
        self.orphans = OrphanQueue(kv_store, self.objects, config, (self.claim, self.check_claim))
        self._sweeping = LeasedJobs(self.orphans, WorkerSign(kv_store, LEASE_S), poll_s=LEASE_S)

    async def start(self) -> None:
        try:
            await self._claim_folder()
            await self.sweep_pending()
        except ObjectStoreRefused as exc:
            reason = str(exc.__cause__).partition("\n")[0]
            raise ConfigError(f"url: {self._url} refuses this server, or does not exist: {reason}") from exc
        except StackError as exc:  # an outage must not prevent the start: the first use claims the folder
            _log.warning("files wait for their object store: %s", exc.message)
        self._sweeping.start()

    async def close(self) -> None:
        await self._sweeping.close(_CLOSE_S)

    def machine_bound_state(self) -> str | None:
        if not self._url.startswith("file:"):
            return None
        return f"the files in {self._url}; mount that folder on every machine, or use an object store"

    async def claim(self) -> str:
        """Return the id of the object store, once it is certain that its folder belongs to this KVStore: another one
        would delete the objects as orphans. Raises StoreUnavailable."""
        return self._store_id if self._is_claimed else await self.check_claim()

    async def check_claim(self) -> str:
        """Do as `claim`, and look at the folder again: another KVStore may have claimed it after its claim was deleted,
        or where the object store has no conditional writes. Then no more files are stored."""
        try:
            return await self._claim_folder()
        except ConfigError as exc:
            self._is_claimed = False
            _log.error("files are not stored: %s", exc)
            raise StoreUnavailable("The object store of the files belongs to another server.") from exc

    async def _claim_folder(self) -> str:
        self._store_id = await claim_folder(self.objects, self.kv, self._url)
        self._is_claimed = True
        return self._store_id

    @property
    def store_id(self) -> str:
        return self._store_id

    async def create(
        self,
        request: CreateFile,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        source: FileSource = "body",
        commit: FileCommit = commit_nothing,
    ) -> FileObject:
        await self.claim()
        return await super().create(request, data, tenant=tenant, source=source, commit=commit)

    async def add_part(
        self,
        upload_id: str,
        part_id: str,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        life_s: float,
        commit: PartCommit,
    ) -> int:
        await self.claim()
        content = self.new_bytes(tenant, part_id, life_s)
        guard_key = pending_key(tenant, part_id)
        async with new_blob(self.kv, content, guard_key, ttl_s=content.guard_ttl_s) as blob:
            size = await blob.write(data)

            async def prepare() -> Sequence[Op]:
                return [*content.build_ops("", life_s), *await commit(size)]

            await blob.publish(prepare)
        return size

    async def join_parts(
        self, request: CreateFile, parts: FileParts, *, tenant: str, commit: FileCommit = commit_nothing
    ) -> FileObject:
        await self.claim()
        file_id, record, life_s = self.begin_file(request)
        record.size = sum(parts.sizes.values())
        if record.size > self.max_joined_bytes:
            message = f"The file is larger than {self.max_joined_bytes} bytes: the limit is `files.max_joined_bytes`."
            raise PayloadTooLarge(message, param="file")
        blobs = await self._load_blobs(list(parts.sizes), tenant)
        if [row.record.size for row in blobs] != list(parts.sizes.values()):
            raise StorageCorrupt
        if parts.md5 is not None:
            async with aclosing(check_md5(self._read_blobs(blobs, tenant), parts.md5)) as chunks:
                async for _ in chunks:
                    pass

        async def prepare() -> Sequence[Op]:
            ops = [*await self.prepare_file(file_id, record, tenant, is_server=False), *await commit(file_id)]
            for key, part, version in blobs:  # the condition holds as long as no sweep can delete the objects
                ops.append(Put(key, encode_record(msgspec.structs.replace(part, file_id=file_id)), life_s, version))
            return [*ops, Put(blobs_key(tenant, file_id), encode_record(list(parts.sizes)), life_s, ABSENT)]

        content = self.new_bytes(tenant, file_id, life_s)
        async with new_blob(self.kv, content, pending_key(tenant, file_id), ttl_s=content.guard_ttl_s) as blob:
            await blob.publish(prepare)
        return record_to_file(file_id, record)

    async def delete_parts(self, upload_id: str, part_ids: Sequence[str], *, tenant: str) -> None:
        keys = [blob_key(tenant, part_id) for part_id in part_ids[:_DELETED_BLOBS]]
        for part_id, key, entry in zip(part_ids, keys, await self.kv.get_many(keys) if keys else (), strict=False):
            record = None if entry is None else decode_or_skip(self.kv, key, entry, BlobRecord)
            if entry is None or record is None or record.file_id:
                continue
            if await self.kv.write([Delete(key, entry.version)]) is not None:
                await self.objects.delete_folder(blob_folder(tenant, part_id))

    async def delete_outside_of_store(self, *, tenant: str) -> None:
        await self.claim()
        await self.objects.delete_folder(tenant_folder(tenant))

    def new_blob_id(self, file_id: str) -> str:
        return f"file-{new_id_key()}"

    def new_bytes(self, tenant: str, blob_id: str, life_s: float | None) -> NewObjects:
        record = BlobRecord(self._store_id, 0, self.object_bytes, [])
        return NewObjects(self.objects, self._writes, tenant, blob_id, record)

    async def read_bytes(self, file_id: str, record: UploadRecord, tenant: str) -> AsyncGenerator[bytes]:
        if not record.object_store:  # it was stored before there was an object store
            chunks = read_chunks(self.kv, chunk_prefix(tenant, file_id), record.size)
        elif record.object_store == await self.claim():
            blobs = await self._load_blobs(await self.list_blobs(file_id, tenant), tenant)
            if sum(row.record.size for row in blobs) != record.size:
                raise StorageCorrupt
            chunks = self._read_blobs(blobs, tenant)
        else:
            raise StoreUnavailable("The bytes of this file are in another object store than that of this server.")
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def list_blobs(self, file_id: str, tenant: str) -> Sequence[str]:
        entry = await self.kv.get(blobs_key(tenant, file_id))
        return [file_id] if entry is None else decode_record(entry, list[str])

    def build_deletion_ops(self, file_id: str, blob_ids: Sequence[str], tenant: str) -> Sequence[Op]:
        blobs = [Delete(blob_key(tenant, blob_id)) for blob_id in dict.fromkeys(blob_ids)]
        return [Delete(blobs_key(tenant, file_id)), *blobs]

    async def delete_bytes(self, blob_ids: Sequence[str], tenant: str) -> None:
        for blob_id in blob_ids:
            await self.objects.delete_folder(blob_folder(tenant, blob_id))

    async def delete_blobs(self, file_id: str, blob_ids: Sequence[str], tenant: str) -> None:
        chunks = StoredChunks(self.kv, chunk_prefix(tenant, file_id))
        await delete_blob(self.kv, chunks, pending_key(tenant, file_id))
        try:
            await self.delete_bytes(blob_ids[:_DELETED_BLOBS], tenant)
        except StackError as exc:
            _log.warning("the objects of the deleted file %s are swept later: %s", file_id, exc.message)

    async def _load_blobs(self, blob_ids: Sequence[str], tenant: str) -> list[StoredRecord[BlobRecord]]:
        """Return the records of blobs. Raises StorageCorrupt if one is missing or damaged."""
        keys = [blob_key(tenant, blob_id) for blob_id in blob_ids]
        rows: list[StoredRecord[BlobRecord]] = []
        for key, entry in zip(keys, await self.kv.get_many(keys), strict=True):
            if entry is None:
                raise StorageCorrupt("The content cannot be read: a part of it is missing.")
            rows.append(StoredRecord(key, decode_record(entry, BlobRecord), entry.version))
        return rows

    async def _read_blobs(self, blobs: Sequence[StoredRecord[BlobRecord]], tenant: str) -> AsyncGenerator[bytes]:
        for key, record, _ in blobs:
            folder = blob_folder(tenant, key.rpartition("/")[2])
            async with aclosing(read_objects(self.objects, folder, record)) as pieces:
                async for piece in pieces:
                    yield piece
