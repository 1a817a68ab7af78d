"""The objects of one blob, and the record that says how many they are and what is in them."""

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Final

import msgspec

from apis.errors import StorageCorrupt
from apis.fair_share import FairShare, Place
from apis.storage.kv_store import ABSENT, Op, Put
from apis.storage.records import encode_record
from providers.files.objects import Objects
from providers.files.recorded import MAX_UPLOAD_S

PIECE_BYTES: Final = 1024 * 1024
"""Bytes that have one checksum, and are read at a time."""
OBJECT_BYTES: Final = 8 * PIECE_BYTES
"""Bytes of an object, the last one of a blob aside: a multiple of PIECE_BYTES."""
_GUARD_TTL_S: Final = 3 * MAX_UPLOAD_S
_READS: Final = 2
"""Reads of a piece whose checksum is wrong: it may have been damaged on its way."""
_PLAIN_TENANT: Final = re.compile(r"[a-z0-9_-]{1,200}")
_OBJECT_NAME: Final = re.compile(r"(t|x[0-9]*)-([a-z0-9_/-]*)/([a-z]+[-_][0-9a-f]{44})/[0-9]{6}")
_FOLDER_CHARS: Final = 200
"""Characters in the name of a folder: file systems take 255 bytes."""


class BlobRecord(msgspec.Struct, omit_defaults=True):
    """The bytes of one blob: their number, those of one object, and the CRC-32 of each PIECE_BYTES. `object_store` is
    the id of their store; `file_id` is the file that they are a part of, empty for a part of a pending upload."""

    object_store: str
    size: int
    object_bytes: int
    checksums: list[int]
    file_id: str = ""


class NewObjects:
    """The objects of a new blob. Each is written whole, by one request, once it is full."""

    def __init__(self, objects: Objects, writes: FairShare, tenant: str, blob_id: str, record: BlobRecord) -> None:
        """`writes` are the objects that this process holds at a time while they are written. `record` is the one of a
        blob without bytes."""
        self.record = record
        self._objects = objects
        self._writes = writes
        self._tenant = tenant
        self._blob_id = blob_id
        self._folder = blob_folder(tenant, blob_id)

    @property
    def guard_ttl_s(self) -> float | None:
        """Seconds after which the guard of the objects expires."""
        return _GUARD_TTL_S

    def build_ops(self, file_id: str, life_s: float | None) -> Sequence[Op]:
        """Return the operations that store the record of the blob, and the blobs of the file if its id is another."""
        record = msgspec.structs.replace(self.record, file_id=file_id)
        put = Put(blob_key(self._tenant, self._blob_id), encode_record(record), life_s, ABSENT)
        if file_id in ("", self._blob_id):
            return [put]
        return [put, Put(blobs_key(self._tenant, file_id), encode_record([self._blob_id]), life_s)]

    async def write(self, data: AsyncIterable[bytes]) -> int:
        """Write the objects; returns the sum of their sizes in bytes."""
        pending, number = bytearray(), 0
        place: Place | None = None
        try:
            async for received in data:
                rest = memoryview(received)
                while rest:
                    place = place or await self._writes.acquire(self._tenant)
                    room = self.record.object_bytes - len(pending)
                    pending += rest[:room]
                    rest = rest[room:]
                    if len(pending) == self.record.object_bytes:
                        await self._put(number, pending)
                        pending, number = bytearray(), number + 1
                        place.release()
                        place = None
            if pending:
                await self._put(number, pending)
        finally:
            if place is not None:
                place.release()
        return self.record.size

    def read(self) -> AsyncGenerator[bytes]:
        """Yield what was written. Raises StorageCorrupt."""
        return read_objects(self._objects, self._folder, self.record)

    async def delete(self) -> None:
        """Delete the objects."""
        await self._objects.delete_folder(self._folder)

    async def _put(self, number: int, data: bytearray) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            self.record.checksums.append(zlib.crc32(memoryview(data)[start : start + PIECE_BYTES]))
            await asyncio.sleep(0)
        await self._objects.put(f"{self._folder}/{number:06d}", data)
        self.record.size += len(data)


async def read_objects(objects: Objects, folder: str, record: BlobRecord) -> AsyncGenerator[bytes]:
    """Yield the bytes of a blob in pieces, the next one of which is read meanwhile. Raises StorageCorrupt for one that
    is absent or damaged."""
    count = len(record.checksums)
    if count != -(-record.size // PIECE_BYTES):
        raise StorageCorrupt
    next_piece = None
    try:
        for number in range(count):
            piece = await (next_piece or _read_piece(objects, folder, record, number))
            next_piece = (
                asyncio.ensure_future(_read_piece(objects, folder, record, number + 1)) if number + 1 < count else None
            )
            yield piece
    finally:
        if next_piece is not None:
            next_piece.cancel()
            await asyncio.gather(next_piece, return_exceptions=True)


async def _read_piece(objects: Objects, folder: str, record: BlobRecord, number: int) -> bytes:
    offset = number * PIECE_BYTES
    size = min(PIECE_BYTES, record.size - offset)
    start = offset % record.object_bytes
    for _ in range(_READS):
        try:
            piece = await objects.get_range(f"{folder}/{offset // record.object_bytes:06d}", start, start + size)
        except FileNotFoundError:
            break
        if len(piece) == size and zlib.crc32(piece) == record.checksums[number]:
            return piece
    raise StorageCorrupt("The content cannot be read: a part of it is missing or damaged.")


def blob_key(tenant: str, blob_id: str) -> str:
    """Return the key of the record of a blob."""
    return f"{tenant}/file_object/{blob_id}"


def blobs_key(tenant: str, file_id: str) -> str:
    """Return the key of the list of the blobs of a file."""
    return f"{tenant}/file_blobs/{file_id}"


def tenant_folder(tenant: str) -> str:
    """Return the folder of a tenant, which is different for each also where names differ in case alone, and which is in
    no folder of another one."""
    if _PLAIN_TENANT.fullmatch(tenant):
        return f"t-{tenant}"
    digits = tenant.encode().hex()
    folders = [digits[start : start + _FOLDER_CHARS] for start in range(0, len(digits), _FOLDER_CHARS)]
    return f"x{len(folders) if len(folders) > 1 else ''}-{'/'.join(folders)}"


def blob_folder(tenant: str, blob_id: str) -> str:
    """Return the folder of the objects of a blob."""
    return f"{tenant_folder(tenant)}/{blob_id}"


def parse_folder(name: str) -> tuple[str, str] | None:
    """Return the tenant and the blob of an object by its name; None if it is not one of a blob."""
    match = _OBJECT_NAME.fullmatch(name)
    if match is None:
        return None
    try:
        tenant = match[2] if match[1] == "t" else bytes.fromhex(match[2].replace("/", "")).decode()
    except ValueError:
        return None
    return (tenant, match[3]) if tenant_folder(tenant) == f"{match[1]}-{match[2]}" else None
