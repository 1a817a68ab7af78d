"""A store whose client does not learn the outcome of one write: it happened, it was lost, or it happens later."""

import asyncio
from collections.abc import Sequence
from typing import Final

from apis.errors import StoreUnavailable
from apis.storage.kv_store import Entry, KVStore, Op, Put

OUTCOMES: Final = ("applied", "lost", "late", "cancelled")


class UnsureStore(KVStore):
    """Passes everything to `store`. The first write with a key below `watched_prefix` has the `outcome`: it is
    `applied` or `lost` and raises, is applied and then `cancelled`, or raises and is applied `late`, by `finish`."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.watched_prefix = ""
        self.outcome = ""
        self._late_write: tuple[Sequence[Op], bool] | None = None

    def watch(self, prefix: str, outcome: str) -> None:
        """Give the next write of a key below the prefix this outcome."""
        self.watched_prefix, self.outcome = prefix, outcome

    async def finish(self) -> list[int] | None:
        """Apply the write that is late."""
        assert self._late_write is not None
        ops, durable = self._late_write
        return await self._store.write(ops, durable=durable)

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        is_watched = any(isinstance(op, Put) and op.key.startswith(self.watched_prefix) for op in ops)
        if not (self.outcome and is_watched):
            return await self._store.write(ops, durable=durable)
        outcome, self.outcome = self.outcome, ""
        if outcome in ("applied", "cancelled"):
            assert await self._store.write(ops, durable=durable) is not None
        if outcome == "late":
            self._late_write = ops, durable
        if outcome == "cancelled":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        raise StoreUnavailable("The answer was lost.")

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        return await self._store.get_many(keys)

    async def scan(
        self,
        prefix: str,
        *,
        after: str = "",
        before: str = "",
        limit: int = 1000,
        reverse: bool = False,
        max_bytes: int | None = None,
    ) -> list[tuple[str, Entry]]:
        return await self._store.scan(
            prefix, after=after, before=before, limit=limit, reverse=reverse, max_bytes=max_bytes
        )

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        return await self._store.measure(prefix, after=after)

    async def sweep(self) -> int:
        return await self._store.sweep()
