"""FirstBatches: the beginning of a streamed response, read early so that a refusal is an HTTP error and no stream."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Final, Self

from openai.types.responses import ResponseOutputItemAddedEvent, ResponseOutputItemDoneEvent, ResponseStreamEvent

from apis.events import EventBatch
from apis.inference import CALL_ATTEMPTS, CallAttempts
from apis.live_batch import prepend_to_batch
from apis.shared_timeout import SharedTimeout

EARLY_FAILURE_WAIT_S: Final = 0.04
"""Seconds that the first event waits for the model: a refusal within them becomes an HTTP status."""
_HEAD_WAIT_S: Final = 1 - EARLY_FAILURE_WAIT_S
"""Seconds more that it waits for a server that has been sent the request, and has not yet answered with a status."""
_RETRY_WAIT_S: Final = 10
"""Seconds that the first event waits for servers of which one has failed already."""


class FirstBatches:
    """The events of `build_first_events`, then the first batch, read by a task that is waited for briefly: an early
    refusal by the model is raised on entering. The first events are built while the model is waited for.

    Where a server has been sent the call, entering waits for its status, for a second at most; where an attempt fails
    meanwhile, until a server accepts the next one or all have failed.
    With `awaits_tool_lists` the refusal of a server whose tools cannot be listed is raised, too: the batches of a
    listing that has not succeeded are then also among the first. Iterate it to the end before the context ends.
    """

    def __init__(
        self,
        batches: AsyncGenerator[EventBatch],
        early_failure_wait: SharedTimeout,
        build_first_events: Callable[[], EventBatch],
        *,
        awaits_tool_lists: bool,
    ) -> None:
        self._batches = batches
        self._build_first_events = build_first_events
        self._first_events: EventBatch = ()
        self._early_failure_wait = early_failure_wait
        self._awaits_tool_lists = awaits_tool_lists
        self._read: list[EventBatch] = []
        self._is_over = False
        self._attempts = CallAttempts()
        self._waiter: asyncio.Future[None] | None = None
        token = CALL_ATTEMPTS.set(self._attempts)
        self._task = _start(self._read_batches())
        CALL_ATTEMPTS.reset(token)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        # the task, and those of other requests, ask their models in the next turn of the loop; this is done in the one
        # after that, so that no model is asked later for it
        loop.call_soon(loop.call_soon, self._build_early)
        try:
            await self._wait(self._early_failure_wait)
            if self._attempts.is_sent:
                await self._wait_for_server(_HEAD_WAIT_S)
            if self._attempts.has_failed:
                await self._wait_for_server(_RETRY_WAIT_S)
            if self._task.done():
                self._task.result()
        except BaseException:
            await self._stop()
            raise
        self._is_over = True
        self._put_first_events()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        if not self._read:
            await self._task
        if not self._read:
            raise StopAsyncIteration
        return self._read.pop(0)  # and let go of it, for as long as the model thinks

    def _build_early(self) -> None:
        if not self._is_over:
            self._first_events = self._build_first_events()

    def _put_first_events(self) -> None:
        """Let the first events come first: together with the first batch, if that has been read."""
        first_events, self._first_events = self._first_events or self._build_first_events(), ()
        if self._read:
            self._read[0] = prepend_to_batch(first_events, self._read[0])
        else:
            self._read.append(first_events)

    async def _wait(self, limit: SharedTimeout) -> None:
        """Wait until the task is done, or for as long as `limit`, or until `_wake` is called."""
        if self._task.done():
            return
        self._waiter = asyncio.get_running_loop().create_future()
        limit.start(self._wake)
        try:
            await self._waiter
        finally:
            limit.cancel(self._wake)

    async def _wait_for_server(self, limit_s: float) -> None:
        """Wait until a server has accepted the call."""
        if not self._attempts.is_accepted:
            self._attempts.on_accepted = self._wake
            await self._wait(SharedTimeout(limit_s))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _read_batches(self) -> None:
        try:
            async for events in self._batches:
                if events:
                    self._read.append(events)
                if self._is_over or not (self._awaits_tool_lists and all(map(_is_unlisted_event, events))):
                    return
        finally:
            self._wake()  # in this step of the task, not one turn of the loop after its end

    async def _stop(self) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})


def _start(reading: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Return a task of the coroutine, which has begun already where Python can do that: from 3.12 on."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(reading, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.get_running_loop().create_task(reading)  # asyncio.create_task would also give it a name


def _is_unlisted_event(event: ResponseStreamEvent) -> bool:
    """Return True for an event of a server's listing that has not succeeded."""
    if isinstance(event, ResponseOutputItemAddedEvent | ResponseOutputItemDoneEvent):
        return event.item.type == "mcp_list_tools"
    return event.type in ("response.mcp_list_tools.in_progress", "response.mcp_list_tools.failed")
