"""ResponseDeadline: its own waiting ends at the limit, and nothing else does."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from apis.errors import UpstreamTimeout
from apis.shared_timeout import SharedTimeout
from providers.responses.run.deadline import ResponseDeadline


async def batches(pause_s: float, limit_s: float) -> AsyncGenerator[int]:
    with ResponseDeadline(SharedTimeout(limit_s)) as deadline:
        deadline.begin_wait()
        for number in range(100):
            await asyncio.sleep(pause_s)
            deadline.end_wait()
            yield number
            deadline.begin_wait()


async def test_waiting_ends_at_the_limit_and_the_task_is_not_cancelled() -> None:
    """R3: nothing has to come for the limit to hold."""
    with pytest.raises(UpstreamTimeout, match="response_timeout_s"):
        await anext(batches(60, 0.02))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_consumer_that_pauses_is_not_cancelled() -> None:
    """R3: the limit passes while the consumer works; the next batch raises."""
    events = batches(0, 0.02)
    assert await anext(events) == 0
    await asyncio.sleep(0.05)
    with pytest.raises(UpstreamTimeout):
        await anext(events)


async def test_batches_that_never_pause_end_too() -> None:
    seen = 0
    with pytest.raises(UpstreamTimeout):  # noqa: PT012 - the loop is what ends
        async for _ in batches(0.005, 0.05):
            seen += 1
    assert 1 <= seen < 20


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def consume() -> None:
        async for _ in batches(60, 60):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_batches_may_be_taken_by_several_tasks() -> None:
    events = batches(0.001, 0.05)
    first = await asyncio.create_task(_next(events))
    assert first == 0
    with pytest.raises(UpstreamTimeout):  # noqa: PT012 - the loop is what ends
        while True:
            await asyncio.create_task(_next(events))


async def _next(events: AsyncGenerator[int]) -> int:
    return await anext(events)
