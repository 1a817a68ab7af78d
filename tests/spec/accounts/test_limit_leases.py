"""Leases of limits: few requests need a write, no limit is passed, and what a process does not use is given back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from apis.accounts.charges import Demand, Use
from apis.accounts.limits import RateLimit
from apis.accounts.usage import UsageCounts
from apis.errors import RateLimited
from apis.storage.kv_store import Delete, Entry, Op
from apis.storage.records import decode_record
from providers.accounts.ledger import project_ledger, stored_ledger
from providers.accounts.ledger.counters import UseCounter
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.prices import Prices
from providers.accounts.records import heartbeat_key
from providers.kv_store.memory import Memory
from tests.support.waiting import until_empty

CALLER = ("p", "k")
USE = Use("m", UsageCounts(1, 10, 0, 20))
LEASES = "/accounts/charges/p/"


class CountingMemory(Memory):
    """Counts the writes of counters, each of which takes as long as that of a disk."""

    count = 0

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        self.count += any(op.key.startswith("/accounts/counters/") for op in ops)
        await asyncio.sleep(0.001)
        return await super().write(ops, durable=durable)


def new_ledger(store: Memory) -> StoredLedger:
    return StoredLedger(store, Prices({}), 1e6)


async def read_counter(store: Memory) -> UseCounter:
    entry = await store.get("/accounts/counters/p/*")
    assert entry is not None
    return decode_record(entry, UseCounter)


async def spend(ledger: StoredLedger, limit: RateLimit, requests: int) -> int:
    """Send requests one after the other until one is refused; return the number of those admitted."""
    for number in range(requests):
        try:
            charge = await ledger.open_charge(CALLER, {"*": limit}, Demand("m", 10, 100))
        except RateLimited:
            return number
        await asyncio.sleep(0.002)
        charge.end(USE)
    return requests


async def spend_together(ledger: StoredLedger, limit: RateLimit, requests: int) -> int:
    """Send requests, eight at a time; return the number of those admitted."""
    return sum(await asyncio.gather(*(spend(ledger, limit, requests // 8) for _ in range(8))))


class ReleasingMemory(CountingMemory):
    """Has the lease released between the read of the lease and that of the counters."""

    release: Callable[[], Awaitable[None]] | None = None

    async def get(self, key: str) -> Entry | None:
        entry = await super().get(key)
        if key.endswith("/lease") and self.release is not None:
            release, self.release = self.release, None
            await release()
        return entry


async def wait_until_given_back(store: Memory) -> None:
    await until_empty(lambda: store.scan(LEASES))


async def test_many_requests_share_few_writes_and_the_rest_is_given_back_when_they_end() -> None:
    store = CountingMemory(Memory.Config())
    ledger = new_ledger(store)
    limit = RateLimit(minute_requests=1_000_000, month_tokens=100_000_000, concurrent_responses=2000)
    assert await spend_together(ledger, limit, 480) == 480
    assert 0 < store.count < 120
    await wait_until_given_back(store)
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.day_requests, counter.concurrent_responses) == (480 * 30, 480, 0)
    await ledger.close()


async def test_processes_that_lease_pass_no_limit_and_use_it_up() -> None:
    store = CountingMemory(Memory.Config())
    ledgers = [new_ledger(store) for _ in range(4)]
    limit = RateLimit(day_requests=1500)
    first = await asyncio.gather(*(spend(ledgers[number % 4], limit, 10_000) for number in range(12)))
    # the first refusal comes only when no process has more than a few requests to spare
    assert 1500 * 0.99 <= sum(first) <= 1500
    await wait_until_given_back(store)
    rest = sum([await spend(ledger, limit, 100) for ledger in ledgers])
    assert sum(first) + rest == 1500
    assert store.count < 1500
    for ledger in ledgers:
        await ledger.close()
    assert (await read_counter(store)).day_requests == 1500


async def test_what_a_killed_process_has_leased_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_ledger, "_END_DELAY_S", 60)
    store = CountingMemory(Memory.Config())
    killed, other = new_ledger(store), new_ledger(store)
    limit = RateLimit(day_requests=10_000)
    assert await spend_together(killed, limit, 160) == 160
    assert (await read_counter(store)).day_requests > 160, "more is leased than was used"
    await store.write([Delete(key) for key, _ in await store.scan(heartbeat_key(""))])
    await other.settle_all()
    assert (await read_counter(store)).day_requests < 160
    assert await store.scan(LEASES) == []
    # it was only slow: it counts what it has used
    await killed.close()
    assert (await read_counter(store)).day_requests == 160
    await other.close()


async def test_a_process_that_was_stopped_for_long_asks_the_store_before_it_admits_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(project_ledger, "_END_DELAY_S", 60)
    monkeypatch.setattr(stored_ledger, "HEARTBEAT_TTL_S", 0.3)
    monkeypatch.setattr(stored_ledger, "_HEARTBEAT_INTERVAL_S", 60)
    store = CountingMemory(Memory.Config())
    stopped, other = new_ledger(store), new_ledger(store)
    limit = RateLimit(day_requests=1500)
    assert await spend_together(stopped, limit, 160) == 160
    await asyncio.sleep(0.4)
    await other.settle_all()
    assert await spend_together(other, limit, 4000) <= 1500
    with pytest.raises(RateLimited):
        await stopped.open_charge(CALLER, {"*": limit}, Demand("m", 10, 100))
    await stopped.close()
    await other.close()


async def test_a_lease_that_is_released_while_it_is_read_counts_all_the_same() -> None:
    store = ReleasingMemory(Memory.Config())
    slow, other = new_ledger(store), new_ledger(store)
    limits = {"*": RateLimit(day_requests=10_000)}
    assert await spend_together(other, limits["*"], 80) == 80
    await wait_until_given_back(store)
    charges = [await slow.open_charge(CALLER, limits, Demand("m", 10, 100)) for _ in range(3)]

    async def release() -> None:
        await store.write([Delete(key) for key, _ in await store.scan(heartbeat_key(""))])
        await other.settle_all()
        assert (await read_counter(store)).day_requests == 80

    await asyncio.sleep(0.2)  # so that the next write leases no more than before
    store.release = release
    slow.forget_leases()
    background = await slow.open_charge(CALLER, limits, Demand("m", 10, 100, is_background=True))
    assert (await read_counter(store)).day_requests == 84
    for charge in (*charges, background):
        charge.end(USE)
    await slow.close()
    counter = await read_counter(store)
    assert (counter.day_requests, counter.month_tokens, counter.concurrent_responses) == (84, 84 * 30, 0)
    await other.close()
