"""KVStore: an ordered map from text keys to bytes, shared by all workers, with expiry and compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final, NamedTuple

import msgspec
from pydantic import Field

from apis.errors import StorageCorrupt
from apis.provider import Provider
from apis.storage.quota import StorageQuota

ABSENT: Final = 0
"""The version of an absent key: `Put(..., expect=ABSENT)` creates and never overwrites."""

MAX_VALUE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the largest value; a larger one is refused before anything is written."""
STORED_OVERHEAD_BYTES: Final = 64
"""Bytes that a store may add to a value, at most: a scan with `max_bytes` counts them."""
_UNBOUNDED_BYTES: Final = 2**62
MEASURE_ROWS: Final = 10_000
"""Entries that one call of `measure` counts: some 10 ms of the store's time."""


class Entry:
    """A value and the version of its write. Versions are positive, and a key never has the same one twice, not even
    after it was deleted or has expired."""

    __slots__ = ("_value", "version")

    def __init__(self, value: bytes | None, version: int) -> None:
        """`value` is None where the stored bytes are damaged."""
        self._value = value
        self.version = version

    @property
    def value(self) -> bytes:
        """The value. Raises StorageCorrupt if the stored bytes are not the ones that were written: only the reader of
        the damaged entry fails, and the entry can still be listed, replaced and deleted."""
        if self._value is None:
            raise StorageCorrupt
        return self._value

    @property
    def max_stored_bytes(self) -> int:
        """The bytes that the value takes in a store, at most."""
        return MAX_VALUE_BYTES if self._value is None else len(self._value) + STORED_OVERHEAD_BYTES

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and (self._value, self.version) == (other._value, other.version)

    def __hash__(self) -> int:
        return hash((self._value, self.version))

    def __repr__(self) -> str:
        return f"Entry({self._value!r}, {self.version})"


class Put(msgspec.Struct, frozen=True):
    """Set `key` to `value`. The key expires after `ttl_s` seconds, or never with None. `expect` requires a version."""

    key: str
    value: bytes
    ttl_s: float | None = None
    expect: int | None = None


class Delete(msgspec.Struct, frozen=True):
    """Delete `key`; no error if it is absent. `expect` requires a version."""

    key: str
    expect: int | None = None


Op = Put | Delete


class Eviction(NamedTuple):
    """The entries that a full store may lose: those of `kinds`, which is the part of a key after the tenant. `delete`
    deletes one by its key, with all that belongs to it; what others need of it stays."""

    kinds: frozenset[str]
    delete: Callable[[str], Awaitable[None]]


class KVStore(Provider, ABC):
    """Keys are non-empty text without NUL, up to 1,024 bytes of UTF-8, ordered by their code points. Values are bytes,
    up to MAX_VALUE_BYTES. The part of a key before the first slash is the tenant that its bytes are counted for.

    Promises, the same for every backend (tests/conformance/kv_store.py):
    - After `write` has returned, every later read of any client of the store sees its changes.
    - An expired key is absent everywhere from the moment it expires, whether or not it has been swept.
    - Each call ends within the provider's time-out and is not retried: StoreUnavailable is raised when the store cannot
      be reached or cannot write. A write that raised may have happened or not.
    - A cancelled call leaves the connection usable and never returns its result to another call.
    - A value whose stored bytes have changed is never returned: reading it from its entry raises StorageCorrupt.
    """

    spans_machines: ClassVar[bool] = False
    """Processes on several machines can share the store."""

    class Config(Provider.Config):
        """`max_tenant_bytes` bounds the bytes of one tenant's keys and values (None: no bound). Each process counts its
        own writes and measures the store now and then, so several processes may exceed it by a sixteenth each."""

        max_tenant_bytes: int | None = Field(default=10 * 1024 * 1024 * 1024, ge=1)

    quota: StorageQuota | None = None
    eviction: Eviction | None = None
    """The eviction that a store uses whose settings ask for it."""

    @abstractmethod
    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return the entries of `keys`, in their order, None where absent: one snapshot, in one round trip."""

    @abstractmethod
    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        """Apply all `ops` in one atomic step, or none of them.

        Returns the new versions, in the order of `ops` (ABSENT for a Delete), or None if an `expect` did not hold:
        then nothing was changed. The same key twice in `ops` is a ValueError. With `durable`, a return means
        that the change survives the loss of power as far as the backend can promise it (SQLite: `synchronous=FULL`;
        PostgreSQL: `synchronous_commit`; Redis: what its own persistence is set to); without, it survives the end of
        this process, and the last writes before a loss of power may be missing. Raises StoredValueTooLarge.
        """

    @abstractmethod
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
        """Return up to `limit` entries whose key begins with `prefix`, ordered by key, last first with `reverse`.

        `after` and `before` are whole keys and exclusive bounds; empty means no bound. The entries are one snapshot.
        With `max_bytes`, the last entry is the first one with which the values, as stored, exceed that many bytes.
        """

    @abstractmethod
    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        """Return the bytes of the keys and values of up to MEASURE_ROWS entries after `after` whose key begins with
        `prefix`, and the last of these keys, empty if there are no more. Entries that have expired may be counted."""

    @abstractmethod
    async def sweep(self) -> int:
        """Free the space of expired entries; returns their number. The stack calls it regularly."""

    async def get(self, key: str) -> Entry | None:
        """Return the entry of `key`, or None."""
        return (await self.get_many((key,)))[0]

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None, durable: bool = True) -> int:
        """Set one key without condition; returns its version."""
        versions = await self.write((Put(key, value, ttl_s),), durable=durable)
        assert versions is not None  # a write without conditions is never refused
        return versions[0]

    def count_write(self, ops: Sequence[Op]) -> None:
        """Count a write that has happened for the quota of its tenants; each backend calls this at its end."""
        if self.quota is not None:
            self.quota.add((op.key, len(op.value)) for op in ops if isinstance(op, Put))

    def bound_tenant(self, tenant: str, max_bytes: int | None) -> None:
        """Set a tenant's own bound of bytes in this process; None removes it."""
        if self.quota is None and max_bytes is not None:
            self.quota = StorageQuota(self, _UNBOUNDED_BYTES)
        if self.quota is not None:
            self.quota.bound(tenant, max_bytes)

    async def require_room(self, tenant: str) -> None:
        """Raise InvalidRequest with the code `storage_quota_exceeded` if the tenant has stored more than it may, or
        QuotaExceeded where its own bound is the smaller one. To be called before work whose result will be stored."""
        if self.quota is not None:
            await self.quota.require_room(tenant)
