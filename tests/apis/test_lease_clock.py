"""The clock of a lease's holder starts before the write that makes the lease, and so never after the store's."""

from collections.abc import Sequence

import pytest

from apis.errors import StoreUnavailable
from apis.storage import lease as lease_module
from apis.storage.kv_store import Entry, Op
from apis.storage.lease import Lease, LeaseLost
from providers.kv_store.memory import Memory

KEY = "/lease/t"


class SlowStore(Memory):
    """A store whose answers take as long as `delay_s` says, by a clock that the holder and the store share."""

    def __init__(self) -> None:
        super().__init__(Memory.Config())
        self.seconds = 1000.0
        self.delay_s = 0.0
        self.loses_answer = False
        self.damaged_key = ""
        self.now = self.monotonic

    def monotonic(self) -> float:
        return self.seconds

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        entries = await super().get_many(keys)
        return [
            Entry(None, entry.version) if entry is not None and key == self.damaged_key else entry
            for key, entry in zip(keys, entries, strict=True)
        ]

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        versions = await super().write(ops, durable=durable)
        self.seconds += self.delay_s
        if self.loses_answer:
            self.loses_answer, self.delay_s = False, 0.0
            raise StoreUnavailable("the answer was lost")
        return versions


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    store = SlowStore()
    monkeypatch.setattr(lease_module, "time", store)
    return store


async def assert_expired_for_both(store: SlowStore, lease: Lease) -> None:
    """Another holder acquires the lease only when the first one no longer believes in it."""
    other = Lease(store, KEY, 1.0)
    assert await other.acquire() is not None
    with pytest.raises(LeaseLost):
        lease.check()


async def test_a_holder_whose_answer_came_late_does_not_believe_in_its_lease_for_longer(store: SlowStore) -> None:
    """The answer of `acquire` took 0.8 of 1.0 s."""
    lease, store.delay_s = Lease(store, KEY, 1.0), 0.8
    assert await lease.acquire() is not None
    lease.check()
    store.delay_s, store.seconds = 0.0, store.seconds + 0.25
    await assert_expired_for_both(store, lease)


async def test_a_write_that_is_recognized_later_counts_from_its_first_try(store: SlowStore) -> None:
    """The answer of a renewal was lost, and the store is read after 0.8 s."""
    lease = Lease(store, KEY, 1.0)
    assert await lease.acquire() is not None
    store.delay_s, store.loses_answer = 0.8, True
    assert await lease.write()
    lease.check()
    store.seconds += 0.25
    await assert_expired_for_both(store, lease)


async def test_a_lease_whose_record_is_damaged_is_lost(store: SlowStore) -> None:
    """Its holder gives it up as one that another has taken, and nothing else fails."""
    lease = Lease(store, KEY, 1.0)
    assert await lease.acquire() is not None
    store.damaged_key = KEY
    await store.put(KEY, b"of another")
    with pytest.raises(LeaseLost):
        await lease.write()
    with pytest.raises(LeaseLost):
        lease.check()
