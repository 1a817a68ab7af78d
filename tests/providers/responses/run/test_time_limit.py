"""time_limit: its own task ends at the limit, and nothing else does."""

import asyncio

import pytest

from apis.errors import UpstreamTimeout
from providers.responses.run.pending_response import time_limit


async def work(limit_s: float, duration_s: float = 60, steps: int = 1) -> None:
    async with time_limit(limit_s, "responses.response_timeout_s"):
        for _ in range(steps):
            await asyncio.sleep(duration_s / steps)


@pytest.mark.parametrize("steps", [1, 6000])
async def test_work_ends_at_the_limit_and_the_task_is_not_cancelled(steps: int) -> None:
    """The limit holds although no output comes, and output that comes all the time does not move it."""
    with pytest.raises(UpstreamTimeout, match="response_timeout_s"):
        await work(0.05, steps=steps)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_work_that_ends_in_time_is_not_disturbed() -> None:
    await work(0.02, 0)
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("limit_s", [60, 0.01])
async def test_a_cancellation_from_outside_stays_one(limit_s: float) -> None:
    """Also where the limit passes in the same moment."""
    task = asyncio.create_task(work(limit_s))
    await asyncio.sleep(0)
    if limit_s < 1:
        asyncio.get_running_loop().call_later(limit_s, task.cancel)
    else:
        task.cancel()
    with pytest.raises((asyncio.CancelledError, UpstreamTimeout)):
        await task
    assert limit_s < 1 or task.cancelled()
