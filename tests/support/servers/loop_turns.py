"""How long the turns of the event loop take, in CPU time of its thread, on a machine of any speed and load."""

import gc
import time
from asyncio import base_events
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

_REFERENCE_S: Final = 0.03
"""CPU time of `_work` on the machine that the bounds are meant for."""


class LoopTurns:
    """The longest turn so far, in seconds of the reference machine."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._speed = _REFERENCE_S / min(_time_work() for _ in range(3))

    def add(self, cpu_s: float) -> None:
        self.longest_s = max(self.longest_s, cpu_s * self._speed)


@contextmanager
def measured_turns() -> Generator[LoopTurns]:
    """Measure each turn of the event loop of this thread while the context is open."""
    turns = LoopTurns()
    gc.collect()
    gc.disable()  # a collection of all that a test run holds would count as a turn
    run_once: Any = base_events.BaseEventLoop._run_once  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType,reportUnknownVariableType] - private: one turn

    def run_and_measure(loop: Any) -> None:
        began = time.thread_time()
        run_once(loop)
        turns.add(time.thread_time() - began)

    base_events.BaseEventLoop._run_once = run_and_measure  # pyright: ignore[reportAttributeAccessIssue] - as above
    try:
        yield turns
    finally:
        gc.enable()
        base_events.BaseEventLoop._run_once = run_once  # pyright: ignore[reportAttributeAccessIssue] - as above


def _time_work() -> float:
    began = time.thread_time()
    total = 0
    for number in range(400_000):
        total += number % 7
    return time.thread_time() - began
