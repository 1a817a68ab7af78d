"""KeyCache: callers, or projects, in memory for at most a second, so that a request pays for no read of the store."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from apis.accounts.accounts import MAX_KEY_AGE_S
from apis.errors import StackError
from providers.common.recent import RecentEntries

_REFRESH_AGE_S: Final = MAX_KEY_AGE_S / 2
"""Age from which a key that is in use is read again while requests still go on with the older answer."""
_MAX_ENTRIES: Final = 10_000


ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class _CachedValue(Generic[ValueT]):
    value: ValueT
    read_at: float


class KeyCache(Generic[ValueT]):
    """Callers by the digest of their key, or projects by their id. `read` reads one from the store.

    An answer counts from the moment at which its read began, so no one is admitted later than MAX_KEY_AGE_S after a
    revocation was written. A key is read once at a time, however many requests wait for it. Keys that no one has are
    not stored here: a flood of them evicts nothing.
    """

    def __init__(self, read: Callable[[bytes], Awaitable[ValueT | None]]) -> None:
        self._read = read
        self._entries = RecentEntries[bytes, _CachedValue[ValueT]](_MAX_ENTRIES)
        self._reads: dict[bytes, asyncio.Task[ValueT | None]] = {}

    async def load(self, digest: bytes) -> ValueT | None:
        """Return the value of the digest of a key, or of the id of a project. Raises StoreUnavailable."""
        entry = self._entries.get(digest)
        if entry is not None:
            age_s = time.monotonic() - entry.read_at
            if age_s < MAX_KEY_AGE_S:
                if age_s >= _REFRESH_AGE_S:
                    self._start_read(digest)
                return entry.value
        return await asyncio.shield(self._start_read(digest))

    async def close(self) -> None:
        """Cancel the reads that run."""
        tasks = [*self._reads.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start_read(self, digest: bytes) -> "asyncio.Task[ValueT | None]":
        task = self._reads.get(digest)
        if task is None:
            task = self._reads[digest] = asyncio.create_task(self._refresh(digest))
            task.add_done_callback(_take_error)
        return task

    async def _refresh(self, digest: bytes) -> ValueT | None:
        read_at = time.monotonic()
        try:
            value = await self._read(digest)
        finally:
            del self._reads[digest]
        if value is None:
            self._entries.pop(digest, None)
        else:
            self._entries[digest] = _CachedValue(value, read_at)
        return value


def _take_error(task: "asyncio.Task[Any]") -> None:
    """Read the error of a refresh that no request waits for; requests meet it themselves once the answer is too old."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StackError):
        raise error
