"""Batcher: gathers the calls that arrive while a store is busy, and sends them as one batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from apis.errors import StackError, StorageCorrupt, StoreUnavailable
from apis.shared_timeout import SharedTimeout

_RequestT = TypeVar("_RequestT")
_ResultT = TypeVar("_ResultT")

Deliver = Callable[[Sequence[_ResultT | StackError]], None]
"""Takes the result or the error of each request of a batch, in their order. It is called once, in the event loop."""


class Batcher(Generic[_RequestT, _ResultT]):
    """Many callers, one batch at a time.

    `begin_batch` begins the work on up to `max_batch` requests and returns; it must not raise. Its second argument
    takes the results later. A caller that is cancelled or out of time leaves the queue; a batch that has begun is
    finished without it, so no connection is abandoned in the middle of a result.

    A request that `is_large` is a batch of its own. One batch of the others goes before it, and so does one between two
    of them: each waits for one large request at most.
    """

    def __init__(
        self,
        begin_batch: Callable[[Sequence[_RequestT], Deliver[_ResultT]], None],
        *,
        timeout_s: float,
        max_batch: int = 256,
        is_large: Callable[[_RequestT], bool] | None = None,
    ) -> None:
        self._begin_batch = begin_batch
        self._is_large = is_large
        self._large_is_next = False
        self._timeout = SharedTimeout(timeout_s)
        self._max_batch = max_batch
        self._pending_requests: dict[asyncio.Future[_ResultT | StackError], _RequestT] = {}
        self._batch: Sequence[asyncio.Future[_ResultT | StackError]] = ()
        self._idle_event = asyncio.Event()
        self._idle_event.set()

    async def submit(self, request: _RequestT) -> _ResultT:
        """Return the result of the request within `timeout_s`. Raises StoreUnavailable or StorageCorrupt."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending_requests[future] = request
        on_expiry = partial(self._expire, future)
        self._timeout.start(on_expiry)
        if self._idle_event.is_set():
            self._idle_event.clear()
            loop.call_soon(self._begin_next)  # with the calls that come in the same turn of the loop
        try:
            result = await future
        finally:
            self._pending_requests.pop(future, None)
            self._timeout.cancel(on_expiry)
        if isinstance(result, StackError):
            # many callers may share one error, and a raised exception carries its own traceback
            error_class = StorageCorrupt if isinstance(result, StorageCorrupt) else StoreUnavailable
            raise error_class(result.message) from result
        return result

    def _expire(self, future: "asyncio.Future[_ResultT | StackError]") -> None:
        """Fail a caller that is out of time."""
        if not future.done():
            future.set_result(StoreUnavailable(f"The store did not answer within {self._timeout.seconds:g} seconds."))

    async def drain(self) -> None:
        """Wait until no request is waiting or running, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout.seconds):
                await self._idle_event.wait()

    def _begin_next(self) -> None:
        self._batch = self._choose_batch()
        if self._batch:
            self._begin_batch([self._pending_requests.pop(future) for future in self._batch], self._deliver)
        else:
            self._idle_event.set()

    def _choose_batch(self) -> Sequence[asyncio.Future[_ResultT | StackError]]:
        waiting = [*islice(self._pending_requests, self._max_batch)]
        if self._is_large is None or len(waiting) < 2:
            return waiting
        large = [future for future in waiting if self._is_large(self._pending_requests[future])]
        small = [future for future in waiting if future not in large] if large else waiting
        takes_large = bool(large) and (self._large_is_next or not small)
        self._large_is_next = bool(large) and not takes_large
        return large[:1] if takes_large else small

    def _deliver(self, results: Sequence[_ResultT | StackError]) -> None:
        try:
            for future, result in zip(self._batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
        finally:
            self._begin_next()


class BatchTasks(Generic[_RequestT, _ResultT]):
    """Begins batches for a Batcher as tasks of a coroutine function; a StoreUnavailable that it raises is the result of
    all requests."""

    def __init__(self, run_batch: Callable[[Sequence[_RequestT]], Awaitable[Sequence[_ResultT | StackError]]]) -> None:
        self._run_batch = run_batch
        self._task: asyncio.Task[None] | None = None

    def __call__(self, requests: Sequence[_RequestT], deliver: Deliver[_ResultT]) -> None:
        self._task = asyncio.create_task(self._run(requests, deliver))

    async def _run(self, requests: Sequence[_RequestT], deliver: Deliver[_ResultT]) -> None:
        results: Sequence[_ResultT | StackError] = [StoreUnavailable("The store failed.")] * len(requests)
        try:
            results = await self._run_batch(requests)
        except StoreUnavailable as exc:
            results = [exc] * len(requests)
        finally:
            deliver(results)
