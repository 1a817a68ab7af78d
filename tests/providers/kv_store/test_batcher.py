"""The lane: who waits together goes together, and who left is not waited for."""

import asyncio
from collections.abc import Sequence

import pytest

from apis.errors import StoreUnavailable
from providers.kv_store.batcher import Batcher, BatchTasks


class Gate:
    """Runs batches of numbers, each when it is let through, and answers every number with its double."""

    def __init__(self) -> None:
        self.batches: list[Sequence[int]] = []
        self.begun = asyncio.Event()
        self.open = asyncio.Event()

    async def run(self, numbers: Sequence[int]) -> list[int | StoreUnavailable]:
        self.batches.append(numbers)
        self.begun.set()
        await self.open.wait()
        return [StoreUnavailable("odd") if number % 2 else 2 * number for number in numbers]


async def test_calls_that_arrive_meanwhile_make_one_batch() -> None:
    gate = Gate()
    lane = Batcher(BatchTasks(gate.run), timeout_s=5, max_batch=3)
    first = asyncio.create_task(lane.submit(0))
    await gate.begun.wait()
    others = [asyncio.create_task(lane.submit(number)) for number in (2, 4, 6, 8)]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(first, *others) == [0, 4, 8, 12, 16]
    assert gate.batches == [[0], [2, 4, 6], [8]]


async def test_small_requests_wait_for_one_large_request_at_most() -> None:
    """Neighbours: large writes of one tenant do not join, and the writes of others go before and between them."""
    gate = Gate()
    batcher = Batcher(BatchTasks(gate.run), timeout_s=5, is_large=lambda number: number >= 100)
    first = asyncio.create_task(batcher.submit(100))
    await gate.begun.wait()
    others = [asyncio.create_task(batcher.submit(number)) for number in (102, 104, 2, 106, 4)]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(first, *others) == [200, 204, 208, 4, 212, 8]
    assert gate.batches == [[100], [2, 4], [102], [104], [106]]


async def test_large_requests_wait_for_one_batch_of_small_ones_at_most() -> None:
    gate = Gate()
    batcher = Batcher(BatchTasks(gate.run), timeout_s=5, max_batch=3, is_large=lambda number: number >= 100)
    first = asyncio.create_task(batcher.submit(0))
    await gate.begun.wait()
    others = [asyncio.create_task(batcher.submit(number)) for number in (100, 2, 4, 6, 8)]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(first, *others) == [0, 200, 4, 8, 12, 16]
    assert gate.batches == [[0], [2, 4], [100], [6, 8]]


async def test_an_error_is_the_answer_to_its_own_call() -> None:
    gate = Gate()
    gate.open.set()
    lane = Batcher(BatchTasks(gate.run), timeout_s=5)
    one, two = await asyncio.gather(lane.submit(1), lane.submit(2), return_exceptions=True)
    assert isinstance(one, StoreUnavailable)
    assert two == 4


async def test_who_is_cancelled_or_out_of_time_leaves_the_queue() -> None:
    gate = Gate()
    lane = Batcher(BatchTasks(gate.run), timeout_s=0.05)
    in_time = asyncio.create_task(lane.submit(0))
    await gate.begun.wait()
    cancelled, late = (asyncio.create_task(lane.submit(number)) for number in (2, 4))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(StoreUnavailable, match=r"within 0\.05 seconds"):
        await late
    with pytest.raises(StoreUnavailable):
        await in_time
    gate.open.set()
    assert await lane.submit(6) == 12
    assert gate.batches == [[0], [6]]


async def test_a_batch_that_fails_fails_all_of_it_and_nothing_after() -> None:
    answers = iter([StoreUnavailable("gone"), None])

    async def run(numbers: Sequence[int]) -> list[int | StoreUnavailable]:
        if (error := next(answers)) is not None:
            raise error
        return list(numbers)

    lane = Batcher(BatchTasks(run), timeout_s=5)
    both = await asyncio.gather(lane.submit(1), lane.submit(2), return_exceptions=True)
    assert [str(error) for error in both] == ["gone", "gone"]
    assert both[0] is not both[1]
    assert await lane.submit(3) == 3


async def test_finishing_waits_for_what_was_begun() -> None:
    gate = Gate()
    lane = Batcher(BatchTasks(gate.run), timeout_s=5)
    call = asyncio.create_task(lane.submit(2))
    await gate.begun.wait()
    gate.open.set()
    await lane.drain()
    assert await call == 4
