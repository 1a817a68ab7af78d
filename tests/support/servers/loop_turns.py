"""How long the turns of the event loop take, in CPU time of its thread, on a machine of any speed and load."""

import gc
import time
from asyncio import base_events
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

_REFERENCE_S: Final = 0.0075
"""CPU time of `_work` on the machine that the bounds are meant for."""


class LoopTurns:
    """The longest turn, in seconds of the reference machine. What other programs take from a core that is shared slows
    its threads: the machine is as fast as it was before or after, whichever is slower."""

    def __init__(self) -> None:
        self._longest_cpu_s = 0.0
        self._work_s = 0.0
        self.compare()

    @property
    def longest_s(self) -> float:
        return self._longest_cpu_s * _REFERENCE_S / self._work_s

    def add(self, cpu_s: float) -> None:
        self._longest_cpu_s = max(self._longest_cpu_s, cpu_s)

    def compare(self) -> None:
        """Measure how fast the machine is now."""
        self._work_s = max(self._work_s, min(_time_work() for _ in range(3)))


@contextmanager
def measured_turns() -> Generator[LoopTurns]:
    """Measure each turn of the event loop of this thread while the context is open."""
    turns = LoopTurns()
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
        turns.compare()
        gc.enable()
        base_events.BaseEventLoop._run_once = run_once  # pyright: ignore[reportAttributeAccessIssue] - as above


def _time_work() -> float:
    began = time.thread_time()
    total = 0
    for number in range(100_000):
        total += number % 7
    return time.thread_time() - began
