"""Workers that drain while they claim a run."""

import asyncio
from typing import Any

import msgspec

from apis.storage.kv_store import Put
from providers.kv_store.memory import Memory
from providers.responses.background.ranks import QueueLimits, Rank
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs, StoredRequest
from providers.responses.background.workers import BackgroundConfig, BackgroundWorkers
from providers.responses.events.ids import ResponseIds

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


async def test_a_drain_waits_for_a_run_that_is_being_claimed() -> None:
    runs, executed = SlowRuns(), list[ResponseRef]()

    async def execute(claimed_run: ClaimedRun) -> None:
        await asyncio.sleep(0.01)
        executed.append(claimed_run.ref)

    ref = ResponseRef("a", ResponseIds().response_id)
    log_op = Put(f"a/event/{ref.id}/00000000", b"x y\n")
    await runs.add(ref, Rank(5), REQUEST, [log_op], is_portable=True, start_now=False)
    workers = BackgroundWorkers(runs, execute, BackgroundConfig())
    workers.start()
    async with asyncio.timeout(10):
        await runs.claimed.wait()
        draining = asyncio.create_task(workers.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        runs.answered.set()
        await draining
    assert executed == [ref]
