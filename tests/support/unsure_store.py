"""A store whose client does not learn the outcome of one write: it happened, it was lost, or it happens later."""

import asyncio
from collections.abc import Sequence
from typing import Final

from apis.errors import StoreUnavailable
from apis.storage.kv_store import KVStore, Op, Put
from tests.support.forwarding_store import ForwardingStore

OUTCOMES: Final = ("applied", "lost", "late", "cancelled")


class UnsureStore(ForwardingStore):
    """Passes everything to `store`. The first write with a key below `watched_prefix` has the `outcome`: it is
    `applied` or `lost` and raises, is applied and then `cancelled`, or raises and is applied `late`, by `finish`."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
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
