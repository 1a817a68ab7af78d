"""A SQLite store that counts the rows that its calls return and write, and their bytes, by tenant."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

from apis.storage.kv_store import Entry, Op, Put
from providers.kv_store.sqlite import SQLite


class CountingSQLite(SQLite):
    """`rows` are those of all stores of this process, by the part of their keys before the first slash, and `sizes`
    the bytes of their values."""

    class Config(SQLite.Config):
        pass

    rows: ClassVar[Counter[str]] = Counter()
    sizes: ClassVar[Counter[str]] = Counter()

    def _count(self, keys: Iterable[str]) -> None:
        self.rows.update(key.partition("/")[0] for key in keys)

    def _measure(self, values: Iterable[tuple[str, bytes]]) -> None:
        for key, value in values:
            self.sizes[key.partition("/")[0]] += len(value)

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        entries = await super().get_many(keys)
        self._count(keys)
        self._measure((key, entry.value) for key, entry in zip(keys, entries, strict=True) if entry is not None)
        return entries

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        self._count(op.key for op in ops)
        self._measure((op.key, op.value) for op in ops if isinstance(op, Put))
        return await super().write(ops, durable=durable)

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
        rows = await super().scan(prefix, after=after, before=before, limit=limit, reverse=reverse, max_bytes=max_bytes)
        self._count([prefix, *(key for key, _ in rows)])
        self._measure((key, entry.value) for key, entry in rows)
        return rows
