"""KeyCache: callers in memory for at most a second, so that a request pays for no read of the store."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from apis.accounts.accounts import MAX_KEY_AGE_S, Caller
from apis.errors import StackError

_REFRESH_AGE_S: Final = MAX_KEY_AGE_S / 2
"""Age from which a key that is in use is read again while requests still go on with the older answer."""
_MAX_ENTRIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class _CachedCaller:
    caller: Caller
    read_at: float


class KeyCache:
    """Callers by the digest of their key. `read` reads one from the store.

    An answer counts from the moment at which its read began, so no one is admitted later than MAX_KEY_AGE_S after a
    revocation was written. A key is read once at a time, however many requests wait for it. Keys that no one has are
    not stored here: a flood of them evicts nothing.
    """

    def __init__(self, read: Callable[[bytes], Awaitable[Caller | None]]) -> None:
        self._read = read
        self._entries: dict[bytes, _CachedCaller] = {}
        self._reads: dict[bytes, asyncio.Task[Caller | None]] = {}

    async def load(self, digest: bytes) -> Caller | None:
        """Return the caller whose key has this digest. Raises StoreUnavailable."""
        entry = self._entries.get(digest)
        if entry is not None:
            age_s = time.monotonic() - entry.read_at
            if age_s < MAX_KEY_AGE_S:
                if age_s >= _REFRESH_AGE_S:
                    self._start_read(digest)
                return entry.caller
        return await asyncio.shield(self._start_read(digest))

    async def close(self) -> None:
        """Cancel the reads that run."""
        tasks = [*self._reads.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start_read(self, digest: bytes) -> "asyncio.Task[Caller | None]":
        task = self._reads.get(digest)
        if task is None:
            task = self._reads[digest] = asyncio.create_task(self._refresh(digest))
            task.add_done_callback(_take_error)
        return task

    async def _refresh(self, digest: bytes) -> Caller | None:
        read_at = time.monotonic()
        try:
            caller = await self._read(digest)
        finally:
            del self._reads[digest]
        self._entries.pop(digest, None)
        if caller is not None:
            if len(self._entries) >= _MAX_ENTRIES:
                del self._entries[next(iter(self._entries))]
            self._entries[digest] = _CachedCaller(caller, read_at)
        return caller


def _take_error(task: "asyncio.Task[Caller | None]") -> None:
    """Read the error of a refresh that no request waits for; requests meet it themselves once the answer is too old."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StackError):
        raise error
