"""Charges: usage is counted once, whichever process ends or is killed, and reservations of the killed are released."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from apis.accounts.charges import Charge, Demand, Use, build_end
from apis.accounts.limits import RateLimit
from apis.accounts.usage import HOUR_S, UsageCounts, UsageSubject
from apis.errors import RateLimited, StoreUnavailable
from apis.storage.kv_store import Delete, Op, Put
from apis.storage.records import decode_record
from providers.accounts.ledger.counters import UseCounter
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.prices import ModelPrice, Prices
from providers.accounts.records import heartbeat_key
from providers.accounts.usage_log import StoredUsageLog
from providers.kv_store.memory import Memory

CALLER = ("p", "key/1")
LIMITS = {"*": RateLimit(month_tokens=10_000), "org/model": RateLimit(concurrent_responses=3)}
COUNTS = UsageCounts(1, 30, 5, 12, 3, {"web_search_call": 2})
USE = Use("org/model", COUNTS)
PRICES = Prices({"org/model": ModelPrice(input=2, cached=1, output=10)})


def new_ledger(store: Memory) -> StoredLedger:
    return StoredLedger(store, PRICES, 1e6)


async def sum_usage(store: Memory) -> UsageCounts:
    """Return the usage that a new process reads from the store, which has counted nothing itself."""
    ledger = new_ledger(store)
    hour = int(time.time()) // HOUR_S * HOUR_S
    total = UsageCounts()
    for entry in await StoredUsageLog(store, ledger).read(hour - HOUR_S, hour + HOUR_S):
        assert entry.subject == UsageSubject("p", "key/1", "org/model")
        total = total.plus(entry.counts)
    await ledger.close()
    return total


async def read_counter(store: Memory, subject: str = "*") -> UseCounter:
    entry = await store.get(f"/accounts/counters/p/{subject}")
    assert entry is not None
    return decode_record(entry, UseCounter)


async def try_open(ledger: StoredLedger, demand: Demand) -> Charge | None:
    try:
        return await ledger.open_charge(CALLER, LIMITS, demand)
    except RateLimited:
        return None


async def kill_all(store: Memory) -> None:
    """Delete the heartbeats of all processes, as if they were killed seconds ago."""
    await store.write(_deletes(*(key for key, _ in await store.scan(heartbeat_key("")))))


async def store_end(store: Memory, charge: Charge) -> list[int]:
    """The write of a response together with the end of its charge."""
    versions = await store.write(charge.end_ops(USE))
    assert versions is not None
    return versions


async def test_a_process_that_dies_after_the_response_was_stored_loses_no_usage() -> None:
    store = Memory(Memory.Config())
    killed = new_ledger(store)
    charge = await killed.open_charge(CALLER, LIMITS, Demand("org/model", 100, 1000))
    assert (await read_counter(store)).month_tokens == 1100
    versions = await store_end(store, charge)
    total = await sum_usage(store)
    assert (total.requests, total.input_tokens, total.output_tokens, total.tool_calls) == (
        *(1, 30, 12),
        {"web_search_call": 2},
    )
    assert total.cost == (25 * 2 + 5 * 1 + 12 * 10) * 1000
    await kill_all(store)
    assert await sum_usage(store) == total
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.concurrent_responses) == (42, 0)
    # it was not dead after all: what others have counted is not counted again
    charge.confirm(versions)
    await killed.close()
    assert await sum_usage(store) == total
    assert (await read_counter(store)).month_tokens == 42
    assert await store.scan("/accounts/charges/") == []


async def test_a_reservation_of_a_killed_process_is_released_and_its_place_is_free_again() -> None:
    store = Memory(Memory.Config())
    killed, other = new_ledger(store), new_ledger(store)
    charges = [await killed.open_charge(CALLER, LIMITS, Demand("org/model", 0, 3000)) for _ in range(3)]
    with pytest.raises(RateLimited, match="max_concurrent_responses"):
        await other.open_charge(CALLER, LIMITS, Demand("org/model", 0, 10))
    await kill_all(store)
    async with asyncio.timeout(5):
        while (charge := await try_open(other, Demand("org/model", 0, 3000))) is None:
            pass
    assert (await read_counter(store, "org/model")).concurrent_responses == 1
    assert (await read_counter(store)).month_tokens == 3000
    # a process that was only slow counts what it has used all the same, once
    charges[0].end(USE)
    await killed.close()
    charge.end(USE)
    await other.settle_all()
    await other.close()
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.concurrent_responses) == (84, 0)
    assert (await sum_usage(store)).requests == 2


async def test_the_reservation_of_a_run_lasts_as_long_as_the_run() -> None:
    store = Memory(Memory.Config())
    killed, other = new_ledger(store), new_ledger(store)
    demand = Demand("org/model", 0, 2000, is_background=True)
    charge = await killed.open_charge(CALLER, LIMITS, demand)
    await store.write([*charge.adopt_ops("/run/p/resp_1"), Put("/run/p/resp_1", b"")])
    charge.confirm_adoption()
    await kill_all(store)
    await other.settle_all()
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.background_responses, counter.concurrent_responses) == (2000, 1, 0)
    await store.write([build_end(charge.record, USE).to_put(), *_deletes("/run/p/resp_1")])
    await other.settle_all()
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.background_responses) == (42, 0)
    await other.close()
    await killed.close()
    assert (await sum_usage(store)).requests == 1


async def test_a_run_that_ends_while_its_reservation_is_read_keeps_it_until_its_end_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Memory(Memory.Config())
    ledger, other = new_ledger(store), new_ledger(store)
    charge = await ledger.open_charge(CALLER, LIMITS, Demand("org/model", 0, 2000, is_background=True))
    await store.write([*charge.adopt_ops("/run/p/resp_1"), Put("/run/p/resp_1", b"")])
    charge.confirm_adoption()
    get_many, write, counts = store.get_many, store.write, list[int]()

    async def end_and_get(keys: Sequence[str]) -> list[Any]:
        if [*keys] == ["/run/p/resp_1"] and (await get_many(keys))[0] is not None:
            await write([build_end(charge.record, USE).to_put(), *_deletes("/run/p/resp_1")])
        return await get_many(keys)

    async def write_and_read(ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        versions = await write(ops, durable=durable)
        counts.append((await read_counter(store)).month_tokens)
        return versions

    monkeypatch.setattr(store, "get_many", end_and_get)
    monkeypatch.setattr(store, "write", write_and_read)
    for _ in range(2):
        await other.settle_all()
    assert set(counts) == {42}, "for a moment, neither the reservation nor the use was counted"
    for each in (ledger, other):
        await each.close()
    assert (await sum_usage(store)).requests == 1
    assert (await read_counter(store)).background_responses == 0


async def test_a_write_that_raised_and_happened_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second write raises; one half of those raise after they have happened."""
    store = Memory(Memory.Config())
    ledger = new_ledger(store)
    write, count = store.write, 0

    async def write_and_fail(ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        nonlocal count
        count += 1
        if count % 4 == 1:
            raise StoreUnavailable("The store is down.")
        versions = await write(ops, durable=durable)
        if count % 4 == 3 and versions is not None:
            raise StoreUnavailable("The answer was lost.")
        return versions

    limits = LIMITS | {"org/model": RateLimit()}
    charges = [await ledger.open_charge(CALLER, limits, Demand("", 0, 50)) for _ in range(6)]
    monkeypatch.setattr(store, "write", write_and_fail)
    monkeypatch.setattr("providers.accounts.ledger.project_ledger._RETRY_S", 0.01)
    for charge in charges[:4]:
        charge.end(USE)
        await asyncio.sleep(0.08)
    for charge in charges[4:]:
        try:
            versions = await store.write(charge.end_ops(USE))
        except StoreUnavailable:
            versions = None
        charge.confirm(versions)
        charge.end(USE)
    for _ in range(10):
        await ledger.flush_all()
    monkeypatch.setattr(store, "write", write)
    await ledger.close()
    assert (await sum_usage(store)).requests == 6
    assert (await read_counter(store)).month_tokens == 6 * 42


async def test_a_client_that_leaves_settles_once_whether_its_response_is_stored_before_or_after() -> None:
    store = Memory(Memory.Config())
    ledger = new_ledger(store)
    unknown = Use("", UsageCounts(), uses_reserved=True)
    before, after, unstored = [await ledger.open_charge(CALLER, LIMITS, Demand("", 0, 100)) for _ in range(3)]
    before.confirm(await store_end(store, before))
    before.end(unknown)
    after.end(unknown)
    after.confirm(await store_end(store, after))
    ops = unstored.end_ops(USE)
    unstored.end(unknown)
    assert ops
    unstored.confirm(None)
    await ledger.settle_all()
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.concurrent_responses) == (42 + 100 + 100, 0)
    await ledger.close()
    assert (await sum_usage(store)).requests == 2


async def test_workers_that_count_at_once_agree_with_the_sum_of_the_parts() -> None:
    store = Memory(Memory.Config())
    ledgers = [new_ledger(store) for _ in range(4)]
    limits = {"*": RateLimit(month_tokens=3000)}
    admitted: list[int] = []
    refused: list[int] = []
    late: list[tuple[Charge, list[int]]] = []

    async def work(number: int) -> None:
        ledger = ledgers[number % 4]
        try:
            charge = await ledger.open_charge(CALLER, limits, Demand("", 0, 100))
        except RateLimited:
            refused.append(number)
            return
        admitted.append(number)
        if number % 3:
            versions = await store_end(store, charge)
            if number % 3 == 1:
                charge.confirm(versions)
            else:
                late.append((charge, versions))  # whichever process sees its end first counts it
        else:
            charge.end(USE)

    for first in range(0, 400, 8):
        refused.clear()
        await asyncio.gather(*(work(number) for number in range(first, first + 8)))
        await asyncio.gather(*(ledger.settle_all() for ledger in ledgers))
        for charge, versions in late:
            charge.confirm(versions)
        late.clear()
        if len(refused) == 8:
            break
    await asyncio.gather(*(ledger.settle_all() for ledger in ledgers))
    for ledger in ledgers:
        await ledger.close()
    assert (await sum_usage(store)).requests == len(admitted)
    counter = await read_counter(store)
    assert (counter.month_tokens, counter.concurrent_responses) == (42 * len(admitted), 0)
    # of 3000 tokens, no more is unused than one reservation
    assert len(refused) == 8
    assert 3000 - 100 < counter.month_tokens <= 3000


def _deletes(*keys: str) -> list[Any]:
    return [Delete(key) for key in keys]
