"""ResponseDeadline: the limit in time of one response, held by the clock wherever the response waits."""

import asyncio
from types import TracebackType
from typing import Self

from apis.errors import UpstreamTimeout
from apis.shared_timeout import SharedTimeout


class ResponseDeadline:
    """Context manager around an async generator's work. One timeout serves the whole response, since one for each batch
    would cost as much as the batch; `timeout` is shared by all responses with the same limit.

    The generator calls `begin_wait` before it awaits the next batch and `end_wait` before it yields one: at the limit
    only its own waiting is cancelled, never the consumer's, and the cancellation becomes an UpstreamTimeout.
    """

    __slots__ = ("_is_cancelling", "_is_expired", "_timeout", "_waiting_task")

    def __init__(self, timeout: SharedTimeout) -> None:
        self._timeout = timeout
        self._waiting_task: asyncio.Task[object] | None = None
        self._is_expired = False
        self._is_cancelling = False

    def __enter__(self) -> Self:
        self._timeout.start(self._expire)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeout.cancel(self._expire)
        if self._uncancel() and isinstance(exc, asyncio.CancelledError):
            raise timeout_error(self._timeout.seconds) from exc
        self._waiting_task = None

    def begin_wait(self) -> None:
        """Say that the current task waits for the response from here. Raises UpstreamTimeout after the limit."""
        if self._is_expired:
            self._uncancel()
            raise timeout_error(self._timeout.seconds)
        self._waiting_task = asyncio.current_task()

    def end_wait(self) -> None:
        """Say that the consumer continues from here."""
        if not self._is_cancelling:
            self._waiting_task = None

    def _expire(self) -> None:
        self._is_expired = True
        if self._waiting_task is not None:
            self._is_cancelling = True
            self._waiting_task.cancel()

    def _uncancel(self) -> bool:
        """Take the timer's cancellation back; return false where there is none, or where the task is cancelled by
        another side, too."""
        if not self._is_cancelling or self._waiting_task is None:
            return False
        self._is_cancelling = False
        return self._waiting_task.uncancel() == 0


def timeout_error(limit_s: float) -> UpstreamTimeout:
    """Return the error of a response that took too long."""
    return UpstreamTimeout(f"The response took longer than {limit_s:g} s (`responses.response_timeout_s`).")
