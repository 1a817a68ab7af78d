"""Lease on each store: one holder at a time, and a holder that lost the lease can change nothing."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from apis.errors import StoreUnavailable
from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put
from apis.storage.lease import Lease, LeaseLost, release_lease_of
from tests.conformance.kv_store import Backend
from tests.support.forwarding_store import ForwardingStore
from tests.support.waiting import until

LEASE_S = 0.8
KEY = "/lease/t"


class LossyStore(ForwardingStore):
    """Another client of a store that loses requests, or acknowledgements of writes that happened. After one of those,
    it loses `lost_afterwards` requests."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.lost_requests = 0
        self.lost_acknowledgements = 0
        self.lost_afterwards = 0

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        self._lose_request()
        return await super().get_many(keys)

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        self._lose_request()
        versions = await self._store.write(ops, durable=durable)
        if self.lost_acknowledgements:
            self.lost_acknowledgements -= 1
            self.lost_requests = self.lost_afterwards
            raise StoreUnavailable("the acknowledgement was lost")
        return versions

    def _lose_request(self) -> None:
        if self.lost_requests:
            self.lost_requests -= 1
            raise StoreUnavailable("the request was lost")


class Holders:
    """Two holders with clients of their own, one of which loses messages on demand, and the store's clock."""

    def __init__(self, first: KVStore, second: KVStore, backend: Backend) -> None:
        self.lossy = LossyStore(first)
        self.store = second
        self.first = Lease(self.lossy, KEY, LEASE_S)
        self.second = Lease(second, KEY, LEASE_S)
        self._backend = backend

    async def elapse(self, leases: float) -> None:
        await self._backend.elapse(LEASE_S * leases)

    async def value(self, key: str) -> bytes | None:
        entry = await self.store.get(key)
        return None if entry is None else entry.value


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(f"{request.param}_backend")


@pytest.fixture
async def holders(backend: Backend) -> Holders:
    return Holders(await backend.open(), await backend.open(), backend)


async def test_one_of_many_acquires_a_lease_and_only_its_operations_are_written(holders: Holders) -> None:
    leases = [Lease(store, KEY, LEASE_S) for store in (holders.lossy, holders.store) * 4]
    results = await asyncio.gather(*(lease.acquire([Put("x", b"%d" % number)]) for number, lease in enumerate(leases)))
    [winner] = [number for number, versions in enumerate(results) if versions is not None]
    assert await holders.value("x") == b"%d" % winner
    entry = await holders.store.get("x")
    assert entry is not None
    assert results[winner] == [entry.version]


async def test_a_lease_is_not_acquired_where_another_operation_does_not_hold(holders: Holders) -> None:
    assert await holders.first.acquire([Put("x", b"", expect=7)]) is None
    assert await holders.store.scan("") == []


async def test_an_expired_lease_is_acquired_by_another_holder(holders: Holders) -> None:
    assert await holders.first.acquire() is not None
    assert await holders.second.acquire() is None
    await holders.elapse(1.1)
    assert await holders.second.acquire() is not None


async def test_each_write_renews_the_lease(holders: Holders) -> None:
    await holders.first.acquire()
    for number in range(4):
        await holders.elapse(0.6)
        assert await holders.first.write([Put(f"x{number}", b"")])
    assert await holders.second.acquire() is None
    assert len(await holders.store.scan("x")) == 4


async def test_a_holder_whose_last_writes_the_store_has_lost_cannot_write(holders: Holders) -> None:
    """A replica that was promoted may miss them: a record that the holder adds would follow a gap."""
    lease = holders.first
    await lease.acquire()
    before = await holders.store.get(KEY)
    assert before is not None
    assert await lease.write([Put("x1", b"")])
    await holders.store.write([Put(KEY, before.value, 10 * LEASE_S), Delete("x1")])  # as a fail-over leaves it
    for _ in range(2):
        with pytest.raises(LeaseLost):
            await lease.write([Put("x2", b"")])
    assert await holders.store.scan("x") == []


@pytest.mark.parametrize("has_successor", [False, True])
async def test_a_holder_that_stalled_past_its_lease_cannot_write_renew_or_delete(
    holders: Holders, *, has_successor: bool
) -> None:
    await holders.first.acquire([Put("x", b"first")])
    await holders.elapse(1.1)
    if has_successor:
        assert await holders.second.acquire() is not None
    before = await holders.store.scan("")
    with pytest.raises(LeaseLost):
        await holders.first.write()
    with pytest.raises(LeaseLost):
        await holders.first.write([Put("x", b"late"), Delete("y")])
    with pytest.raises(LeaseLost):
        await holders.first.release([Delete("x")])
    assert await holders.store.write([holders.first.release_op, Put("x", b"late")]) is None
    assert await holders.store.write([await holders.first.prepare_release(), Put("x", b"late")]) is None
    async with holders.first.hand_over(10) as op:
        assert await holders.store.write([op]) is None
    assert await holders.store.scan("") == before
    if has_successor:
        assert await holders.second.write([Put("x", b"second")])


async def test_a_lease_is_taken_over_from_any_holder(holders: Holders) -> None:
    await holders.first.acquire()
    assert await holders.second.acquire([Put("x", b"second")], expect=None) is not None
    with pytest.raises(LeaseLost):
        await holders.first.write([Put("x", b"first")])
    assert await holders.second.write()
    assert await holders.value("x") == b"second"


async def test_a_released_lease_is_free_at_once_and_its_operations_are_written(holders: Holders) -> None:
    await holders.first.acquire()
    assert await holders.first.release([Put("x", b"released")])
    assert await holders.value("x") == b"released"
    assert await holders.second.acquire() is not None
    with pytest.raises(LeaseLost):
        await holders.first.release()
    assert await holders.second.write()


async def test_a_write_whose_own_condition_does_not_hold_changes_nothing_and_keeps_the_lease(holders: Holders) -> None:
    await holders.first.acquire()
    assert not await holders.first.write([Put("x", b"", expect=7)])
    assert not await holders.first.release([Put("x", b"", expect=7)])
    assert await holders.second.acquire() is None
    assert await holders.first.write()
    assert await holders.value("x") is None


async def test_a_lease_is_released_by_a_write_of_its_holder_and_kept_where_that_does_not_hold(holders: Holders) -> None:
    lease, store = holders.first, holders.lossy

    async def write(release: Delete, expect: int | None = None) -> bool:
        return await store.write([Put("x", b"released", expect=expect), release]) is not None

    await lease.acquire()
    assert not await lease.release_with(partial(write, expect=7))
    assert not lease.is_relinquished
    assert await holders.second.acquire() is None
    assert await lease.release_with(write)
    assert lease.is_relinquished
    assert await holders.second.acquire() is not None
    assert await holders.value("x") == b"released"


async def test_a_holder_that_lost_its_lease_releases_nothing(holders: Holders) -> None:
    async def write(release: Delete) -> bool:
        return await holders.lossy.write([Put("x", b""), release]) is not None

    await holders.first.acquire()
    await holders.elapse(1.1)
    assert await holders.second.acquire() is not None
    assert not await holders.first.release_with(write)  # its version was that of the lost lease
    with pytest.raises(LeaseLost):
        await holders.first.release_with(write)
    assert await holders.second.write()
    assert await holders.value("x") is None


async def test_operations_with_conditions_of_their_own_may_outlive_the_lease(holders: Holders) -> None:
    versions = await holders.first.acquire([Put("x", b"claimed")])
    assert versions is not None
    await holders.elapse(1.1)
    assert await holders.first.release([Put("x", b"done", expect=versions[0])], even_if_lost=True)
    assert await holders.value("x") == b"done"
    assert not await holders.first.release([Put("x", b"again", expect=versions[0])], even_if_lost=True)
    assert await holders.value("x") == b"done"


@pytest.mark.parametrize(("requests", "acknowledgements"), [(1, 0), (0, 1), (2, 0), (1, 1)])
async def test_a_write_goes_through_an_outage_and_happens_once(
    holders: Holders, requests: int, acknowledgements: int
) -> None:
    await holders.first.acquire()
    holders.lossy.lost_requests, holders.lossy.lost_acknowledgements = requests, acknowledgements
    assert await holders.first.write([Put("x", b"1", expect=0)])
    assert await holders.value("x") == b"1"
    assert await holders.first.write([Put("x", b"2")])
    assert await holders.first.release([Put("x", b"3")])
    assert await holders.value("x") == b"3"


async def test_a_write_that_waits_longer_than_the_lease_can_live_is_lost(holders: Holders) -> None:
    await holders.first.acquire()
    holders.lossy.lost_requests = 1000
    with pytest.raises(LeaseLost):
        await holders.first.write([Put("x", b"")])
    assert await holders.value("x") is None


async def test_a_write_finds_out_that_another_took_the_lease_during_an_outage(holders: Holders) -> None:
    await holders.first.acquire()
    holders.lossy.lost_acknowledgements, holders.lossy.lost_afterwards = 1, 1000
    writing = asyncio.create_task(holders.first.write([Put("x", b"first")]))
    await until(lambda: not holders.lossy.lost_acknowledgements)
    assert await holders.second.acquire([Put("x", b"second")], expect=None) is not None
    holders.lossy.lost_requests = 0
    with pytest.raises(LeaseLost):
        await writing
    assert await holders.value("x") == b"second"


async def test_a_cancelled_write_leaves_a_lease_that_can_be_written_and_released(holders: Holders) -> None:
    await holders.first.acquire()
    holders.lossy.lost_acknowledgements = 1
    writing = asyncio.create_task(holders.first.write([Put("x", b"1")]))
    await until(lambda: not holders.lossy.lost_acknowledgements)
    writing.cancel()
    await asyncio.wait({writing})
    assert await holders.first.write([Put("x", b"2")])
    assert await holders.store.write([await holders.first.prepare_release(), Put("x", b"3")]) is not None
    assert await holders.second.acquire() is not None


async def test_a_lease_is_renewed_in_the_background_until_its_context_ends(holders: Holders) -> None:
    await holders.first.acquire()
    versions: set[int] = set()
    async with asyncio.timeout(30), holders.first.renew_in_background():
        holders.lossy.lost_acknowledgements = 1
        while len(versions) < 3:
            entry = await holders.store.get(KEY)
            assert entry is not None
            versions.add(entry.version)
            await asyncio.sleep(0.01)
        holders.first.check()
    assert await holders.first.release()


async def test_a_renewal_finds_out_that_the_lease_is_lost(holders: Holders) -> None:
    await holders.first.acquire()
    async with asyncio.timeout(30), holders.first.renew_in_background():
        holders.first.check()
        await holders.second.acquire([Put("x", b"second")], expect=None)
        with pytest.raises(LeaseLost):
            await _check_until_lost(holders.first)
    assert await holders.second.write()


async def _check_until_lost(lease: Lease) -> None:
    while True:
        lease.check()
        await asyncio.sleep(0.01)


async def test_a_lease_of_a_named_holder_is_acquired_again_under_that_name(holders: Holders) -> None:
    named, other = (Lease(holders.store, KEY, LEASE_S, holder=name) for name in ("resp_1", "resp_2"))
    again = Lease(holders.lossy, KEY, LEASE_S, holder="resp_1")
    await named.acquire()
    entry = await holders.store.get(KEY)
    assert entry is not None
    assert [lease.is_named_in(entry) for lease in (named, again, other)] == [True, True, False]
    assert await again.acquire(expect=entry.version) is not None
    with pytest.raises(LeaseLost):
        await named.write()
    await release_lease_of(holders.store, KEY, "resp_2")
    assert await again.write()
    await release_lease_of(holders.store, KEY, "resp_1")
    assert await holders.store.scan("") == []


async def test_a_lease_that_is_handed_over_lives_without_renewal(holders: Holders) -> None:
    await holders.first.acquire()
    async with holders.first.renew_in_background():
        async with holders.first.hand_over(10 * LEASE_S) as op:
            assert await holders.store.write([op, Put("x", b"")]) is not None
        await holders.elapse(2)
        assert await holders.second.acquire() is None
    assert await holders.store.write([await holders.first.prepare_release()]) is not None
    assert await holders.second.acquire() is not None
