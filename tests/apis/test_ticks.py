"""Ticks: waits of one length, or of its multiples, end together."""

import asyncio
import os
from time import monotonic
from typing import Any

import pytest

from apis.ticks import next_tick, wait_for_tick


async def test_waits_that_begin_apart_end_together() -> None:
    ended: list[float] = []

    async def wait(delay_s: float, interval_s: float) -> None:
        await asyncio.sleep(delay_s)
        await wait_for_tick(asyncio.Event(), interval_s)
        ended.append(monotonic())

    await asyncio.sleep(next_tick(0.8) - monotonic())  # so that all of them begin before one tick of the longest
    tick = next_tick(0.8)
    late = tick - monotonic() - 0.3  # a busy machine may be a quarter of a second late
    await asyncio.gather(wait(0, 0.8), wait(late, 0.8), wait(late, 0.4), wait(late + 0.02, 0.4))
    assert all(0 <= at - tick < 0.3 for at in ended)


async def test_a_wait_ends_at_once_when_it_is_woken_and_leaves_no_timer() -> None:
    wakeup = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, wakeup.set)
    began = monotonic()
    await wait_for_tick(wakeup, 60)
    await wait_for_tick(wakeup, 60)  # it was woken before it began
    assert monotonic() - began < 1
    wakeup.clear()
    waiting = asyncio.create_task(wait_for_tick(wakeup, 0.1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0.15)
    assert not wakeup.is_set()


async def test_waits_for_one_tick_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    call_at = loop.call_at

    def count_timers(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *args, **kwargs)

    monkeypatch.setattr(loop, "call_at", count_timers)
    waits = [asyncio.create_task(wait_for_tick(asyncio.Event(), 60)) for _ in range(10)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    assert len(timers) == 1


@pytest.mark.parametrize("interval_s", [0.05, 0.5, 1.0, 2.0, 0.001])
def test_the_next_tick_is_in_the_future_and_at_most_an_interval_away(interval_s: float) -> None:
    for _ in range(1000):
        before = monotonic()
        tick = next_tick(interval_s)
        assert before < tick <= monotonic() + interval_s + 1e-6


def test_processes_tick_at_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: set[float] = set()
    for process in range(16):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        phases.add(round(next_tick(0.5) % 0.5, 3))
    assert len(phases) == 16
