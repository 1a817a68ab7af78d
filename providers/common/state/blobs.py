"""Blobs: bytes of any length that appear in one step or not at all, in chunks that every store can hold or elsewhere.

A guard key exists from before the first byte until the blob is published. The write that publishes removes the guard,
and giving up replaces it, each on the condition that the guard has not changed. So only one of both can happen, also
where the outcome of a write is unknown, or where it happens after its caller has stopped waiting. Bytes are deleted
only after giving up. What a dead process has left is found by its guard.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from apis.errors import NotFound, StackError, StorageCorrupt, StoreUnavailable
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.records import delete_all, encode_record
from providers.common.state.change import write_prepared

CHUNK_BYTES: Final = 256 * 1024
_DELETE_BATCH: Final = 16
ABANDONED: Final = 0.0
"""The time of a guard whose blob will never be published."""


class BlobBytes(Protocol):
    """The bytes of one blob, wherever they are."""

    async def write(self, data: AsyncIterable[bytes]) -> int:
        """Write the bytes; returns their number."""
        ...

    async def delete(self) -> None:
        """Delete what was written of them."""
        ...


class StoredChunks:
    """The bytes of a blob in chunks of a KVStore, whose keys are `prefix` and a number."""

    def __init__(self, kv: KVStore, prefix: str, ttl_s: float | None = None) -> None:
        self.kv = kv
        self.prefix = prefix
        self.ttl_s = ttl_s

    async def write(self, data: AsyncIterable[bytes]) -> int:
        """Write the chunks; returns the sum of their sizes in bytes."""
        return await write_chunks(self.kv, self.prefix, data, ttl_s=self.ttl_s)

    async def delete(self) -> None:
        """Delete all chunks."""
        await delete_all(self.kv, self.prefix, page_size=_DELETE_BATCH)


class NewBlob:
    """A blob that is being written; `new_blob` makes one."""

    def __init__(self, kv: KVStore, content: BlobBytes, guard_key: str, ttl_s: float | None) -> None:
        self._kv = kv
        self._content = content
        self._guard_key = guard_key
        self._ttl_s = ttl_s
        self._guard_version = 0
        self._is_published = False

    async def begin(self, started_at: float, also: Sequence[Op]) -> bool:
        """Write the guard, and `also`; returns False, and writes nothing, if a condition of these does not hold."""
        guard = Put(self._guard_key, encode_record(started_at), self._ttl_s)
        versions = await self._kv.write([guard, *also])
        if versions is None:
            return False
        self._guard_version = versions[0]
        return True

    async def write(self, data: AsyncIterable[bytes]) -> int:
        """Write the bytes; returns their number."""
        return await self._content.write(data)

    async def publish(self, prepare: Callable[[], Awaitable[Sequence[Op]]]) -> None:
        """Write the operations of `prepare`, which let the blob appear; they are prepared again if a condition of
        theirs does not hold. A write that raised and happened all the same counts as written. Raises Overloaded."""

        async def prepare_all() -> Sequence[Op]:
            return [*await prepare(), Delete(self._guard_key, self._guard_version)]

        try:
            await write_prepared(self._kv, prepare_all)
        except StoreUnavailable:
            if await self.discard():
                raise
        self._is_published = True

    async def discard(self) -> bool:
        """Give up and delete the bytes; returns False, and deletes nothing, if the blob is published. A failure leaves
        the guard for a later sweep, and so does a cancellation."""
        if self._is_published:
            return False
        guard = Put(self._guard_key, encode_record(ABANDONED), self._ttl_s, self._guard_version)
        versions = await self._kv.write([guard])
        if versions is None:
            self._is_published = True
            return False
        self._guard_version = versions[0]
        await delete_blob(self._kv, self._content, self._guard_key)
        return True


@asynccontextmanager
async def new_blob(
    kv: KVStore, content: BlobBytes, guard_key: str, *, ttl_s: float | None = None, also: Sequence[Op] = ()
) -> AsyncGenerator[NewBlob]:
    """Write a blob, whose guard expires after `ttl_s`: from then on it cannot be published. It is discarded where the
    context ends with an exception before it was published, also a cancellation. `also` is written with the guard.
    Raises NotFound if a condition of these operations does not hold."""
    blob = NewBlob(kv, content, guard_key, ttl_s)
    if not await blob.begin(time.time(), also):
        raise NotFound("The subject of these bytes was changed or deleted meanwhile.")
    try:
        yield blob
    except BaseException:
        with suppress(StackError):
            await blob.discard()
        raise


async def write_chunks(kv: KVStore, prefix: str, data: AsyncIterable[bytes], *, ttl_s: float | None = None) -> int:
    """Write the data in chunks of CHUNK_BYTES; returns the sum of their sizes in bytes."""
    pending = bytearray()
    size = number = 0
    async for received in data:
        size += len(received)
        pending += received
        while len(pending) >= CHUNK_BYTES:
            await kv.write([Put(_chunk_key(prefix, number), bytes(pending[:CHUNK_BYTES]), ttl_s)])
            del pending[:CHUNK_BYTES]
            number += 1
    if pending:
        await kv.write([Put(_chunk_key(prefix, number), bytes(pending), ttl_s)])
    return size


async def read_chunks(kv: KVStore, prefix: str, size: int) -> AsyncGenerator[bytes]:
    """Yield the chunks of a blob of `size` bytes. Raises StorageCorrupt for one that is absent or damaged."""
    remaining_bytes = size
    for number in range(-(-size // CHUNK_BYTES)):
        entry = await kv.get(_chunk_key(prefix, number))
        if entry is None or len(entry.value) != min(CHUNK_BYTES, remaining_bytes):
            raise StorageCorrupt("The content cannot be read: a part of it is missing.")
        remaining_bytes -= len(entry.value)
        yield entry.value


async def delete_blob(kv: KVStore, content: BlobBytes, guard_key: str) -> None:
    """Delete the bytes of a blob that is not published any more, and then its guard."""
    await content.delete()
    await kv.write([Delete(guard_key)])


def _chunk_key(prefix: str, number: int) -> str:
    return f"{prefix}{number:06d}"
