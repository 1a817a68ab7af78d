"""Lane: gathers the calls that arrive while a store is busy, and hands all of them over as one batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

from apis.errors import StoreUnavailable

_RequestT = TypeVar("_RequestT")
_ResultT = TypeVar("_ResultT")


class Batcher(Generic[_RequestT, _ResultT]):
    """Many callers, one batch at a time.

    `run` gets up to `most` requests and returns an answer or an error for each, in their order; what it raises as
    StoreUnavailable is the answer to all of them. A caller that is cancelled or out of time leaves the queue; a batch
    that has begun is finished without it, so no connection is ever left in the middle of an answer.
    """

    def __init__(
        self,
        run_batch: Callable[[Sequence[_RequestT]], Awaitable[Sequence[_ResultT | StoreUnavailable]]],
        *,
        timeout_s: float,
        max_batch: int = 256,
    ) -> None:
        self._run_batch = run_batch
        self._timeout_s = timeout_s
        self._max_batch = max_batch
        self._pending_requests: dict[asyncio.Future[_ResultT | StoreUnavailable], _RequestT] = {}
        self._drain_task: asyncio.Task[None] | None = None

    async def submit(self, request: _RequestT) -> _ResultT:
        """The request's own answer. Raises StoreUnavailable when it is an error, or `timeout_s` after the call."""
        future = asyncio.get_running_loop().create_future()
        self._pending_requests[future] = request
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.create_task(self._run_batches())
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await future
        except TimeoutError as exc:
            raise StoreUnavailable(f"The store did not answer within {self._timeout_s:g} seconds.") from exc
        finally:
            self._pending_requests.pop(future, None)
        if isinstance(answer, StoreUnavailable):
            # One error may be the answer to many callers, and a raised exception carries its own traceback.
            raise StoreUnavailable(answer.message) from answer
        return answer

    async def drain(self) -> None:
        """Wait until nothing is waiting or running, at most `timeout_s`."""
        if self._drain_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._drain_task

    async def _run_batches(self) -> None:
        while self._pending_requests:
            batch = dict(islice(self._pending_requests.items(), self._max_batch))
            for future in batch:
                del self._pending_requests[future]
            answers: Sequence[_ResultT | StoreUnavailable] = [StoreUnavailable("The store failed.")] * len(batch)
            try:
                answers = await self._run_batch(list(batch.values()))
            except StoreUnavailable as exc:
                answers = [exc] * len(batch)
            finally:
                for future, answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
