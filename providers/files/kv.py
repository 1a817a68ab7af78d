"""KV: files in the stack's own KVStore, in pieces that any store holds."""

import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Final

import msgspec
from openai.types import FileObject
from pydantic import Field

from apis.errors import InvalidRequest, NotFound, Overloaded, PayloadTooLarge, StackError, StoreUnavailable
from apis.files import CreateFile, FileListParams, Files, Page
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put

CHUNK_BYTES: Final = 256 * 1024
MAX_UPLOAD_S: Final = 3600.0
"""No upload takes longer; what one has left behind for longer than that may be swept."""
PENDING_PREFIX: Final = "~file_loose/"
"""No tenant has such a name."""

_DELETE_BATCH: Final = 16
_SCAN_LIMIT: Final = 1000
_MAX_ATTEMPTS: Final = 50
_BATCH_FILE_TTL_S: Final = 2592000
_MAX_NAME_CHARS: Final = 255
_FILE_ID: Final = re.compile(r"file-[0-9a-f]{44}")
_UNSAFE_CHARS: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


class UploadRecord(msgspec.Struct, omit_defaults=True, rename={"created_at": "at"}):
    """What is known of a file; `at` and `expires_at` are seconds since the epoch."""

    name: str
    purpose: str
    size: int
    created_at: float
    expires_at: float | None = None


class TenantUsage(msgspec.Struct):
    """A tenant's share, as the sum of its records."""

    files: int = 0
    size: int = 0


_decode_record = msgspec.json.Decoder(UploadRecord).decode
_decode_usage = msgspec.json.Decoder(TenantUsage).decode
_encode = msgspec.json.encode


class KV(Files):
    """Files up to tens of megabytes, shared by all workers that share the store, and gone from it when deleted.

    Ids hold the time they were made, so that the order of the keys is that of the list. Bytes are written before
    their record and deleted after it; a loose key remembers them in between, whoever dies then.
    """

    class Config(Provider.Config):
        """`max_tenant_bytes` and `max_tenant_files` bound what each tenant may keep at a time."""

        max_file_bytes: int = Field(default=32 * 1024 * 1024, ge=1, le=512 * 1024 * 1024)
        max_tenant_bytes: int = Field(default=1024 * 1024 * 1024, ge=1)
        max_tenant_files: int = Field(default=10_000, ge=1, le=1_000_000)

    def __init__(self, config: Config, kv_store: KVStore) -> None:
        self.now: Callable[[], float] = time.time
        self.max_file_bytes = config.max_file_bytes
        self._config = config
        self._kv = kv_store

    async def start(self) -> None:
        # A store that cannot be reached yet is no reason not to start: the next start sweeps.
        with suppress(StoreUnavailable):
            await self._sweep_pending()

    async def create(self, request: CreateFile, data: AsyncIterable[bytes], *, tenant: str) -> FileObject:
        now = self.now()
        file_id = f"file-{int(now * 1000):012x}{secrets.token_hex(16)}"
        life_s = request.expires_after.seconds if request.expires_after else None
        if life_s is None and request.purpose == "batch":
            life_s = _BATCH_FILE_TTL_S
        loose = _pending_key(tenant, file_id)
        await self._kv.write([Put(loose, _encode(now))])
        try:
            size = await self._store_chunks(data, tenant, file_id, life_s)
            expires_at = None if life_s is None else now + life_s
            record = UploadRecord(_clean_filename(request.filename), request.purpose, size, now, expires_at)
            await self._publish(record, tenant, file_id, life_s)
        except BaseException:
            # Where this fails too, or is cancelled, the loose key stays for a later sweep.
            with suppress(StackError):
                await self._delete_chunks(tenant, file_id)
            raise
        return _record_to_file(file_id, record)

    async def get(self, file_id: str, *, tenant: str) -> FileObject:
        return _record_to_file(file_id, (await self._load_record(file_id, tenant))[0])

    async def list(self, params: FileListParams, *, tenant: str) -> Page[FileObject]:
        after = params.after or ""
        if after and not _FILE_ID.fullmatch(after):
            raise InvalidRequest("There is no file with this id.", param="after", code="invalid_value")
        last = f"{tenant}/file/{after}" if after else ""
        found: list[FileObject] = []
        while True:
            bounds = {"before" if params.order == "desc" else "after": last}
            entries = await self._kv.scan(
                f"{tenant}/file/", limit=_SCAN_LIMIT, reverse=params.order == "desc", **bounds
            )
            for key, entry in entries:
                record = _entry_to_record(entry)
                if params.purpose is None or record.purpose == params.purpose:
                    found.append(_record_to_file(key.rpartition("/")[2], record))
            if len(found) > params.limit or len(entries) < _SCAN_LIMIT:
                return Page(found[: params.limit], has_more=len(found) > params.limit)
            last = entries[-1][0]

    async def content(self, file_id: str, *, tenant: str) -> AsyncGenerator[bytes]:
        record, _ = await self._load_record(file_id, tenant)
        left = record.size
        for number in range(_chunk_count(record.size)):
            entry = await self._kv.get(_chunk_key(tenant, file_id, number))
            if entry is None:
                raise _file_not_found(file_id)
            left -= len(entry.value)
            yield entry.value
        assert left == 0  # the record is written after all pieces, with their sum

    async def delete(self, file_id: str, *, tenant: str) -> None:
        for _ in range(_MAX_ATTEMPTS):
            record, entry = await self._load_record(file_id, tenant)
            used, usage = await self._load_usage(tenant)
            left = TenantUsage(max(0, used.files - 1), max(0, used.size - record.size))
            ops: list[Op] = [
                Delete(_record_key(tenant, file_id), entry.version),
                Put(_usage_key(tenant), _encode(left), expect=usage),
                Put(_pending_key(tenant, file_id), _encode(0.0)),
            ]
            if await self._kv.write(ops) is not None:
                return await self._delete_chunks(tenant, file_id)
        raise _too_many_changes()

    async def _store_chunks(
        self, data: AsyncIterable[bytes], tenant: str, file_id: str, lifetime_s: float | None
    ) -> int:
        """Write the pieces; returns the sum of their bytes."""
        ttl_s = None if lifetime_s is None else lifetime_s + MAX_UPLOAD_S
        until = time.monotonic() + MAX_UPLOAD_S
        pending = bytearray()
        size = number = 0
        async for some in data:
            size += len(some)
            if size > self.max_file_bytes:
                raise PayloadTooLarge(f"The file is larger than {self.max_file_bytes} bytes.", param="file")
            if time.monotonic() > until:
                raise InvalidRequest("The upload took too long.", param="file")
            pending += some
            while len(pending) >= CHUNK_BYTES:
                await self._kv.write([_put_chunk(tenant, file_id, number, bytes(pending[:CHUNK_BYTES]), ttl_s)])
                del pending[:CHUNK_BYTES]
                number += 1
        if pending:
            await self._kv.write([_put_chunk(tenant, file_id, number, bytes(pending), ttl_s)])
        return size

    async def _publish(self, record: UploadRecord, tenant: str, file_id: str, lifetime_s: float | None) -> None:
        """In one step: the file is there, counts, and its bytes are no longer loose."""
        for _ in range(_MAX_ATTEMPTS):
            used, usage = await self._load_usage(tenant)
            if self._exceeds_quota(used, record):
                # Files that have expired still count: count anew before refusing.
                used = await self._count_usage(tenant)
                if self._exceeds_quota(used, record):
                    raise InvalidRequest(
                        f"Your files would exceed {self._config.max_tenant_bytes} bytes or "
                        f"{self._config.max_tenant_files} files. Delete some first.",
                        param="file",
                        code="storage_quota_exceeded",
                    )
            total = TenantUsage(used.files + 1, used.size + record.size)
            ops: list[Op] = [
                Put(_record_key(tenant, file_id), _encode(record), lifetime_s, ABSENT),
                Put(_usage_key(tenant), _encode(total), expect=usage),
                Delete(_pending_key(tenant, file_id)),
            ]
            if await self._kv.write(ops) is not None:
                return
        raise _too_many_changes()

    def _exceeds_quota(self, usage: TenantUsage, record: UploadRecord) -> bool:
        config = self._config
        return usage.size + record.size > config.max_tenant_bytes or usage.files + 1 > config.max_tenant_files

    async def _load_usage(self, tenant: str) -> tuple[TenantUsage, int]:
        entry = await self._kv.get(_usage_key(tenant))
        return (TenantUsage(), ABSENT) if entry is None else (_decode_usage(entry.value), entry.version)

    async def _count_usage(self, tenant: str) -> TenantUsage:
        used = TenantUsage()
        last = ""
        while True:
            entries = await self._kv.scan(f"{tenant}/file/", after=last, limit=_SCAN_LIMIT)
            used = TenantUsage(
                used.files + len(entries), used.size + sum(_entry_to_record(entry).size for _, entry in entries)
            )
            if len(entries) < _SCAN_LIMIT:
                return used
            last = entries[-1][0]

    async def _load_record(self, file_id: str, tenant: str) -> tuple[UploadRecord, Entry]:
        entry = await self._kv.get(_record_key(tenant, file_id)) if _FILE_ID.fullmatch(file_id) else None
        if entry is None:
            raise _file_not_found(file_id)
        return _entry_to_record(entry), entry

    async def _delete_chunks(self, tenant: str, file_id: str) -> None:
        """Delete the pieces of a file that has no record, and then what remembers them."""
        prefix = f"{tenant}/file_piece/{file_id}/"
        while found := await self._kv.scan(prefix, limit=_DELETE_BATCH):
            await self._kv.write([Delete(key) for key, _ in found], durable=False)
        await self._kv.write([Delete(_pending_key(tenant, file_id))])

    async def _sweep_pending(self) -> None:
        """Delete the bytes of uploads and deletions that ended with their process."""
        last = ""
        while found := await self._kv.scan(PENDING_PREFIX, after=last, limit=_SCAN_LIMIT):
            for key, entry in found:
                _, tenant, file_id = key.split("/")
                if self.now() - msgspec.json.decode(entry.value, type=float) > 2 * MAX_UPLOAD_S:
                    await self._delete_chunks(tenant, file_id)
            last = found[-1][0]


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
    return FileObject.model_validate(fields)


def _entry_to_record(entry: Entry) -> UploadRecord:
    try:
        return _decode_record(entry.value)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def _chunk_count(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def _put_chunk(tenant: str, file_id: str, number: int, value: bytes, ttl_s: float | None) -> Put:
    return Put(_chunk_key(tenant, file_id, number), value, ttl_s)


def _record_key(tenant: str, file_id: str) -> str:
    return f"{tenant}/file/{file_id}"


def _chunk_key(tenant: str, file_id: str, number: int) -> str:
    return f"{tenant}/file_piece/{file_id}/{number:06d}"


def _usage_key(tenant: str) -> str:
    return f"{tenant}/file_usage"


def _pending_key(tenant: str, file_id: str) -> str:
    return f"{PENDING_PREFIX}{tenant}/{file_id}"


def _file_not_found(file_id: str) -> NotFound:
    shown: Sequence[str] = _FILE_ID.findall(file_id)[:1]
    return NotFound(f"No such File object: {shown[0] if shown else 'the id is not one of a file'}.", param="id")


def _too_many_changes() -> Overloaded:
    return Overloaded("Too many of your files change at once. Try again.")
