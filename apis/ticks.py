"""Ticks: the common clock of work that looks for something now and then.

What wakes an idle process costs more than what it then does, so all that wait for ticks of one length, or of its
multiples, wake together: a process that has nothing to do wakes for them twice a second, and what they write to the
store is committed together.
"""

import asyncio
import os
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

_PHASES: Final = 16
_PHASE_S: Final = 1 / 32
"""Seconds between the ticks of two processes: those of 16 processes are spread over half a second."""

_Waits = dict[object, asyncio.Event]
_waits_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Waits]] = WeakKeyDictionary()
"""The events that each tick to come sets, by a key for each wait: they share one timer."""


def next_tick(interval_s: float) -> float:
    """Return the time of the next tick of this interval, on the clock of the event loop. The ticks of different
    processes lie apart, so that they do not all use the store at once."""
    phase_s = os.getpid() % _PHASES * _PHASE_S
    return ((monotonic() - phase_s) // interval_s + 1) * interval_s + phase_s


async def wait_for_tick(wakeup: asyncio.Event, interval_s: float) -> None:
    """Wait until `wakeup` is set, which the next tick of this interval does at the latest."""
    if wakeup.is_set():
        return
    key, waits = object(), _find_waits(next_tick(interval_s))
    waits[key] = wakeup
    try:
        await wakeup.wait()
    finally:
        waits.pop(key, None)


def _find_waits(tick: float) -> _Waits:
    loop = asyncio.get_running_loop()
    waits_by_tick = _waits_by_loop.setdefault(loop, {})
    waits = waits_by_tick.get(tick)
    if waits is None:
        waits = waits_by_tick[tick] = {}
        loop.call_at(tick, _end_waits, waits_by_tick, tick)
    return waits


def _end_waits(waits_by_tick: dict[float, _Waits], tick: float) -> None:
    for wakeup in waits_by_tick.pop(tick).values():
        wakeup.set()
