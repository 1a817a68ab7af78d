"""StoreProbe: finds out for the readiness probe whether the store answers, at most once a second."""

import asyncio
from typing import Final

from apis.errors import StackError
from apis.storage.kv_store import KVStore

_MAX_AGE_S: Final = 1.0
"""Seconds for which an outcome is reused: probes need no key, and must not load the store."""
_TIMEOUT_S: Final = 1.0
_PROBE_KEY: Final = "/readyz"


class StoreProbe:
    """Reads one key that no record has. Probes that come at the same time share one read."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._checked_at = float("-inf")
        self._failure = ""
        self._lock = asyncio.Lock()

    async def find_failure(self) -> str:
        """Return why the store cannot be used; empty if it can."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() - self._checked_at >= _MAX_AGE_S:
                self._failure = await self._read()
                self._checked_at = loop.time()
            return self._failure

    async def _read(self) -> str:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._store.get_many([_PROBE_KEY])
        except TimeoutError:
            return f"The store did not answer within {_TIMEOUT_S:g} s."
        except StackError as exc:
            return exc.message
        return ""
