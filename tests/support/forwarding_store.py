"""A store that forwards everything to another one: the base of stores that go wrong in one way."""

from collections.abc import Sequence

from apis.storage.kv_store import Entry, KVStore, Op


class ForwardingStore(KVStore):
    """Forwards every call to `store`."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        return await self._store.write(ops, durable=durable)

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
