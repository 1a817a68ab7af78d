"""Lane: gathers the calls that arrive while a store is busy, and hands all of them over as one batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

from apis.errors import StoreUnavailable

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class Lane(Generic[Request, Answer]):
    """Many callers, one batch at a time.

    `run` gets up to `most` requests and returns an answer or an error for each, in their order; what it raises as
    StoreUnavailable is the answer to all of them. A caller that is cancelled or out of time leaves the queue; a batch
    that has begun is finished without it, so no connection is ever left in the middle of an answer.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Request]], Awaitable[Sequence[Answer | StoreUnavailable]]],
        *,
        timeout_s: float,
        most: int = 256,
    ) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._most = most
        self._waiting: dict[asyncio.Future[Answer | StoreUnavailable], Request] = {}
        self._draining: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Answer:
        """The request's own answer. Raises StoreUnavailable when it is an error, or `timeout_s` after the call."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = request
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await future
        except TimeoutError as exc:
            raise StoreUnavailable(f"The store did not answer within {self._timeout_s:g} seconds.") from exc
        finally:
            self._waiting.pop(future, None)
        if isinstance(answer, StoreUnavailable):
            # One error may be the answer to many callers, and a raised exception carries its own traceback.
            raise StoreUnavailable(answer.message) from answer
        return answer

    async def finish(self) -> None:
        """Wait until nothing is waiting or running, at most `timeout_s`."""
        if self._draining is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._draining

    async def _drain(self) -> None:
        while self._waiting:
            batch = dict(islice(self._waiting.items(), self._most))
            for future in batch:
                del self._waiting[future]
            answers: Sequence[Answer | StoreUnavailable] = [StoreUnavailable("The store failed.")] * len(batch)
            try:
                answers = await self._run(list(batch.values()))
            except StoreUnavailable as exc:
                answers = [exc] * len(batch)
            finally:
                for future, answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
