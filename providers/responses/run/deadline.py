"""ResponseDeadline: the limit in time of one response."""

import asyncio
from types import TracebackType
from typing import Self

from apis.errors import UpstreamTimeout
from apis.shared_timeout import SharedTimeout


class ResponseDeadline:
    """Context manager around the work of the current task on one response: at the limit it is cancelled, and the
    cancellation becomes an UpstreamTimeout. `timeout` is shared by all responses with the same limit."""

    __slots__ = ("_is_expired", "_task", "_timeout")

    def __init__(self, timeout: SharedTimeout) -> None:
        task = asyncio.current_task()
        assert task is not None  # a response is generated in a task
        self._task = task
        self._timeout = timeout
        self._is_expired = False

    def __enter__(self) -> Self:
        self._timeout.start(self._expire)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeout.cancel(self._expire)
        # a task that another side cancels, too, ends by that
        if self._is_expired and self._task.uncancel() == 0 and isinstance(exc, asyncio.CancelledError):
            raise timeout_error(self._timeout.seconds) from exc

    def _expire(self) -> None:
        self._is_expired = True
        self._task.cancel()


def timeout_error(limit_s: float) -> UpstreamTimeout:
    """Return the error of a response that took too long."""
    return UpstreamTimeout(f"The response took longer than {limit_s:g} s (`responses.response_timeout_s`).")
