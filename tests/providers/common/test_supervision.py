"""Supervised background work: it goes on after any exception, and ends when it is cancelled."""

import asyncio
import logging

import pytest

from providers.common.counters import WATCHER_FAILURES
from providers.common.supervision import supervise


async def test_a_watcher_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of any type is logged with its traceback and counted, and the work goes on."""
    failures = [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "damaged"), KeyError("a"), RuntimeError("third")]
    recovered = asyncio.Event()

    async def watch() -> None:
        if failures:
            raise failures.pop(0)
        recovered.set()
        await asyncio.Event().wait()

    counted = WATCHER_FAILURES.count
    with caplog.at_level(logging.ERROR):
        task = supervise("the test's watcher", watch, first_pause_s=0.001)
        await asyncio.wait_for(recovered.wait(), 5)
    assert WATCHER_FAILURES.count == counted + 3
    assert len([record for record in caplog.records if record.exc_info]) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_pause_grows_with_each_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A fault that stays does not take a core."""
    runs = 0

    async def fail() -> None:
        nonlocal runs
        runs += 1
        if runs == 5:
            return
        raise RuntimeError("again")

    await asyncio.wait_for(supervise("the test's watcher", fail, first_pause_s=0.001, max_pause_s=0.004), 5)
    waits = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert waits == [0.001, 0.002, 0.004, 0.004]


async def test_a_watcher_ends_with_the_cancellation_that_it_is_in() -> None:
    """Closing a server does not wait for a pause."""
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise RuntimeError("once")

    task = supervise("the test's watcher", fail, first_pause_s=60)
    await failed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
