"""SharedTimeout: many timeouts of one length, served by one timer of the event loop.

A timer of its own for each wait costs several microseconds, and nearly all waits end long before their timeout. The
timeouts are all of one length, so the first to begin is the first to expire.
"""

import asyncio
from collections.abc import Callable
from time import monotonic


class SharedTimeout:
    """Timeouts of `seconds` each. `start` and `cancel` are called in one event loop."""

    __slots__ = ("_deadlines", "_timer", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadlines: dict[Callable[[], None], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, on_expiry: Callable[[], None]) -> None:
        """Call `on_expiry`, which no other running timeout has, after `seconds` unless it is cancelled before."""
        self._deadlines[on_expiry] = monotonic() + self.seconds  # the event loop's own clock, without a call of it
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.seconds, self._expire, loop)

    def cancel(self, on_expiry: Callable[[], None]) -> None:
        """End the timeout; nothing happens if it has expired. The timer stays for the next one."""
        self._deadlines.pop(on_expiry, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        while self._deadlines:
            on_expiry, deadline = next(iter(self._deadlines.items()))
            if deadline > monotonic():
                self._timer = loop.call_at(deadline, self._expire, loop)
                return
            del self._deadlines[on_expiry]
            loop.call_soon(on_expiry)
