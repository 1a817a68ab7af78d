"""Ticks: the common clock of work that looks for something now and then.

What wakes an idle process costs more than what it then does, so all that wait for ticks of one length, or of its
multiples, wake together: a process that has nothing to do wakes for them twice a second, and what they write to the
store is committed together.
"""

import asyncio
import os
from time import monotonic
from typing import Final

_PHASES: Final = 16
_PHASE_S: Final = 1 / 32
"""Seconds between the ticks of two processes: those of 16 processes are spread over half a second."""


def next_tick(interval_s: float) -> float:
    """Return the time of the next tick of this interval, on the clock of the event loop. The ticks of different
    processes lie apart, so that they do not all use the store at once."""
    phase_s = os.getpid() % _PHASES * _PHASE_S
    return ((monotonic() - phase_s) // interval_s + 1) * interval_s + phase_s


async def wait_for_tick(wakeup: asyncio.Event, interval_s: float) -> None:
    """Wait until `wakeup` is set, which the next tick of this interval does at the latest."""
    if wakeup.is_set():
        return
    timer = asyncio.get_running_loop().call_at(next_tick(interval_s), wakeup.set)
    try:
        await wakeup.wait()
    finally:
        timer.cancel()
