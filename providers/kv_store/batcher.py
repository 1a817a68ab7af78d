"""Batcher: gathers the calls that arrive while a store is busy, and sends them as one batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

from apis.errors import StackError, StorageCorrupt, StoreUnavailable

_RequestT = TypeVar("_RequestT")
_ResultT = TypeVar("_ResultT")


class Batcher(Generic[_RequestT, _ResultT]):
    """Many callers, one batch at a time.

    `run_batch` gets up to `max_batch` requests and returns a result or an error for each, in their order; a
    StoreUnavailable that it raises is the result of all of them. A caller that is cancelled or out of time leaves the
    queue; a batch that has begun is finished without it, so no connection is abandoned in the middle of a result.
    """

    def __init__(
        self,
        run_batch: Callable[[Sequence[_RequestT]], Awaitable[Sequence[_ResultT | StackError]]],
        *,
        timeout_s: float,
        max_batch: int = 256,
    ) -> None:
        self._run_batch = run_batch
        self._timeout_s = timeout_s
        self._max_batch = max_batch
        self._pending_requests: dict[asyncio.Future[_ResultT | StackError], _RequestT] = {}
        self._deadlines: dict[asyncio.Future[_ResultT | StackError], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def submit(self, request: _RequestT) -> _ResultT:
        """Return the result of the request within `timeout_s`. Raises StoreUnavailable or StorageCorrupt."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending_requests[future] = request
        self._deadlines[future] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._expire, loop)
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.create_task(self._run_batches())
        try:
            result = await future
        finally:
            self._pending_requests.pop(future, None)
            del self._deadlines[future]
        if isinstance(result, StackError):
            # many callers may share one error, and a raised exception carries its own traceback
            error_class = StorageCorrupt if isinstance(result, StorageCorrupt) else StoreUnavailable
            raise error_class(result.message) from result
        return result

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the callers that are out of time. One timer serves all of them, the oldest first, because one for each
        call costs a tenth of the call."""
        self._timer = None
        for future, deadline in self._deadlines.items():
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._expire, loop)
                return
            if not future.done():
                future.set_result(StoreUnavailable(f"The store did not answer within {self._timeout_s:g} seconds."))

    async def drain(self) -> None:
        """Wait until no request is waiting or running, at most `timeout_s`."""
        if self._drain_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._drain_task

    async def _run_batches(self) -> None:
        while self._pending_requests:
            batch = dict(islice(self._pending_requests.items(), self._max_batch))
            for future in batch:
                del self._pending_requests[future]
            results: Sequence[_ResultT | StackError] = [StoreUnavailable("The store failed.")] * len(batch)
            try:
                results = await self._run_batch(list(batch.values()))
            except StoreUnavailable as exc:
                results = [exc] * len(batch)
            finally:
                for future, result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result)
