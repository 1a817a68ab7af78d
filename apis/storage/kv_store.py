"""KVStore: an ordered map from text keys to bytes, shared by all workers, with expiry and compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from apis.provider import Provider

ABSENT: Final = 0
"""The version of a key that is not there: `Put(..., expect=ABSENT)` creates and never overwrites."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the version it got when it was written. Versions are positive, and a key never gets one twice,
    not even after it was deleted or has expired."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Put:
    """Set `key` to `value`. `ttl_s` seconds later the key is gone; None keeps it. `expect` demands a version."""

    key: str
    value: bytes
    ttl_s: float | None = None
    expect: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove `key`; no error when it is not there. `expect` demands a version."""

    key: str
    expect: int | None = None


Op = Put | Delete


class KVStore(Provider, ABC):
    """Keys are non-empty text without NUL, up to 1,024 bytes of UTF-8, ordered by their code points. Values are bytes.

    Promises, the same for every backend (tests/conformance/kv_store.py):
    - What a returned `write` did is seen by every later read of any client of the store.
    - An expired key is absent everywhere from the moment it expires, whether or not it has been swept.
    - No call waits for ever, and none is retried behind the caller's back: StoreUnavailable is raised when the store
      cannot be reached or cannot write, within the provider's time-out. A write that raised may have happened or not.
    - A cancelled call leaves the connection usable and never hands its answer to another call.
    """

    @abstractmethod
    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The entries of `keys`, in their order, None where absent. One round trip, seen at one moment."""

    @abstractmethod
    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        """Apply all `ops` in one atomic step, or none of them.

        Returns the new versions, in the order of `ops` (ABSENT for a Delete), or None when an `expect` did not
        hold: then nothing was changed. The same key twice in `ops` is a ValueError. With `durable`, a return means
        that the change survives the loss of power as far as the backend can promise it (SQLite: `synchronous=FULL`;
        PostgreSQL: `synchronous_commit`; Redis: what its own persistence is set to); without, it survives the end of
        this process, and the last moments before a loss of power may be missing.
        """

    @abstractmethod
    async def scan(
        self, prefix: str, *, after: str = "", before: str = "", limit: int = 1000, reverse: bool = False
    ) -> list[tuple[str, Entry]]:
        """Up to `limit` entries whose key begins with `prefix`, ordered by key, last first with `reverse`.

        `after` and `before` are whole keys and exclude themselves; empty means no bound. Seen at one moment.
        """

    @abstractmethod
    async def sweep(self) -> int:
        """Free the space of expired entries; returns how many. The stack calls it now and then."""

    async def get(self, key: str) -> Entry | None:
        """The entry of `key`, or None."""
        return (await self.get_many((key,)))[0]

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None, durable: bool = True) -> int:
        """Set one key without condition; returns its version."""
        versions = await self.write((Put(key, value, ttl_s),), durable=durable)
        assert versions is not None  # nothing was expected, so nothing can have failed to hold
        return versions[0]
