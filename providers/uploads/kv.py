"""StoredUploads: uploads in parts, whose bytes the stack's Files keep and join to files.

    TENANT/upload/UPLOAD                 the upload; expires some time after it can no longer be completed
    TENANT/upload_part/UPLOAD/PART       the size of a part that is whole
    TENANT/upload_usage                  the bytes that the tenant's pending uploads have announced

Every key of an upload has the expiry of its upload, so that nothing remains of one that its client has abandoned or
whose process died. The upload is completed in the same write in which its file appears.
"""

import hashlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

import msgspec
from openai.types.file_object import FileObject
from openai.types.upload import Upload
from openai.types.uploads import UploadPart
from pydantic import Field

from apis.documents.files import CreateFile, FileExpiry, FileParts, Files, Purpose
from apis.errors import InvalidRequest, NotFound, PayloadTooLarge, RateLimited, StackError, StorageCorrupt
from apis.provider import Provider
from apis.storage.keys import new_id_key
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, delete_all, encode_record, scan_all
from apis.uploads import MAX_PARTS, CompleteUpload, CreateUpload
from providers.common.state.change import change_existing, write_prepared
from providers.common.state.scan import skipping_damaged

LIFETIME_S: Final = 3600
"""Seconds after which an upload can no longer be completed, as in OpenAI's API."""

_REMAINS_S: Final = 2 * LIFETIME_S
"""Seconds for which the keys of an upload are in the store: completing one may begin in its last second."""
_MAX_SENT_FACTOR: Final = 2
"""A client may send each byte this often: a part whose answer it did not get is sent again."""
_UPLOAD_ID: Final = re.compile(r"upload_[0-9a-f]{44}")
_PART_ID: Final = re.compile(r"part_[0-9a-f]{44}")


class PendingUpload(msgspec.Struct, omit_defaults=True):
    """The state of an upload. `sent_bytes` and `part_count` are of the parts that are whole; `digest` is of the list of
    parts that the file was joined from. Times are seconds since the epoch."""

    filename: str
    purpose: Purpose
    size: int
    created_at: float
    file_life_s: int | None = None
    status: Literal["pending", "completed", "cancelled"] = "pending"
    sent_bytes: int = 0
    part_count: int = 0
    file_id: str = ""
    digest: str = ""

    @property
    def expires_at(self) -> float:
        return self.created_at + LIFETIME_S


class UploadReservations(msgspec.Struct):
    """The announced bytes of a tenant's pending uploads and the times at which these expire, by id."""

    uploads: dict[str, tuple[int, float]]


class StoredUploads(Provider):
    """Uploads whose records are shared by all workers that share the store, and whose parts are joined to a file of
    the stack's Files. A tenant's id is unknown to every other tenant.

    Promises:
    - Parts may be added at the same time, on any worker, and sent again; only those that `complete` names count.
    - The file exists whole or not at all, and once, however often `complete` is called.
    - An upload that is not completed is gone, with its parts, when it has expired.
    """

    class Config(Provider.Config):
        """`max_part_bytes` bounds one part, and so one body; `max_pending` is the number of a tenant's uploads that are
        neither completed, nor cancelled, nor expired."""

        max_part_bytes: int = Field(default=64 * 1024 * 1024, ge=1, le=512 * 1024 * 1024)
        max_pending: int = Field(default=100, ge=1, le=10_000)

    def __init__(self, config: Config, kv_store: KVStore, files: Files) -> None:
        self.now: Callable[[], float] = time.time
        self.max_part_bytes = config.max_part_bytes
        self._config = config
        self._kv = kv_store
        self._files = files

    async def create(self, request: CreateUpload, *, tenant: str) -> Upload:
        """Begin an upload, which expires after an hour.

        Raises PayloadTooLarge for more bytes than a file may have, and InvalidRequest (`storage_quota_exceeded`) for
        more than the tenant may still store, uploads in progress included.
        """
        if request.bytes > self._files.max_joined_bytes:
            raise PayloadTooLarge(
                f"The file is larger than {self._files.max_joined_bytes} bytes: the limit is `files.max_joined_bytes`.",
                param="bytes",
            )
        await self._kv.require_room(tenant)
        upload_id = f"upload_{new_id_key()}"
        life_s = request.expires_after.seconds if request.expires_after else None
        upload = PendingUpload(request.filename, request.purpose, request.bytes, self.now(), life_s)

        async def prepare() -> Sequence[Op]:
            reserved, version = await self._load_reservations(tenant)
            if len(reserved.uploads) >= self._config.max_pending:
                message = f"{self._config.max_pending} of your uploads are pending already (`uploads.max_pending`)."
                raise RateLimited(f"{message} Complete or cancel some first.", retry_after_s=60)
            pending_bytes = sum(size for size, _ in reserved.uploads.values())
            await self._files.require_room(pending_bytes + request.bytes, tenant=tenant)
            reserved.uploads[upload_id] = (request.bytes, upload.expires_at)
            return [
                Put(_upload_key(tenant, upload_id), encode_record(upload), _REMAINS_S, ABSENT),
                _put_reservations(tenant, reserved, version),
            ]

        await write_prepared(self._kv, prepare)
        return _upload_to_wire(upload_id, upload)

    async def add_part(self, upload_id: str, data: AsyncIterable[bytes], *, tenant: str) -> UploadPart:
        """Store a part. Raises NotFound; PayloadTooLarge; InvalidRequest if the upload is not pending."""
        upload, _ = await self._load_pending(upload_id, tenant)
        part_id, now = f"part_{new_id_key()}", self.now()
        life_s = max(1.0, upload.created_at + _REMAINS_S - now)

        async def commit(size: int) -> Sequence[Op]:
            """Return the operations that count the part and store its size."""
            if not size:
                raise InvalidRequest("The part is empty.", param="data", code="invalid_value")
            put = await self._count_part(upload_id, size, tenant)
            return [put, Put(_part_key(tenant, upload_id, part_id), encode_record(size), life_s, ABSENT)]

        bounded = self._bound_part(data, _remaining_bytes(upload))
        await self._files.add_part(upload_id, part_id, bounded, tenant=tenant, life_s=life_s, commit=commit)
        return UploadPart(id=part_id, created_at=int(now), object="upload.part", upload_id=upload_id)

    async def complete(self, upload_id: str, request: CompleteUpload, *, tenant: str) -> Upload:
        """Join the parts and return the upload with its file, also when it was completed before by the same parts.

        Raises NotFound; InvalidRequest for an unknown part, for another number of bytes than was announced, for
        another MD5, and for an upload that is not pending.
        """
        digest = hashlib.sha256("\n".join(request.part_ids).encode()).hexdigest()
        upload, _ = await self._load(upload_id, tenant)
        if upload.status == "completed" and upload.digest == digest:
            return _upload_to_wire(upload_id, upload, await self._files.get(upload.file_id, tenant=tenant))
        self._require_pending(upload)
        sizes = await self._load_part_sizes(upload_id, request.part_ids, tenant)
        if sum(sizes) != upload.size:
            raise InvalidRequest(
                f"The parts have {sum(sizes)} bytes, and the upload was created for {upload.size}.",
                param="part_ids",
                code="invalid_value",
            )

        async def commit(file_id: str) -> Sequence[Op]:
            pending, entry = await self._load_pending(upload_id, tenant)
            completed = msgspec.structs.replace(pending, status="completed", file_id=file_id, digest=digest)
            return [Put(_upload_key(tenant, upload_id), encode_record(completed), _REMAINS_S, entry.version)]

        life_s = upload.file_life_s
        expiry = None if life_s is None else FileExpiry(anchor="created_at", seconds=life_s)
        new_file = CreateFile(filename=upload.filename, purpose=upload.purpose, expires_after=expiry)
        parts = FileParts(upload_id, dict(zip(request.part_ids, sizes, strict=True)), request.md5)
        try:
            file = await self._files.join_parts(new_file, parts, tenant=tenant, commit=commit)
        except StorageCorrupt:
            await self._load_pending(upload_id, tenant)  # an error of its own if the upload has ended meanwhile
            raise
        await self._forget_parts(upload_id, tenant)
        upload.status = "completed"
        return _upload_to_wire(upload_id, upload, file)

    async def cancel(self, upload_id: str, *, tenant: str) -> Upload:
        """End a pending upload and delete its parts. Raises NotFound; InvalidRequest if it is not pending."""

        def cancel(upload: PendingUpload) -> PendingUpload:
            self._require_pending(upload)
            return msgspec.structs.replace(upload, status="cancelled")

        key = _upload_key(tenant, _require_id(upload_id))
        upload = await change_existing(self._kv, key, PendingUpload, cancel, _not_found(), ttl_s=_REMAINS_S)
        await self._forget_parts(upload_id, tenant)
        return _upload_to_wire(upload_id, upload)

    async def _bound_part(self, data: AsyncIterable[bytes], max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the data of a part. Raises PayloadTooLarge or InvalidRequest as soon as it exceeds a limit."""
        size = 0
        async for received in data:
            size += len(received)
            if size > self.max_part_bytes:
                message = f"The part is larger than {self.max_part_bytes} bytes: the limit is `uploads.max_part_bytes`."
                raise PayloadTooLarge(message, param="data")
            if size > max_bytes:
                raise InvalidRequest(
                    "The parts have more bytes than the upload was created for.", param="data", code="invalid_value"
                )
            yield received

    async def _count_part(self, upload_id: str, size: int, tenant: str) -> Put:
        """Return the operation that adds one part to the upload. Raises InvalidRequest if it has no room for it."""
        upload, entry = await self._load_pending(upload_id, tenant)
        if size > _remaining_bytes(upload) or upload.part_count >= MAX_PARTS:
            raise InvalidRequest(
                f"The parts have more bytes than the upload was created for, or are more than {MAX_PARTS}.",
                param="data",
                code="invalid_value",
            )
        upload.sent_bytes += size
        upload.part_count += 1
        return Put(_upload_key(tenant, upload_id), encode_record(upload), _REMAINS_S, entry.version)

    async def _load_part_sizes(self, upload_id: str, part_ids: Sequence[str], tenant: str) -> list[int]:
        valid_ids = [part_id for part_id in part_ids if _PART_ID.fullmatch(part_id)]
        entries = await self._kv.get_many([_part_key(tenant, upload_id, part_id) for part_id in valid_ids])
        sizes = {part_id: decode_record(entry, int) for part_id, entry in zip(valid_ids, entries, strict=True) if entry}
        for index, part_id in enumerate(part_ids):
            if part_id not in sizes:
                raise InvalidRequest(
                    "The upload has no part with this id.", param=f"part_ids[{index}]", code="invalid_value"
                )
        if len(set(part_ids)) < len(part_ids):
            raise InvalidRequest("A part is named twice.", param="part_ids", code="invalid_value")
        return [sizes[part_id] for part_id in part_ids]

    async def _forget_parts(self, upload_id: str, tenant: str) -> None:
        """Delete the parts and the reservation of an upload that has ended. Both expire where this fails."""

        async def prepare() -> Sequence[Op]:
            reserved, version = await self._load_reservations(tenant)
            reserved.uploads.pop(upload_id, None)
            return [_put_reservations(tenant, reserved, version)]

        with suppress(StackError):
            prefix = _part_key(tenant, upload_id, "")
            part_ids = [key.removeprefix(prefix) async for key, _ in scan_all(self._kv, prefix)]
            await self._files.delete_parts(upload_id, part_ids, tenant=tenant)
            await delete_all(self._kv, prefix)
            await write_prepared(self._kv, prepare)

    async def _load_reservations(self, tenant: str) -> tuple[UploadReservations, int]:
        """Return the reservations that have not expired, and the version of their record. Those of a damaged record are
        lost: its uploads can be completed as far as there is room."""
        entry = await self._kv.get(_usage_key(tenant))
        if entry is None:
            return UploadReservations({}), ABSENT
        uploads, now = dict[str, tuple[int, float]](), self.now()
        with skipping_damaged(self._kv, _usage_key(tenant), UploadReservations.__name__):
            uploads = decode_record(entry, UploadReservations).uploads
        return UploadReservations({key: each for key, each in uploads.items() if each[1] > now}), entry.version

    async def _load(self, upload_id: str, tenant: str) -> tuple[PendingUpload, Entry]:
        entry = await self._kv.get(_upload_key(tenant, _require_id(upload_id)))
        if entry is None:
            raise _not_found()
        return decode_record(entry, PendingUpload), entry

    async def _load_pending(self, upload_id: str, tenant: str) -> tuple[PendingUpload, Entry]:
        upload, entry = await self._load(upload_id, tenant)
        self._require_pending(upload)
        return upload, entry

    def _require_pending(self, upload: PendingUpload) -> None:
        if upload.status != "pending":
            raise _not_pending_error(upload.status)
        if self.now() > upload.expires_at:
            raise _not_pending_error("expired")


def _upload_to_wire(upload_id: str, upload: PendingUpload, file: FileObject | None = None) -> Upload:
    return Upload.model_construct(
        id=upload_id,
        object="upload",
        bytes=upload.size,
        created_at=int(upload.created_at),
        expires_at=int(upload.expires_at),
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.status,
        file=file,
    )


def _remaining_bytes(upload: PendingUpload) -> int:
    return _MAX_SENT_FACTOR * upload.size - upload.sent_bytes


def _put_reservations(tenant: str, reservations: UploadReservations, version: int) -> Put:
    return Put(_usage_key(tenant), encode_record(reservations), _REMAINS_S, version)


def _not_pending_error(status: str) -> InvalidRequest:
    return InvalidRequest(f"The upload is {status}: it takes no parts.", param="upload_id", code="invalid_value")


def _require_id(upload_id: str) -> str:
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise _not_found()
    return upload_id


def _not_found() -> NotFound:
    return NotFound("No upload has this id.", param="upload_id")


def _upload_key(tenant: str, upload_id: str) -> str:
    return f"{tenant}/upload/{upload_id}"


def _part_key(tenant: str, upload_id: str, part_id: str) -> str:
    return f"{tenant}/upload_part/{upload_id}/{part_id}"


def _usage_key(tenant: str) -> str:
    return f"{tenant}/upload_usage"
