"""Properties of FairShare over random orders of arrivals, cancellations and releases, and its promises by example."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.errors import RateLimited
from apis.fair_share import FairShare, Place, Tenants

STEPS = st.lists(st.tuples(st.sampled_from(["ask", "release", "cancel"]), st.integers(0, 9)), max_size=80)


@settings(max_examples=150)
@given(steps=STEPS, places=st.integers(1, 4), tenant_places=st.integers(1, 4))
def test_places_are_never_lost_nor_given_twice(steps: list[tuple[str, int]], places: int, tenant_places: int) -> None:
    asyncio.run(_run_steps(steps, places, tenant_places))


async def _run_steps(steps: list[tuple[str, int]], places: int, tenant_places: int) -> None:
    share = FairShare("readers", places, tenant_places=tenant_places)
    requests: list[tuple[str, asyncio.Task[Place]]] = []
    open_places: list[Place] = []
    limit = min(places, tenant_places)
    for action, number in steps:
        if action == "ask":
            tenant = "abc"[number % 3]
            requests.append((tenant, asyncio.create_task(share.acquire(tenant))))
        elif action == "release" and open_places:
            open_places.pop(number % len(open_places)).release()
        elif action == "cancel" and requests:
            requests.pop(number % len(requests))[1].cancel()
        if number % 2:  # on even numbers the next step comes before any request has run
            await _settle(requests, open_places)
    await _settle(requests, open_places)
    assert share.used == len(open_places) <= places
    assert share.waiting == len(requests)
    tenants = {tenant for tenant, _ in requests}
    if len({place.tenant for place in open_places} | tenants) > 1 and share.used < places:
        assert all(share.used_by(tenant) >= limit for tenant in tenants), "a place is free and a tenant waits"
    while open_places:
        open_places.pop().release()
        await _settle(requests, open_places)
    assert (share.used, share.waiting) == (0, 0)
    assert share.tenants == 0, "a tenant that is gone is remembered"


async def _settle(requests: list[tuple[str, asyncio.Task[Place]]], places: list[Place]) -> None:
    for _ in range(4):
        await asyncio.sleep(0)
    for entry in list(requests):
        if entry[1].done():
            requests.remove(entry)
            places.append(entry[1].result())


@contextlib.asynccontextmanager
async def flood(share: FairShare, tenant: str, count: int) -> AsyncGenerator[list[asyncio.Task[Place]]]:
    tasks = [asyncio.create_task(share.acquire(tenant)) for _ in range(count)]
    await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_next_free_place_goes_to_the_tenant_that_uses_fewest() -> None:
    share = FairShare("readers", 2)
    async with flood(share, "loud", 50) as loud:
        quiet = asyncio.create_task(share.acquire("quiet"))
        await asyncio.sleep(0)
        assert not quiet.done()
        loud[0].result().release()
        await asyncio.sleep(0)
        assert quiet.done()


async def test_one_place_goes_round() -> None:
    share = FairShare("batches", 1)
    order: list[str] = []

    async def use(tenant: str) -> None:
        with await share.acquire(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(use(tenant) for tenant in "aaaaabbc"))
    assert order == ["a", "b", "c", "a", "b", "a", "a", "a"]


async def test_a_tenant_that_is_alone_may_use_all_places() -> None:
    share = FairShare("sessions", 4)
    assert all(share.try_acquire("a") for _ in range(4))
    assert share.try_acquire("a") is None


async def test_once_a_second_tenant_has_come_one_may_use_half_of_the_places() -> None:
    share = FairShare("sessions", 4)
    first = share.try_acquire("b")
    assert first is not None
    first.release()
    assert [bool(share.try_acquire("a")) for _ in range(3)] == [True, True, False]
    assert [bool(share.try_acquire("b")) for _ in range(3)] == [True, True, False]


async def test_requests_of_one_tenant_that_wait_are_bounded() -> None:
    share = FairShare("texts", 1, tenant_waiting=2)
    async with flood(share, "a", 3):
        with pytest.raises(RateLimited, match="Too many texts wait already: at most 2 at a time"):
            await share.acquire("a")
        waiting = asyncio.create_task(share.acquire("b"))
        await asyncio.sleep(0)
        assert share.waiting == 3
        waiting.cancel()


async def test_a_place_is_released_once() -> None:
    share = FairShare("readers", 2)
    place = share.try_acquire("a")
    assert place is not None
    share.try_acquire("a")
    place.release()
    place.release()
    assert share.used == 1


async def test_where_several_tenants_are_known_the_first_flood_leaves_places_for_others() -> None:
    share = FairShare("sessions", 4, several_tenants=Tenants(frozenset({"a", "b"})).are_several)
    assert [bool(share.try_acquire("a")) for _ in range(3)] == [True, True, False]
    assert share.try_acquire("b")


def reclaim(share: FairShare, tenant: str, idle: list[Place]) -> tuple[Place | None, list[Place]]:
    """The place that `tenant` gets, and the idle places whose use was ended for it."""
    ended: list[Place] = []
    place = share.acquire_or_reclaim(tenant, {each: partial(ended.append, each) for each in idle})
    return place, ended


async def test_a_tenant_at_its_share_loses_an_idle_place_of_its_own_and_no_other_tenants() -> None:
    share = FairShare("sessions", 4, several_tenants=True)
    theirs = [share.try_acquire("b"), *(share.try_acquire("a") for _ in range(2))]
    places = [place for place in theirs if place is not None]
    place, ended = reclaim(share, "a", [places[0], places[1]])
    assert (place, ended) == (places[1], [places[1]])
    assert reclaim(share, "a", [places[0]]) == (None, [])
    assert (share.used, share.used_by("a"), share.used_by("b")) == (3, 2, 1)


async def test_an_idle_place_is_reclaimed_from_the_tenant_that_uses_most() -> None:
    share = FairShare("sessions", 3, tenant_places=2)
    places = [place for tenant in "abb" if (place := share.try_acquire(tenant))]
    place, ended = reclaim(share, "c", places)
    assert place is not None
    assert ended == [places[1]]
    assert (share.used_by("b"), share.used_by("c")) == (1, 1)
    assert reclaim(share, "c", places[:1]) == (None, [])


async def test_by_time_the_next_free_place_goes_to_the_tenant_that_held_one_for_the_shortest_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neighbours: many short uses of one tenant wait for one long use of another, not for one each."""
    clock, order = 0.0, ""
    monkeypatch.setattr("apis.fair_share.monotonic", lambda: clock)
    share = FairShare("passes", 1, by_time=True)

    async def use(tenant: str, takes_s: float) -> None:
        nonlocal clock, order
        with await share.acquire(tenant, rank=int(takes_s > 1)):
            order += tenant
            await asyncio.sleep(0)
            clock += takes_s

    await asyncio.gather(*(use("a", 3) for _ in range(3)), *(use("b", 0.5) for _ in range(7)))
    assert order == "abbbbbbaba"
    order = ""
    await asyncio.gather(use("a", 3), *(use("b", 2) for _ in range(4)), use("a", 3))
    assert order == "abbabb"
