"""Heartbeats: how long the event loop of each worker has not run, as the process above the workers sees it."""

import time
from multiprocessing.context import BaseContext
from typing import Any, Final

_MAX_STEP_S: Final = 1.0
"""The most that one look adds to a silence: if the whole machine stood still, no worker is to blame."""


class Heartbeats:
    """One time per worker in memory that the workers of one port share; it is passed to them when they start.

    A worker calls `beat`; the parent calls `observe` with every look at a worker that lives.
    """

    def __init__(self, context: BaseContext, count: int) -> None:
        self._times: Any = context.Array("d", count, lock=False)
        self._seen: dict[int, tuple[float, float]] = {}
        self._silent_s: dict[int, float] = {}

    def __getstate__(self) -> Any:
        return self._times

    def __setstate__(self, times: Any) -> None:
        self._times = times
        self._seen, self._silent_s = {}, {}

    def beat(self, number: int) -> None:
        """Record that worker `number` runs."""
        self._times[number] = time.monotonic()

    def reset(self, number: int) -> None:
        """Forget a worker, because another takes its number. One that has not yet begun to beat is not silent."""
        self._times[number] = 0.0
        self._seen.pop(number, None)
        self._silent_s.pop(number, None)

    def has_begun(self, number: int) -> bool:
        """Return true if the worker has served, and did not end while it started."""
        return bool(self._times[number])

    def observe(self, number: int, now: float | None = None) -> float:
        """Return the seconds for which worker `number` has been silent, by the parent's own looks; `now` is the
        monotonic time."""
        now = time.monotonic() if now is None else now
        beat: float = self._times[number]
        last_beat, last_look = self._seen.get(number, (0.0, now))
        self._seen[number] = beat, now
        if not beat or beat != last_beat:
            self._silent_s[number] = 0.0
        else:
            self._silent_s[number] += min(now - last_look, _MAX_STEP_S)
        return self._silent_s[number]
