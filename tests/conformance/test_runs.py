"""Runs on each store: one holder at a time, and no other worker can write."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from apis.errors import RateLimited, StackError
from apis.storage.kv_store import KVStore, Put
from apis.storage.lease import LeaseLost
from apis.storage.records import decode_record, encode_record
from providers.common.state.worker_signs import WorkerSign
from providers.responses.background.ranks import QueueLimits, Rank
from providers.responses.background.runs import ClaimedRun, ResponseRef, RunRecord, Runs, StoredRequest
from providers.responses.background.workers import BackgroundConfig, BackgroundWorkers
from providers.responses.events.ids import ResponseIds
from tests.conformance.kv_store import Backend

LEASE_S = 60
"""Longer than a test takes on any machine."""
SHORT_LEASE_S = 2
SIGN_INTERVAL_S = 0.5
MAX_WAITING = 12
ASKED = StoredRequest(msgspec.Raw(b"{}"), msgspec.Raw(b"[]"), 0, 1)


class Two:
    """Two workers' views of one store, and its clock."""

    def __init__(self, one: KVStore, other: KVStore, backend: Backend, lease_s: float = LEASE_S) -> None:
        self.store = one
        self.one, self.other = (
            Runs(each, QueueLimits(MAX_WAITING, lease_s), lease_s=lease_s, retention_s=1000) for each in (one, other)
        )
        self.backend = backend
        self.lease_s = lease_s

    async def add(
        self,
        tenant: str = "t",
        rank: int = 5,
        window_s: int = 0,
        *,
        at_once: bool = False,
        runs: Runs | None = None,
        also: Put | None = None,
    ) -> ResponseRef:
        ref = ResponseRef(tenant, ResponseIds().response_id)
        events = also or Put(f"{tenant}/event/{ref.id}/00000000", b"x y\n")
        await (runs or self.one).add(
            ref, Rank(rank, window_s), ASKED, [events], is_portable=not at_once, start_now=at_once
        )
        return ref

    async def claimed(self, runs: Runs, ref: ResponseRef) -> ClaimedRun:
        claimed = await runs.claim(ref, "known")
        assert claimed is not None
        return claimed

    async def elapse(self, leases: float = 1.1) -> None:
        await self.backend.elapse(leases * self.lease_s)


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(f"{request.param}_backend")


@pytest.fixture
async def two(backend: Backend) -> Two:
    return Two(await backend.open(), await backend.open(), backend)


@pytest.fixture
async def short(backend: Backend) -> Two:
    """Two views whose leases, and places in the queue, expire within the test."""
    return Two(await backend.open(), await backend.open(), backend, SHORT_LEASE_S)


async def test_of_two_that_claim_one_gets_it(two: Two) -> None:
    for _ in range(10):
        ref = await two.add()
        claims = await asyncio.gather(*(runs.claim(ref, "known") for runs in (two.one, two.other) * 3))
        assert sum(claim is not None for claim in claims) == 1
    assert await two.one.list_waiting(100) == []
    assert not await two.other.has_waiting("t")
    assert (await two.other.count_running("t", 100), await two.other.count_running("t", 5)) == (10, 5)


async def test_those_that_wait_are_served_by_rank_and_then_by_age(two: Two) -> None:
    refs = [await two.add(rank=rank) for rank in (5, 9, 5, 1)]
    assert [ref for _, ref in await two.other.list_waiting(100)] == [refs[each] for each in (3, 0, 2, 1)]
    assert (await two.other.has_waiting("t"), await two.other.count_running("t", 100)) == (True, 0)
    assert (await two.other.has_waiting("another"), await two.other.count_running("another", 100)) == (False, 0)


async def test_no_more_wait_than_may_however_many_come_together(two: Two) -> None:
    both = (two.one, two.other)
    outcomes = await asyncio.gather(
        *(two.add(runs=both[n % 2]) for n in range(3 * MAX_WAITING)), return_exceptions=True
    )
    assert sum(isinstance(each, RateLimited) for each in outcomes) == 2 * MAX_WAITING
    assert (
        sum(isinstance(each, ResponseRef) for each in outcomes) == len(await two.one.list_waiting(100)) == MAX_WAITING
    )
    await two.add("another")
    [*_, (key, ref)] = [each for each in await two.one.list_waiting(100) if each[1].tenant == "t"]
    assert await two.one.claim(ref, key) is not None
    await two.add(runs=two.other)
    with pytest.raises(RateLimited):
        await two.add()


async def test_runs_with_a_window_wait_apart_by_their_deadlines(two: Two) -> None:
    late, soon = [await two.add(window_s=seconds) for seconds in (7200, 3600)]
    plain = await two.add()
    assert [ref for _, ref in await two.other.list_waiting(100)] == [plain]
    assert await two.other.count_deferred(100) == [("t", 2)]
    claims = await asyncio.gather(*(runs.claim_deferred("t") for runs in (two.one, two.other) * 3))
    assert {claim.ref for claim in claims if claim} == {late, soon}
    assert all(claim.run.is_deferred and not claim.is_late for claim in claims if claim)
    assert (await two.one.count_deferred(100), await two.one.claim_deferred("t")) == ([], None)
    first = await two.add(window_s=3600)
    assert await two.add(window_s=7200) is not None
    claimed = await two.one.claim_deferred("t")
    assert claimed is not None
    assert claimed.ref == first
    await claimed.lease.hand_back(claimed.run)
    again = await two.other.claim_deferred("t")
    assert again is not None
    assert (again.ref, again.run.attempts, again.run.handovers) == (first, 2, 1)


async def test_a_run_whose_window_ends_unclaimed_is_late(two: Two) -> None:
    ref = await two.add(window_s=1)
    assert await two.other.list_orphaned() == []
    await two.backend.elapse(1.1)
    assert await two.other.claim_deferred("t") is None
    assert await two.other.list_orphaned() == [ref]
    claimed = await two.other.claim(ref)
    assert claimed is not None
    assert claimed.is_late
    assert claimed.run.is_deferred


async def test_a_run_whose_other_writes_do_not_hold_is_not_there(two: Two) -> None:
    taken = Put("taken", b"", expect=7)
    for at_once in (False, True):
        with pytest.raises(LeaseLost):
            await two.add(also=taken, at_once=at_once)
    assert await two.store.scan("") == []


async def test_who_writes_keeps_its_lease(short: Two) -> None:
    ref = await short.add()
    claimed = await short.claimed(short.one, ref)
    for number in range(4):
        await short.elapse(0.4)
        await claimed.lease.write([Put(f"x{number}", b"")])
    assert await short.other.list_orphaned() == []
    assert len(await short.store.scan("x")) == 4


async def test_who_was_silent_for_too_long_can_write_nothing(short: Two) -> None:
    ref = await short.add()
    late = await short.claimed(short.one, ref)
    await short.elapse()
    with pytest.raises(LeaseLost):
        await late.lease.write([Put("x", b"late")])
    assert await short.other.list_orphaned() == [ref]
    taken = await short.other.claim(ref)
    assert taken is not None
    assert (taken.run.attempts, taken.is_late) == (2, False)
    with pytest.raises(LeaseLost):
        await late.lease.write([Put("x", b"late")])
    assert await short.store.write([Put("x", b"late"), *late.lease.end_ops()]) is None
    await taken.lease.write([Put("x", b"new")])
    entry = await short.store.get("x")
    assert entry is not None
    assert entry.value == b"new"


async def test_a_run_can_be_wrested_from_its_worker(two: Two) -> None:
    ref = await two.add()
    claimed = await two.claimed(two.one, ref)
    wrested = await two.other.take_over(ref)
    assert wrested is not None
    with pytest.raises(LeaseLost):
        await claimed.lease.write()
    assert await two.store.write(wrested.lease.end_ops()) is not None
    assert await two.one.take_over(ref) is None
    assert await two.one.get(ref) is None


async def test_those_that_end_a_run_do_not_take_it_from_each_other(two: Two) -> None:
    """Two that did so would go on for ever, and a run with as many attempts is claimed by no worker any more."""
    ref = await two.add()
    await two.claimed(two.one, ref)
    attempts: list[int] = []

    async def end(runs: Runs) -> bool:
        """End the run as a cancellation does, which reads its log before."""
        while (taken := await runs.take_over(ref)) is not None:
            attempts.append(taken.run.attempts)
            for _ in range(5):
                await two.store.scan(f"{ref.tenant}/event/{ref.id}/")
            if await two.store.write(taken.lease.end_ops()) is not None:
                return True
        return False

    async with asyncio.timeout(20):
        assert sorted(await asyncio.gather(end(two.one), end(two.other), end(two.other))) == [False, False, True]
    assert attempts == [2]


async def test_a_run_whose_end_was_broken_off_is_taken_over_when_the_lease_has_expired(short: Two) -> None:
    ref = await short.add()
    assert await short.one.take_over(ref) is not None
    waiting = asyncio.create_task(short.other.take_over(ref))
    await short.elapse()
    async with asyncio.timeout(10):
        assert (await waiting) is not None
    await short.elapse()
    assert (claimed := await short.one.claim(ref)) is not None
    assert not claimed.run.is_ending


async def test_what_is_given_back_is_claimed_again(two: Two) -> None:
    ref = await two.add()
    claimed = await two.claimed(two.one, ref)
    await claimed.lease.hand_back(claimed.run)
    [(key, record)] = await two.other.list_waiting(10)
    again = await two.other.claim(record, key)
    assert again is not None
    assert (again.ref, again.run.attempts, again.run.handovers) == (ref, 2, 1)
    await claimed.lease.hand_back(claimed.run)
    assert await two.one.list_waiting(10) == []


async def test_what_waited_for_too_long_is_claimed_as_late(short: Two) -> None:
    ref = await short.add()
    await short.elapse()
    assert await short.one.list_waiting(10) == []
    assert await short.one.list_orphaned() == [ref]
    claimed = await short.one.claim(ref)
    assert claimed is not None
    assert claimed.is_late


async def test_what_is_claimed_at_once_never_waits(two: Two) -> None:
    ref = await two.add(at_once=True)
    assert await two.other.list_waiting(10) == []
    assert await two.other.claim(ref) is None
    assert (await two.other.has_waiting("t"), await two.other.count_running("t", 100)) == (False, 1)


async def test_another_tenants_run_is_not_found(two: Two) -> None:
    ref = await two.add()
    for stranger in (
        ResponseRef("u", ref.id),
        ResponseRef("t/x", ref.id),
        ResponseRef("t", f"{ref.id}/.."),
        ResponseRef("", f"t/{ref.id}"),
    ):
        assert await two.other.get(stranger) is None
        assert await two.other.take_over(stranger) is None
    assert await two.other.get(ref) is not None


async def test_workers_that_live_are_not_lost_over_a_run(two: Two) -> None:
    """A worker that did not renew its lease in time, and lives, has not been ended by the run."""
    ref = await two.add()
    stored = await two.store.get(ref.run_key)
    assert stored is not None
    record = decode_record(stored, RunRecord)
    record.attempts, record.workers = 4, ["ended", "slow", "slow too", "ended too"]
    await two.store.put(ref.run_key, encode_record(record))
    async with AsyncExitStack() as living:
        for name in ("slow", "slow too"):
            sign = WorkerSign(two.store, SIGN_INTERVAL_S, name=name)
            sign.start()
            living.push_async_callback(sign.close)
        asking = WorkerSign(two.store, SIGN_INTERVAL_S, name="asking")
        runs = Runs(two.store, QueueLimits(1, LEASE_S), lease_s=LEASE_S, retention_s=1000, sign=asking)
        executed: asyncio.Queue[tuple[ResponseRef, StackError | None]] = asyncio.Queue()

        async def execute(claimed: ClaimedRun, failure: StackError | None) -> None:
            executed.put_nowait((claimed.ref, failure))
            await claimed.lease.release(claimed.lease.end_ops()[1:])

        workers = BackgroundWorkers(runs, execute, BackgroundConfig(lease_s=LEASE_S, poll_s=0.02))
        workers.start()
        async with asyncio.timeout(20):
            assert await executed.get() == (ref, None)
        await workers.close()
