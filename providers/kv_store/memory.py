"""Memory: a KVStore inside this process, for tests, demos and stacks without lasting state."""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import Field

from apis.errors import StoreUnavailable
from apis.storage.kv_store import ABSENT, MEASURE_ROWS, Entry, KVStore, Op, Put
from providers.kv_store.checks import build_quota, encode_key, encode_ops, scan_range

ROW_OVERHEAD_BYTES = 300
"""Bytes that Python uses for a row in addition to its key and value: 272 when measured."""


class _Row(NamedTuple):
    entry: Entry
    expires: float | None


class Memory(KVStore):
    """A store that lives as long as the object, in one process."""

    class Config(KVStore.Config):
        """`max_bytes` bounds keys, values and their bookkeeping together. A full store refuses writes; with
        `evict_responses` it first deletes stored responses, the oldest of all tenants first, until there is room."""

        max_bytes: int = Field(default=256 * 1024 * 1024, gt=0)
        evict_responses: bool = False

    def __init__(self, config: Config) -> None:
        # not the wall clock, which can be set: leases would end too early or too late
        self.now: Callable[[], float] = time.monotonic
        self.quota = build_quota(self, config.max_tenant_bytes)
        self._max_bytes = config.max_bytes
        self._evicts = config.evict_responses
        self._rows: dict[bytes, _Row] = {}
        self._sorted_keys: list[bytes] = []
        self._evictable_keys: dict[bytes, None] = {}
        """The keys of the kinds that may be evicted, in the order of their last writes."""
        self._next_expiry = math.inf
        self._used_bytes = 0
        self._version = 0

    async def close(self) -> None:
        if self.quota is not None:
            await self.quota.close()

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        now = self.now()
        return [self._live_entry(encode_key(key), now) for key in keys]

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        encoded = encode_ops(ops)
        while True:
            now = self.now()
            for key, op in encoded.items():
                if op.expect is not None and op.expect != self._version_of(key, now):
                    return None
            if self._fits(encoded):
                break
            await self._make_room(encoded)
        self._version += 1
        versions = [self._apply(key, op, now) for key, op in encoded.items()]
        self.count_write(ops)
        return versions

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
        low, high = scan_range(prefix, after, before, limit)
        positions = range(bisect_left(self._sorted_keys, low), bisect_left(self._sorted_keys, high))
        now = self.now()
        rows: list[tuple[str, Entry]] = []
        size = 0
        for position in reversed(positions) if reverse else positions:
            key = self._sorted_keys[position]
            if len(rows) == limit or (max_bytes is not None and size > max_bytes):
                break
            if (entry := self._live_entry(key, now)) is not None:
                rows.append((key.decode(), entry))
                size += len(entry.value)
        return rows

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        low, high = scan_range(prefix, after, "", MEASURE_ROWS)
        start, end = bisect_left(self._sorted_keys, low), bisect_left(self._sorted_keys, high)
        keys = self._sorted_keys[start : min(end, start + MEASURE_ROWS)]
        size = sum(len(key) + len(self._rows[key].entry.value) for key in keys)
        return size, keys[-1].decode() if keys else ""

    async def sweep(self) -> int:
        now = self.now()
        expired = [key for key in self._sorted_keys if self._live_entry(key, now) is None]
        for key in expired:
            self._used_bytes -= _row_bytes(key, self._rows.pop(key).entry.value)
            self._evictable_keys.pop(key, None)
        self._sorted_keys = [key for key in self._sorted_keys if key in self._rows]
        self._next_expiry = min(
            (row.expires for row in self._rows.values() if row.expires is not None), default=math.inf
        )
        return len(expired)

    async def _make_room(self, ops: dict[bytes, Op]) -> None:
        """Remove what has expired, or else what may be evicted and was written longest ago. Raises StoreUnavailable
        where nothing is left to remove."""
        if self._next_expiry <= self.now():
            await self.sweep()
            return
        if self.eviction is None or not self._evictable_keys or _added_bytes(ops) > self._max_bytes:
            raise StoreUnavailable("The store is full.")
        key = next(iter(self._evictable_keys))
        del self._evictable_keys[key]  # if it cannot be deleted, the next write takes another one
        await self.eviction.delete(key.decode())

    def _live_entry(self, key: bytes, now: float) -> Entry | None:
        row = self._rows.get(key)
        return None if row is None or (row.expires is not None and row.expires <= now) else row.entry

    def _version_of(self, key: bytes, now: float) -> int:
        entry = self._live_entry(key, now)
        return ABSENT if entry is None else entry.version

    def _fits(self, ops: dict[bytes, Op]) -> bool:
        added = _added_bytes(ops)
        freed = sum(_row_bytes(key, self._rows[key].entry.value) for key in ops if key in self._rows)
        return added <= freed or self._used_bytes + added - freed <= self._max_bytes

    def _apply(self, key: bytes, op: Op, now: float) -> int:
        old = self._rows.pop(key, None)
        if old is not None:
            self._used_bytes -= _row_bytes(key, old.entry.value)
            self._evictable_keys.pop(key, None)
        if not isinstance(op, Put):
            if old is not None:
                del self._sorted_keys[bisect_left(self._sorted_keys, key)]
            return ABSENT
        expires = None if op.ttl_s is None else now + op.ttl_s
        self._rows[key] = _Row(Entry(op.value, self._version), expires)
        if expires is not None and expires < self._next_expiry:
            self._next_expiry = expires
        if self._evicts and self.eviction is not None and _kind(key) in self.eviction.kinds:
            self._evictable_keys[key] = None
        self._used_bytes += _row_bytes(key, op.value)
        if old is None:
            insort(self._sorted_keys, key)
        return self._version


def _kind(key: bytes) -> str:
    return key.decode().partition("/")[2].partition("/")[0]


def _added_bytes(ops: dict[bytes, Op]) -> int:
    return sum(_row_bytes(key, op.value) for key, op in ops.items() if isinstance(op, Put))


def _row_bytes(key: bytes, value: bytes) -> int:
    return ROW_OVERHEAD_BYTES + len(key) + len(value)
