"""CircuitBreaker: keeps requests from a server that has just failed too often."""

import time
from collections import deque
from collections.abc import Callable

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
