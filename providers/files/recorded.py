"""RecordedFiles: the records of files in the KVStore, with their listing, their quota and the steps in which a file
appears and is deleted. A provider adds where the bytes are."""

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from openai.types.file_object import FileObject
from pydantic import Field

from apis.documents.files import CreateFile, FileCommit, FileListParams, Files, FileSource, commit_nothing
from apis.errors import InvalidRequest, PayloadTooLarge, StorageCorrupt
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, encode_record
from providers.common.state.blobs import ABANDONED, BlobBytes, new_blob
from providers.common.state.change import write_prepared
from providers.common.state.scan import first_matches, scan_records, skipping_damaged
from providers.files.records import (
    FILE_ID,
    PENDING_PREFIX,
    TenantUsage,
    UploadRecord,
    clean_filename,
    file_not_found,
    pending_key,
    record_key,
    record_to_file,
    usage_key,
)

MAX_UPLOAD_S: Final = 3600.0
"""Seconds that an upload may take; bytes of unfinished uploads older than twice that are swept."""

_FILTERED_ROWS: Final = 1000
"""Records that one step of a listing with a filter reads."""
_BATCH_FILE_TTL_S: Final = 2592000
_EXPIRING_PURPOSES: Final[frozenset[str]] = frozenset({"batch", "batch_output"})


class FileBytes(BlobBytes, Protocol):
    """The bytes of a new file."""

    @property
    def guard_ttl_s(self) -> float | None:
        """Seconds after which the guard of the bytes expires."""
        ...

    def build_ops(self, file_id: str, life_s: float | None) -> Sequence[Op]:
        """Return the operations that are written in the same step as the record of the file, which lives `life_s`."""
        ...

    def read(self) -> AsyncGenerator[bytes]:
        """Yield what was written. Raises StorageCorrupt."""
        ...


class RecordedFiles(Files, ABC):
    """Files whose records are in the KVStore. An id begins with its creation time, so the order of the keys is that of
    the listing. Bytes are written before their record and deleted after it; in between a guard marks them."""

    class Config(Provider.Config):
        """`max_file_bytes` bounds a file that is sent as one body, `max_joined_bytes` one that is sent in parts;
        `max_tenant_bytes` and `max_tenant_files` bound what each tenant can store at a time."""

        max_file_bytes: int = Field(default=32 * 1024 * 1024, ge=1, le=512 * 1024 * 1024)
        max_joined_bytes: int = Field(default=512 * 1024 * 1024, ge=1, le=8 * 1024 * 1024 * 1024)
        max_tenant_bytes: int = Field(default=1024 * 1024 * 1024, ge=1)
        max_tenant_files: int = Field(default=10_000, ge=1, le=1_000_000)

    def __init__(self, config: Config, kv_store: KVStore) -> None:
        self.now: Callable[[], float] = time.time
        self.max_file_bytes = config.max_file_bytes
        self.max_joined_bytes = config.max_joined_bytes
        self.kv = kv_store
        self._bounds = config

    async def claim(self) -> str:
        """Return the id of the object store that new files are written to; empty for the KVStore itself."""
        return ""

    def new_blob_id(self, file_id: str) -> str:
        """Return the id of a blob for bytes of a file that are elsewhere now."""
        return file_id

    @abstractmethod
    def new_bytes(self, tenant: str, blob_id: str, life_s: float | None) -> FileBytes:
        """Return the bytes of a new file, which lives `life_s`, to be written. `blob_id` is the id of the file, or
        another one where bytes of the file are elsewhere."""

    @abstractmethod
    def read_bytes(self, file_id: str, record: UploadRecord, tenant: str) -> AsyncGenerator[bytes]:
        """Yield the bytes of a file, in chunks of at most 1 MiB. Raises StorageCorrupt."""

    @abstractmethod
    async def list_blobs(self, file_id: str, tenant: str) -> Sequence[str]:
        """Return the ids of the blobs that a file consists of, in their order; its own id for one that was one body.
        Raises StorageCorrupt."""

    @abstractmethod
    def build_deletion_ops(self, file_id: str, blob_ids: Sequence[str], tenant: str) -> Sequence[Op]:
        """Return the operations that are written in the same step as the record of the file is deleted."""

    @abstractmethod
    async def delete_bytes(self, blob_ids: Sequence[str], tenant: str) -> None:
        """Delete the bytes of blobs where this provider writes them."""

    @abstractmethod
    async def delete_blobs(self, file_id: str, blob_ids: Sequence[str], tenant: str) -> None:
        """Delete the bytes of a file that has no record, and then its pending key."""

    async def sweep_pending(self) -> None:
        """Delete the bytes of uploads and deletions whose process died. One whose pending key is damaged stays."""
        async for key, started_at, version in scan_records(self.kv, PENDING_PREFIX, float):
            if time.time() - started_at <= 2 * MAX_UPLOAD_S:
                continue
            # once this is written, nothing publishes these bytes any more
            if await self.kv.write([Put(key, encode_record(ABANDONED), expect=version)]) is not None:
                tenant, _, file_id = key.removeprefix(PENDING_PREFIX).rpartition("/")
                await self.delete_blobs(file_id, [file_id], tenant)

    async def create(
        self,
        request: CreateFile,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        source: FileSource = "body",
        commit: FileCommit = commit_nothing,
    ) -> FileObject:
        file_id, record, life_s = self.begin_file(request)
        content = self.new_bytes(tenant, file_id, life_s)
        async with new_blob(self.kv, content, pending_key(tenant, file_id), ttl_s=content.guard_ttl_s) as blob:
            record.size = await blob.write(self._bound_upload(data, source))

            async def prepare() -> Sequence[Op]:
                ops = await self.prepare_file(file_id, record, tenant, is_server=source == "server")
                return [*ops, *content.build_ops(file_id, life_s), *await commit(file_id)]

            await blob.publish(prepare)
        return record_to_file(file_id, record)

    def begin_file(self, request: CreateFile) -> tuple[str, UploadRecord, float | None]:
        """Return the id, the record and the life in seconds of a new file."""
        now = self.now()
        file_id = f"file-{int(now * 1000):012x}{secrets.token_hex(16)}"
        life_s = request.expires_after.seconds if request.expires_after else None
        if life_s is None and request.purpose in _EXPIRING_PURPOSES:
            life_s = _BATCH_FILE_TTL_S
        expires_at = None if life_s is None else now + life_s
        record = UploadRecord(clean_filename(request.filename), request.purpose, 0, now, expires_at, self.store_id)
        return file_id, record, life_s

    @property
    def store_id(self) -> str:
        """The id of the object store that new files are written to; empty for the KVStore itself."""
        return ""

    async def prepare_file(self, file_id: str, record: UploadRecord, tenant: str, *, is_server: bool) -> Sequence[Op]:
        """Return the operations that let the file appear and count it. Raises InvalidRequest above the quota, except
        for a file `is_server` makes."""
        usage, usage_version = await self._load_usage(tenant)
        if not is_server and self._exceeds_quota(usage, record):
            # the stored usage includes expired files: count before refusing
            usage = await self._count_usage(tenant)
            if self._exceeds_quota(usage, record):
                raise self._quota_error()
        new_usage = TenantUsage(usage.files + 1, usage.size + record.size)
        life_s = None if record.expires_at is None else record.expires_at - record.created_at
        return [
            Put(record_key(tenant, file_id), encode_record(record), life_s, ABSENT),
            Put(usage_key(tenant), encode_record(new_usage), expect=usage_version),
        ]

    async def get(self, file_id: str, *, tenant: str) -> FileObject:
        return record_to_file(file_id, (await self.load(file_id, tenant))[0])

    async def list(self, params: FileListParams, *, tenant: str) -> Page[FileObject]:
        after = params.after or ""
        if after and not FILE_ID.fullmatch(after):
            raise InvalidRequest("There is no file with this id.", param="after", code="invalid_value")
        prefix, cursor = record_key(tenant, ""), record_key(tenant, after) if after else ""
        is_reversed = params.order == "desc"
        rows = scan_records(
            self.kv,
            prefix,
            UploadRecord,
            after="" if is_reversed else cursor,
            before=cursor if is_reversed else "",
            reverse=is_reversed,
            page_size=params.limit + 1 if params.purpose is None else _FILTERED_ROWS,
        )
        page = await first_matches(rows, params.limit, lambda record: params.purpose in (None, record.purpose))
        return page.map(lambda row: record_to_file(row.key.removeprefix(prefix), row.record))

    async def content(self, file_id: str, *, tenant: str) -> AsyncGenerator[bytes]:
        record, _ = await self.load(file_id, tenant)
        sent_bytes = 0
        while True:
            try:
                async with aclosing(self.read_bytes(file_id, record, tenant)) as chunks:
                    read_bytes = 0
                    async for chunk in chunks:
                        read_bytes += len(chunk)
                        new_chunk = chunk[max(0, len(chunk) - (read_bytes - sent_bytes)) :]
                        if new_chunk:
                            sent_bytes += len(new_chunk)
                            yield new_chunk
                return
            except StorageCorrupt:
                was_in = record.object_store
                record, _ = await self.load(file_id, tenant)  # NotFound if it was deleted meanwhile
                if record.object_store == was_in:
                    raise

    async def delete(self, file_id: str, *, tenant: str) -> None:
        blob_ids: Sequence[str] = ()

        async def prepare() -> Sequence[Op]:
            nonlocal blob_ids
            entry = await self._load_entry(file_id, tenant)
            usage, usage_version = await self._load_usage(tenant)
            try:
                record = decode_record(entry, UploadRecord)
                new_usage = TenantUsage(max(0, usage.files - 1), max(0, usage.size - record.size))
            except StorageCorrupt:
                new_usage = await self._count_usage(tenant)
            try:
                blob_ids = await self.list_blobs(file_id, tenant)
            except StorageCorrupt:
                blob_ids = [file_id]
            return [
                Delete(record_key(tenant, file_id), entry.version),
                Put(usage_key(tenant), encode_record(new_usage), expect=usage_version),
                Put(pending_key(tenant, file_id), encode_record(ABANDONED)),
                *self.build_deletion_ops(file_id, blob_ids, tenant),
            ]

        await write_prepared(self.kv, prepare)
        await self.delete_blobs(file_id, blob_ids, tenant)

    async def require_room(self, size_bytes: int, *, tenant: str) -> None:
        record = UploadRecord("", "", size_bytes, 0.0)
        usage, _ = await self._load_usage(tenant)
        if self._exceeds_quota(usage, record) and self._exceeds_quota(await self._count_usage(tenant), record):
            raise self._quota_error()

    async def _bound_upload(self, data: AsyncIterable[bytes], source: FileSource) -> AsyncGenerator[bytes]:
        """Yield the data. Raises PayloadTooLarge as soon as it exceeds the limit of its source, and InvalidRequest for
        an upload that takes longer than MAX_UPLOAD_S."""
        limits = {
            "body": (self.max_file_bytes, "files.max_file_bytes"),
            "parts": (self.max_joined_bytes, "files.max_joined_bytes"),
        }
        max_bytes, setting = limits.get(source, (None, ""))
        deadline = time.monotonic() + MAX_UPLOAD_S
        size = 0
        async for received in data:
            size += len(received)
            if max_bytes is not None and size > max_bytes:
                raise PayloadTooLarge(
                    f"The file is larger than {max_bytes} bytes: the limit is `{setting}`.", param="file"
                )
            if time.monotonic() > deadline:
                raise InvalidRequest("The upload took too long.", param="file")
            yield received

    def _exceeds_quota(self, usage: TenantUsage, record: UploadRecord) -> bool:
        bounds = self._bounds
        return usage.size + record.size > bounds.max_tenant_bytes or usage.files + 1 > bounds.max_tenant_files

    def _quota_error(self) -> InvalidRequest:
        return InvalidRequest(
            f"Your files would exceed {self._bounds.max_tenant_bytes} bytes or "
            f"{self._bounds.max_tenant_files} files. Delete some first.",
            param="file",
            code="storage_quota_exceeded",
        )

    async def _load_usage(self, tenant: str) -> tuple[TenantUsage, int]:
        """Return the usage and the version of its record; a damaged record is counted again."""
        entry = await self.kv.get(usage_key(tenant))
        if entry is None:
            return TenantUsage(), ABSENT
        with skipping_damaged(self.kv, usage_key(tenant), TenantUsage.__name__):
            return decode_record(entry, TenantUsage), entry.version
        return await self._count_usage(tenant), entry.version

    async def _count_usage(self, tenant: str) -> TenantUsage:
        sizes = [row.record.size async for row in scan_records(self.kv, record_key(tenant, ""), UploadRecord)]
        return TenantUsage(len(sizes), sum(sizes))

    async def load(self, file_id: str, tenant: str) -> tuple[UploadRecord, int]:
        """Return the record of a file and its version. Raises NotFound and StorageCorrupt."""
        entry = await self._load_entry(file_id, tenant)
        return decode_record(entry, UploadRecord), entry.version

    async def _load_entry(self, file_id: str, tenant: str) -> Entry:
        entry = await self.kv.get(record_key(tenant, file_id)) if FILE_ID.fullmatch(file_id) else None
        if entry is None:
            raise file_not_found(file_id)
        return entry


async def check_md5(data: AsyncGenerator[bytes], expected: str | None) -> AsyncGenerator[bytes]:
    """Yield the data. Raises InvalidRequest at their end if they have another MD5 than the expected one."""
    md5 = hashlib.md5(usedforsecurity=False)
    async with aclosing(data) as chunks:
        async for chunk in chunks:
            if expected is not None:
                md5.update(chunk)
            yield chunk
    if expected is not None and md5.hexdigest() != expected.lower():
        message = f"The MD5 of the parts is {md5.hexdigest()}. Send again the parts that differ."
        raise InvalidRequest(message, param="md5", code="invalid_value")
