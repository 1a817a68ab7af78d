"""The limit of all projects together: exact over processes, and as cheap with a hundred projects as with one."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from apis.accounts.charges import Charge, Demand, Use
from apis.accounts.limits import NANOS, ORGANIZATION, RateLimit
from apis.accounts.usage import UsageCounts, UsageEntry
from apis.errors import QuotaExceeded, StorageCorrupt
from apis.storage.kv_store import Delete, Entry, Op, Put
from apis.storage.records import decode_record
from providers.accounts.ledger.counters import UseCounter
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.prices import ModelPrice, Prices
from providers.accounts.records import heartbeat_key
from providers.kv_store.memory import Memory
from tests.support.waiting import until

PRICES = Prices({"m": ModelPrice(input=0, output=1_000_000)})
USE = Use("m", UsageCounts(1, 10, 0, 20))
COST = 20 * NANOS
FAR = {"*": RateLimit(day_requests=10**6), ORGANIZATION: RateLimit(month_cost=10**9 * NANOS)}
TOTAL_KEY = "/accounts/counters/.organization/*"


class SlowMemory(Memory):
    """Counts writes and those that are refused; each takes as long as that of a disk."""

    writes = refused = 0

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        await asyncio.sleep(0.001)
        versions = await super().write(ops, durable=durable)
        self.writes += 1
        self.refused += versions is None
        return versions


def new_ledger(store: Memory) -> StoredLedger:
    return StoredLedger(store, PRICES, 1e6)


async def spend(ledger: StoredLedger, project: str, requests: int) -> None:
    """Send the requests of a project one after the other."""
    for _ in range(requests):
        charge = await ledger.open_charge((project, "k"), FAR, Demand("m", 10, 30))
        await asyncio.sleep(0)
        charge.end(USE)


async def read_total(store: Memory, key: str = TOTAL_KEY) -> UseCounter:
    entry = await store.get(key)
    assert entry is not None
    return decode_record(entry, UseCounter)


async def count_writes(projects: int, requests: int) -> SlowMemory:
    """Send the requests of that many projects at once, by one process; return the store."""
    store = SlowMemory(Memory.Config())
    ledger = new_ledger(store)
    await asyncio.gather(*(spend(ledger, f"p{number % projects}", requests // 100) for number in range(100)))
    await ledger.close()
    assert (await read_total(store)).month_cost == requests * COST
    assert await store.scan("/accounts/charges/") == []
    return store


async def test_a_hundred_projects_cost_no_more_writes_than_one_and_none_is_refused() -> None:
    """The projects of one process share the writes of the organization's counter."""
    one, hundred = await count_writes(1, 1000), await count_writes(100, 1000)
    assert (one.refused, hundred.refused) == (0, 0)
    # A round is shared by the requests that wait when it begins: on a busy machine fewer do. Projects that do not share
    # rounds take a hundred writes and more.
    assert hundred.writes <= 5 * one.writes


async def test_the_limit_of_all_projects_is_exact_over_processes() -> None:
    """No process passes it, and a project that is refused has nothing counted."""
    store = SlowMemory(Memory.Config())
    ledgers = [new_ledger(store) for _ in range(3)]
    limits = {"*": RateLimit(day_requests=10**6), ORGANIZATION: RateLimit(month_cost=100 * COST)}
    charges: list[Charge] = []

    async def open_all(ledger: StoredLedger, project: str) -> None:
        while True:
            try:
                charge = await ledger.open_charge((project, "k"), limits, Demand("m", 0, 20))
            except QuotaExceeded:
                return
            charges.append(charge)

    await asyncio.gather(*(open_all(ledgers[number % 3], f"p{number}") for number in range(12)))
    assert len(charges) == 100
    for charge in charges:
        charge.end(USE)
    for ledger in ledgers:
        await ledger.close()
    assert (await read_total(store)).month_cost == 100 * COST
    counters = [await read_total(store, key) for key, _ in await store.scan("/accounts/counters/p")]
    assert sum(counter.day_requests for counter in counters) == 100


async def test_what_a_killed_process_has_reserved_of_all_projects_is_released() -> None:
    """Also of projects that no other process has seen."""
    store = SlowMemory(Memory.Config())
    killed, other = new_ledger(store), new_ledger(store)
    charges = [await killed.open_charge((f"p{number}", "k"), FAR, Demand("m", 0, 20)) for number in range(5)]
    assert (await read_total(store)).month_cost >= 5 * COST
    versions = await store.write(charges[0].end_ops(USE))
    assert versions is not None
    await store.write([Delete(key) for key, _ in await store.scan(heartbeat_key(""))])
    await other.settle_all()
    assert (await read_total(store)).month_cost == COST
    assert (await read_total(store, "/accounts/counters/p0/*")).day_requests == 1
    assert await store.scan("/accounts/charges/") == []
    await other.close()
    await killed.close()


async def test_one_damaged_counter_refuses_the_requests_of_its_project_alone() -> None:
    """The projects that share writes do not share damage."""
    store = SlowMemory(Memory.Config())
    await store.write([Put("/accounts/counters/p0/*", b"{")])
    ledger = new_ledger(store)
    results = await asyncio.gather(
        *(ledger.open_charge((f"p{number}", "k"), FAR, Demand("m", 0, 20)) for number in range(5)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [StorageCorrupt, *[Charge] * 4]
    for result in results:
        if isinstance(result, Charge):
            result.end(USE)
    await ledger.close()
    assert (await read_total(store)).month_cost == 4 * COST


async def test_a_limit_that_is_set_while_requests_run_loses_no_usage() -> None:
    """Requests that were admitted before the limit of all projects end under the limits of their own."""
    store = SlowMemory(Memory.Config())
    ledger = new_ledger(store)
    before = {"*": FAR["*"]}
    ways = (before, FAR, before, FAR)
    charges = [await ledger.open_charge(("p", "k"), limits, Demand("m", 0, 20)) for limits in ways]
    for charge in (charges[1], charges[0], charges[3], charges[2]):
        charge.end(USE)
        await ledger.flush_all()
    await ledger.close()
    total = UsageCounts()
    for _, entry in await store.scan("/accounts/usage/"):
        total = total.plus(decode_record(entry, UsageEntry).counts)
    assert (total.requests, total.cost) == (4, 4 * COST)
    assert (await read_total(store)).month_cost == 2 * COST
    assert (await read_total(store, "/accounts/counters/p/*")).day_requests == 4


async def test_a_tenant_that_floods_delays_others_by_no_more_than_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for one write take turns by project."""
    monkeypatch.setattr("providers.accounts.ledger.project_ledger._MAX_ROUND", 10)
    store = SlowMemory(Memory.Config())
    ledger = new_ledger(store)
    flood = [asyncio.create_task(spend(ledger, "flood", 1)) for _ in range(200)]
    await asyncio.sleep(0)
    before = store.writes
    await spend(ledger, "small", 1)
    assert store.writes - before <= 10, "without turns, the flood takes twenty writes before it"
    await asyncio.gather(*flood)
    await ledger.close()


class ScanningMemory(Memory):
    """Counts the scans of charges."""

    scans = 0

    async def scan(self, prefix: str, **options: Any) -> list[tuple[str, Entry]]:
        self.scans += prefix == "/accounts/charges/"
        return await super().scan(prefix, **options)


async def test_one_process_of_all_counts_the_ends_of_the_others_and_the_next_one_after_it() -> None:
    """By a lease, which another process takes when its holder ends."""
    store = ScanningMemory(Memory.Config())
    ledgers = [StoredLedger(store, PRICES, 1e6, sweep_interval_s=0.05) for _ in range(8)]
    for ledger in ledgers:
        ledger.start()
    await until(lambda: store.scans >= 4)
    holders = [key for key, _ in await store.scan("/accounts/sweep_lease")]
    assert len(holders) == 1
    store.scans, looks = 0, 8
    await asyncio.sleep(0.05 * looks)
    assert store.scans <= looks + 1, "each process would have looked as often"
    for ledger in ledgers[:-1]:
        await ledger.close()
    before = store.scans
    await until(lambda: store.scans >= before + 2)
    await ledgers[-1].close()
    assert await store.get("/accounts/sweep_lease") is None
