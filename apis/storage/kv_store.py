"""KVStore: an ordered map from text keys to bytes, shared by all workers, with expiry and compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from apis.provider import Provider

ABSENT: Final = 0
"""The version of an absent key: `Put(..., expect=ABSENT)` creates and never overwrites."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the version of its write. Versions are positive, and a key never has the same one twice, not even
    after it was deleted or has expired."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Put:
    """Set `key` to `value`. The key expires after `ttl_s` seconds, or never with None. `expect` requires a version."""

    key: str
    value: bytes
    ttl_s: float | None = None
    expect: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`; no error if it is absent. `expect` requires a version."""

    key: str
    expect: int | None = None


Op = Put | Delete


class KVStore(Provider, ABC):
    """Keys are non-empty text without NUL, up to 1,024 bytes of UTF-8, ordered by their code points. Values are bytes.

    Promises, the same for every backend (tests/conformance/kv_store.py):
    - After `write` has returned, every later read of any client of the store sees its changes.
    - An expired key is absent everywhere from the moment it expires, whether or not it has been swept.
    - Each call ends within the provider's time-out and is not retried: StoreUnavailable is raised when the store cannot
      be reached or cannot write. A write that raised may have happened or not.
    - A cancelled call leaves the connection usable and never returns its result to another call.
    """

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
        this process, and the last writes before a loss of power may be missing.
        """

    @abstractmethod
    async def scan(
        self, prefix: str, *, after: str = "", before: str = "", limit: int = 1000, reverse: bool = False
    ) -> list[tuple[str, Entry]]:
        """Return up to `limit` entries whose key begins with `prefix`, ordered by key, last first with `reverse`.

        `after` and `before` are whole keys and exclusive bounds; empty means no bound. The entries are one snapshot.
        """

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
