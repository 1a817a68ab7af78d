"""StoredFiles: files in the stack's own KVStore, in chunks that every store can hold."""

import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import PurePosixPath
from typing import Final

import msgspec
from openai.types.file_object import FileObject
from pydantic import Field

from apis.documents.files import CreateFile, FileCommit, FileListParams, Files, FileSource, commit_nothing
from apis.errors import InvalidRequest, NotFound, PayloadTooLarge, StackError, StorageCorrupt
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page, first_page
from apis.storage.records import decode_record, encode_record
from providers.common.state.blobs import ABANDONED, delete_blob, new_blob, read_chunks
from providers.common.state.change import write_prepared
from providers.common.state.scan import list_records, scan_records, skipping_damaged

MAX_UPLOAD_S: Final = 3600.0
"""Seconds that an upload may take; chunks of unfinished uploads older than twice that are swept."""
PENDING_PREFIX: Final = "~file_loose/"
"""No tenant's name begins with a tilde, so these keys are no tenant's."""

_SCAN_LIMIT: Final = 1000
_BATCH_FILE_TTL_S: Final = 2592000
_EXPIRING_PURPOSES: Final[frozenset[str]] = frozenset({"batch", "batch_output"})
_MAX_NAME_CHARS: Final = 255
_FILE_ID: Final = re.compile(r"file-[0-9a-f]{44}")
_UNSAFE_CHARS: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


class UploadRecord(msgspec.Struct, omit_defaults=True):
    """The metadata of a file; `created_at` and `expires_at` are seconds since the epoch."""

    name: str
    purpose: str
    size: int
    created_at: float
    expires_at: float | None = None


class TenantUsage(msgspec.Struct):
    """The number of a tenant's files and the sum of their sizes in bytes."""

    files: int = 0
    size: int = 0


class StoredFiles(Files):
    """Files up to tens of megabytes, shared by all workers that share the store, and gone from it when deleted.

    An id begins with its creation time, so the order of the keys is that of the listing. Chunks are written before
    their record and deleted after it; in between a pending key marks them (`providers/common/state/blobs.py`).
    """

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
        self._config = config
        self._kv = kv_store

    async def start(self) -> None:
        # neither an unreachable store nor a damaged entry may prevent the start: the next start sweeps
        with suppress(StackError):
            await self._sweep_pending()

    async def create(
        self,
        request: CreateFile,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        source: FileSource = "body",
        commit: FileCommit = commit_nothing,
    ) -> FileObject:
        now = self.now()
        file_id = f"file-{int(now * 1000):012x}{secrets.token_hex(16)}"
        life_s = request.expires_after.seconds if request.expires_after else None
        if life_s is None and request.purpose in _EXPIRING_PURPOSES:
            life_s = _BATCH_FILE_TTL_S
        expires_at = None if life_s is None else now + life_s
        record = UploadRecord(_clean_filename(request.filename), request.purpose, 0, now, expires_at)
        chunk_ttl_s = None if life_s is None else life_s + MAX_UPLOAD_S

        async def prepare() -> Sequence[Op]:
            """Return the operations that let the file appear and count it."""
            usage, usage_version = await self._load_usage(tenant)
            if source != "server" and self._exceeds_quota(usage, record):
                # the stored usage includes expired files: count before refusing
                usage = await self._count_usage(tenant)
                if self._exceeds_quota(usage, record):
                    raise self._quota_error()
            new_usage = TenantUsage(usage.files + 1, usage.size + record.size)
            return [
                Put(_record_key(tenant, file_id), encode_record(record), life_s, ABSENT),
                Put(_usage_key(tenant), encode_record(new_usage), expect=usage_version),
                *await commit(file_id),
            ]

        pending_key = _pending_key(tenant, file_id)
        async with new_blob(self._kv, _chunk_prefix(tenant, file_id), pending_key, ttl_s=chunk_ttl_s) as blob:
            record.size = await blob.write(self._bound_upload(data, source))
            await blob.publish(prepare)
        return _record_to_file(file_id, record)

    async def get(self, file_id: str, *, tenant: str) -> FileObject:
        return _record_to_file(file_id, decode_record(await self._load_entry(file_id, tenant), UploadRecord))

    async def list(self, params: FileListParams, *, tenant: str) -> Page[FileObject]:
        after = params.after or ""
        if after and not _FILE_ID.fullmatch(after):
            raise InvalidRequest("There is no file with this id.", param="after", code="invalid_value")
        last = _record_key(tenant, after) if after else ""
        reverse = params.order == "desc"
        files: list[FileObject] = []
        while True:
            after, before = ("", last) if reverse else (last, "")
            rows = await list_records(
                self._kv,
                _record_key(tenant, ""),
                UploadRecord,
                limit=_SCAN_LIMIT,
                after=after,
                before=before,
                reverse=reverse,
            )
            for key, record, _ in rows:
                if params.purpose is None or record.purpose == params.purpose:
                    files.append(_record_to_file(key.rpartition("/")[2], record))
            if len(files) > params.limit or len(rows) < _SCAN_LIMIT:
                return first_page(files, params.limit)
            last = rows[-1].key

    async def content(self, file_id: str, *, tenant: str) -> AsyncGenerator[bytes]:
        record = decode_record(await self._load_entry(file_id, tenant), UploadRecord)
        try:
            async with aclosing(read_chunks(self._kv, _chunk_prefix(tenant, file_id), record.size)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except StorageCorrupt:
            await self._load_entry(file_id, tenant)  # NotFound if it was deleted meanwhile
            raise

    async def delete(self, file_id: str, *, tenant: str) -> None:
        async def prepare() -> Sequence[Op]:
            entry = await self._load_entry(file_id, tenant)
            usage, usage_version = await self._load_usage(tenant)
            try:
                record = decode_record(entry, UploadRecord)
                new_usage = TenantUsage(max(0, usage.files - 1), max(0, usage.size - record.size))
            except StorageCorrupt:
                new_usage = await self._count_usage(tenant)
            return [
                Delete(_record_key(tenant, file_id), entry.version),
                Put(_usage_key(tenant), encode_record(new_usage), expect=usage_version),
                Put(_pending_key(tenant, file_id), encode_record(ABANDONED)),
            ]

        await write_prepared(self._kv, prepare)
        await self._delete_chunks(tenant, file_id)

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
        config = self._config
        return usage.size + record.size > config.max_tenant_bytes or usage.files + 1 > config.max_tenant_files

    def _quota_error(self) -> InvalidRequest:
        return InvalidRequest(
            f"Your files would exceed {self._config.max_tenant_bytes} bytes or "
            f"{self._config.max_tenant_files} files. Delete some first.",
            param="file",
            code="storage_quota_exceeded",
        )

    async def _load_usage(self, tenant: str) -> tuple[TenantUsage, int]:
        """Return the usage and the version of its record; a damaged record is counted again."""
        entry = await self._kv.get(_usage_key(tenant))
        if entry is None:
            return TenantUsage(), ABSENT
        with skipping_damaged(self._kv, _usage_key(tenant), TenantUsage.__name__):
            return decode_record(entry, TenantUsage), entry.version
        return await self._count_usage(tenant), entry.version

    async def _count_usage(self, tenant: str) -> TenantUsage:
        sizes = [row.record.size async for row in scan_records(self._kv, _record_key(tenant, ""), UploadRecord)]
        return TenantUsage(len(sizes), sum(sizes))

    async def _load_entry(self, file_id: str, tenant: str) -> Entry:
        entry = await self._kv.get(_record_key(tenant, file_id)) if _FILE_ID.fullmatch(file_id) else None
        if entry is None:
            raise _file_not_found(file_id)
        return entry

    async def _delete_chunks(self, tenant: str, file_id: str) -> None:
        """Delete the chunks of a file that has no record, and then its pending key."""
        await delete_blob(self._kv, _chunk_prefix(tenant, file_id), _pending_key(tenant, file_id))

    async def _sweep_pending(self) -> None:
        """Delete the chunks of uploads and deletions whose process died. One whose pending key is damaged stays."""
        async for key, started_at, _ in scan_records(self._kv, PENDING_PREFIX, float):
            if time.time() - started_at > 2 * MAX_UPLOAD_S:
                tenant, _, file_id = key.removeprefix(PENDING_PREFIX).partition("/")
                await self._delete_chunks(tenant, file_id)


def _clean_filename(filename: str) -> str:
    clean = _UNSAFE_CHARS.sub("", filename[:4096]).replace("\\", "/")
    return PurePosixPath(clean).name.strip()[-_MAX_NAME_CHARS:] or "file"


def _record_to_file(file_id: str, record: UploadRecord) -> FileObject:
    fields = {
        "id": file_id,
        "object": "file",
        "bytes": record.size,
        "created_at": int(record.created_at),
        "expires_at": None if record.expires_at is None else int(record.expires_at),
        "filename": record.name,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }
    # the SDK's object lacks a purpose that its own uploads may have, `evals`
    file = FileObject.model_validate({**fields, "purpose": "user_data"})
    return file.model_copy(update={"purpose": record.purpose})


def _record_key(tenant: str, file_id: str) -> str:
    return f"{tenant}/file/{file_id}"


def _chunk_prefix(tenant: str, file_id: str) -> str:
    return f"{tenant}/file_piece/{file_id}/"


def _usage_key(tenant: str) -> str:
    return f"{tenant}/file_usage"


def _pending_key(tenant: str, file_id: str) -> str:
    return f"{PENDING_PREFIX}{tenant}/{file_id}"


def _file_not_found(file_id: str) -> NotFound:
    match = _FILE_ID.search(file_id)
    return NotFound(f"No such File object: {match[0] if match else 'the id is not one of a file'}.", param="id")
