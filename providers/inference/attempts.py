"""Attempts: several providers or servers are asked in turn, until one of them has an output; a breaker guards each."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from apis.sink import Sink

T = TypeVar("T")
Clock = Callable[[], float]


class CircuitBreaker:
    """Health of one server. Closed: all requests pass. Open: none. Half open: one probe, whose success closes it."""

    def __init__(self, failures: int, window_s: float, clock: Clock = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._failure_times: deque[float] = deque(maxlen=failures)
        self._opened_at: float | None = None
        self._is_probing = False

    def allows_request(self) -> bool:
        """Return true if a request may be sent now."""
        if self._opened_at is None:
            return True
        return not self._is_probing and self._clock() - self._opened_at >= self._window_s

    def remaining_s(self) -> float:
        """Return the seconds until a request is allowed again; 0 where it is allowed now."""
        if self._opened_at is None or self.allows_request():
            return 0.0
        return max(0.0, self._opened_at + self._window_s - self._clock())

    def begin_request(self) -> bool:
        """Begin an allowed request; return true if it is the probe, which `end_request` must receive."""
        self._is_probing = self._opened_at is not None
        return self._is_probing

    def record_success(self) -> None:
        """Close the breaker."""
        self._failure_times.clear()
        self._opened_at = None
        self._is_probing = False

    def record_failure(self) -> None:
        """Count a failure, and open the breaker after too many."""
        now = self._clock()
        self._failure_times.append(now)
        full = len(self._failure_times) == self._failure_times.maxlen
        if self._opened_at is not None or (full and now - self._failure_times[0] <= self._window_s):
            self._opened_at = now

    def end_request(self, *, is_probe: bool) -> None:
        """End a request, also one without a result."""
        if is_probe:
            self._is_probing = False


class Attempt(Sink[Any]):
    """A request that a breaker guards: it counts the beginning of the output as a success. After it no other attempt
    follows. The output of a stream passes through it, see `watch`."""

    __slots__ = ("_breaker", "_is_probe", "_sink", "has_output")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.has_output = False
        self._breaker: Final = breaker
        self._is_probe: Final = breaker.begin_request()

    def begin_output(self) -> None:
        """Record that there is an output."""
        if not self.has_output:
            self.has_output = True
            self._breaker.record_success()

    def end(self) -> None:
        """Record the end of the attempt, however it ended."""
        self._breaker.end_request(is_probe=self._is_probe)

    def watch(self, sink: Sink[T]) -> Sink[T]:
        """Return a sink that passes everything on to `sink`, and records the first batch."""
        self._sink: Sink[Any] = sink
        return self

    def write(self, batch: Sequence[Any]) -> bool:
        if not self.has_output:
            self.begin_output()
        return self._sink.write(batch)

    async def ready(self) -> None:
        await self._sink.ready()

    async def put(self, batch: Sequence[Any]) -> None:
        self.begin_output()
        await self._sink.put(batch)
