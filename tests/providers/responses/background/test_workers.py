"""Workers that drain while they claim a run, and runs that are stopped at once."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from apis.batches.spare_capacity import SpareCapacity
from apis.errors import StackError
from apis.fair_share import FairShare
from apis.storage.kv_store import Op, Put
from apis.storage.lease import LeaseLost
from providers.common.state.worker_signs import WorkerSign
from providers.kv_store.memory import Memory
from providers.responses.background.ranks import QueueLimits, Rank
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs, StoredRequest
from providers.responses.background.workers import BackgroundConfig, BackgroundWorkers
from providers.responses.events.ids import ResponseIds
from tests.support.waiting import until

REQUEST = StoredRequest(msgspec.Raw(b"{}"), msgspec.Raw(b"[]"), 0, 1)


class SlowRuns(Runs):
    """Runs whose claim has happened in the store before this process knows of it."""

    def __init__(self) -> None:
        super().__init__(Memory(Memory.Config()), QueueLimits(10, 10), lease_s=10, retention_s=100)
        self.claimed = asyncio.Event()
        self.answered = asyncio.Event()

    async def claim(self, *arguments: Any, **options: Any) -> ClaimedRun | None:
        claimed = await super().claim(*arguments, **options)
        if claimed is not None:
            self.claimed.set()
            await self.answered.wait()
        return claimed


async def add(runs: Runs, rank: Rank, *ops: Op) -> ResponseRef:
    """Add a run that waits."""
    ref = ResponseRef("a", ResponseIds().response_id)
    log_op = Put(f"a/event/{ref.id}/00000000", b"x y\n")
    assert await runs.add(ref, rank, REQUEST, [log_op, *ops], is_portable=True, start_now=False) is None
    return ref


@pytest.mark.parametrize("rank", [Rank(5), Rank(5, 3600)], ids=["queued", "deferred"])
async def test_a_drain_waits_for_a_run_that_is_being_claimed(rank: Rank) -> None:
    """Also for one with a completion window."""
    runs, executed = SlowRuns(), list[ResponseRef]()

    async def execute(claimed_run: ClaimedRun, _: StackError | None) -> None:
        await asyncio.sleep(0.01)
        executed.append(claimed_run.ref)

    ref = await add(runs, rank)
    workers = BackgroundWorkers(runs, execute, BackgroundConfig())
    workers.start()
    workers.start_deferred(SpareCapacity(FairShare("runs", 4), lambda: 0, busy_places=1))
    async with asyncio.timeout(10):
        await runs.claimed.wait()
        draining = asyncio.create_task(workers.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        runs.answered.set()
        await draining
    assert executed == [ref]


async def test_a_run_that_is_stopped_as_it_begins_is_given_back() -> None:
    """A drain returns, and another worker can claim the run at once."""
    runs, executed = SlowRuns(), list[ResponseRef]()
    runs.answered.set()
    ref = await add(runs, Rank(5))
    claimed = await runs.claim(ref)
    assert claimed is not None

    async def execute(claimed_run: ClaimedRun, _: StackError | None) -> None:
        executed.append(claimed_run.ref)
        await asyncio.Event().wait()

    workers = BackgroundWorkers(runs, execute, BackgroundConfig())
    workers.start_run(claimed, None)
    await workers.stop_runs([ref])
    async with asyncio.timeout(5):
        await workers.drain()
    assert executed == [ref]
    assert workers.metrics().background_running == 0
    assert await runs.list_orphaned() == [ref]


async def test_a_run_that_has_lost_a_worker_and_a_line_alone_are_never_executed_together() -> None:
    """Were they, and one of them ended this process, the other would be blamed with it."""
    store, executing, may_end = Memory(Memory.Config()), asyncio.Event(), asyncio.Event()
    lost = Runs(store, QueueLimits(10, 10), lease_s=0.05, retention_s=100, sign=WorkerSign(store, 1, name="lost"))
    ref = await add(lost, Rank(5))
    assert await lost.claim(ref) is not None
    runs = Runs(store, QueueLimits(10, 10), lease_s=10, retention_s=100)

    async def execute(claimed_run: ClaimedRun, _: StackError | None) -> None:
        assert claimed_run.ref == ref
        executing.set()
        await may_end.wait()

    capacity = SpareCapacity(FairShare("lines", 4), lambda: 0, busy_places=1)
    workers = BackgroundWorkers(runs, execute, BackgroundConfig(lease_s=0.1, poll_s=0.01))
    workers.start_deferred(capacity)
    async with asyncio.timeout(10):
        async with capacity.admit("a", alone=True):
            workers.start()
            await until(runs.list_orphaned)
            await asyncio.sleep(0.1)  # some looks at the orphans
            assert not executing.is_set()
        await executing.wait()
        alone = asyncio.create_task(enter(capacity))
        await asyncio.sleep(0.1)
        assert not alone.done()
        may_end.set()
        await alone
        await workers.drain()


async def enter(capacity: SpareCapacity) -> None:
    async with capacity.admit("a", alone=True):
        pass


async def test_a_slot_that_is_free_again_is_no_lost_condition() -> None:
    """Another run took the slot between the look and the write, and has left it since."""

    class Crowded(Memory):
        """Refuses the next write, as where another run takes the slot and is claimed at once."""

        refusals = 1

        async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
            if self.refusals:
                self.refusals -= 1
                return None
            return await super().write(ops, durable=durable)

    store = Crowded(Memory.Config())
    runs = Runs(store, QueueLimits(1, 10), lease_s=10, retention_s=100)
    await add(runs, Rank(5))
    store = Crowded(Memory.Config())
    runs = Runs(store, QueueLimits(1, 10), lease_s=10, retention_s=100)
    with pytest.raises(LeaseLost):
        await add(runs, Rank(5), Put("a/lock", b"", expect=7))
