"""ResponseStreams: the life of a response from its first event to its last, which is stored before it is sent."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from typing import Final, Self

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseStreamEvent,
)

from apis.errors import StackError, StoreUnavailable, UpstreamTimeout
from apis.events import EventBatch
from providers.responses.run.pending_response import PendingResponse, bug_to_error
from providers.responses.store.conversation_lock import stream_with_lock
from providers.responses.store.history import History

_log = logging.getLogger(__name__)

_EARLY_FAILURE_WAIT_S: Final = 0.04
"""Seconds that the first event waits for the model: a refusal within them becomes an HTTP status."""
_CLOSE_TIMEOUT_S: Final = 10
"""Seconds that `close` waits for writes that began after their streams ended."""


class ResponseStreams:
    """Streams responses that end within `timeout_s`, and stores them."""

    def __init__(self, history: History, timeout_s: float) -> None:
        self._history = history
        self._timeout_s = timeout_s
        self._store_tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until the responses of streams that have ended are stored."""
        if self._store_tasks:
            await asyncio.wait(self._store_tasks, timeout=_CLOSE_TIMEOUT_S)

    def stream(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        """Yield all events, without sequence numbers. A failure after the first event yields `response.failed` and is
        then raised; closing the generator early stores the response as cancelled."""
        events = self._stream_events(pending)
        return events if pending.lock is None else stream_with_lock(pending.lock, events)

    async def stream_input_only(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        """Yield the events of a response that only holds its input, without asking a model."""
        initial, final = pending.build_initial_response(), pending.build_final_response()
        async with pending.lock or nullcontext():
            await pending.store(final, self._history)
        yield [*_first_events(initial), terminal_event(final)]

    async def _stream_events(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        deadline = time.monotonic() + self._timeout_s
        begun = False
        try:
            async with aclosing(pending.agent_loop.run(stream_deltas=pending.request.stream is True)) as batches:
                if pending.request.stream:
                    async with _FirstBatches(
                        batches, awaits_tool_lists=pending.agent_loop.requires_tool_lists
                    ) as first_batches:
                        begun = True
                        yield _first_events(pending.build_initial_response())
                        async for events in first_batches:
                            yield events
                    del first_batches
                async for events in batches:
                    begun = True
                    yield events
                    if time.monotonic() > deadline:
                        raise timeout_error(self._timeout_s)
            final = pending.build_final_response()
            await pending.store(final, self._history)
            yield [terminal_event(final)]
        except (GeneratorExit, asyncio.CancelledError):
            if begun:
                # the client is gone and this task is being cancelled: the write needs a task of its own
                self._store_later(pending, pending.build_cancelled_response())
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # the stream's outer edge; a native panic is no Exception
            if not begun:
                raise
            error = exc if isinstance(exc, StackError) else bug_to_error(exc, pending.ids.response_id)
            error.repeats_work = bool(pending.output.items)
            yield await self._end_with_failure(pending, error)
            raise error from exc

    async def _end_with_failure(self, pending: PendingResponse, error: StackError) -> EventBatch:
        """Return the last events of a failed response: the open items end incomplete, then `response.failed`."""
        events = pending.agent_loop.close_open_items()
        final = pending.build_failed_response(error)
        if isinstance(error, StoreUnavailable):
            self._store_later(pending, final)  # the client has waited for the store once already
        else:
            await self._store_or_log(pending, final)
        return [*events, terminal_event(final)]

    def _store_later(self, pending: PendingResponse, response: Response) -> None:
        task = asyncio.create_task(self._store_or_log(pending, response))
        self._store_tasks.add(task)
        task.add_done_callback(self._store_tasks.discard)

    async def _store_or_log(self, pending: PendingResponse, response: Response) -> None:
        try:
            await pending.store(response, self._history)
        except StackError as exc:
            _log.warning("a %s response was not stored: %s", response.status, exc.message)


class _FirstBatches:
    """The first batch, read by a task that is waited for briefly: an early refusal by the model is raised on entering.
    With `awaits_tool_lists` that of a server whose tools cannot be listed is raised, too: the batches of a listing that
    has not succeeded are then also among the first. Iterate it to the end before the context ends."""

    def __init__(self, batches: AsyncGenerator[EventBatch], *, awaits_tool_lists: bool) -> None:
        self._batches = batches
        self._awaits_tool_lists = awaits_tool_lists
        self._read: list[EventBatch] = []
        self._is_over = False
        self._task = asyncio.create_task(self._read_batches())

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wait({self._task}, timeout=_EARLY_FAILURE_WAIT_S)
            if self._task.done():
                self._task.result()
        except BaseException:
            await self._stop()
            raise
        self._is_over = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def __aiter__(self) -> AsyncGenerator[EventBatch]:
        early = len(self._read)
        for events in self._read[:early]:
            yield events
        await self._task
        for events in self._read[early:]:
            yield events

    async def _read_batches(self) -> None:
        async for events in self._batches:
            if events:
                self._read.append(events)
            if self._is_over or not (self._awaits_tool_lists and all(map(_is_unlisted_event, events))):
                return

    async def _stop(self) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})


def _is_unlisted_event(event: ResponseStreamEvent) -> bool:
    """Return whether the event is that of a server's listing that has not succeeded."""
    if isinstance(event, ResponseOutputItemAddedEvent | ResponseOutputItemDoneEvent):
        return event.item.type == "mcp_list_tools"
    return event.type in ("response.mcp_list_tools.in_progress", "response.mcp_list_tools.failed")


def _first_events(response: Response) -> EventBatch:
    created = ResponseCreatedEvent(type="response.created", response=response, sequence_number=0)
    return [created, in_progress_event(response)]


def in_progress_event(response: Response) -> ResponseStreamEvent:
    """Return the `response.in_progress` event."""
    return ResponseInProgressEvent(type="response.in_progress", response=response, sequence_number=0)


def terminal_event(response: Response) -> ResponseStreamEvent:
    """Return the event that ends the stream of this final response; a cancelled one has no such event."""
    match response.status:
        case "completed":
            return ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)
        case "incomplete":
            return ResponseIncompleteEvent(type="response.incomplete", response=response, sequence_number=0)
        case _:
            return ResponseFailedEvent(type="response.failed", response=response, sequence_number=0)


def assign_sequence_numbers(events: Sequence[ResponseStreamEvent], next_number: int) -> int:
    """Number the events from `next_number` on and return the number after them: the one place that assigns numbers."""
    for event in events:
        vars(event)["sequence_number"] = next_number  # pydantic's own assignment takes as long as everything else here
        next_number += 1
    return next_number


def timeout_error(limit_s: float) -> UpstreamTimeout:
    """Return the error of a response that took too long."""
    return UpstreamTimeout(f"The response took longer than {limit_s:g} s (`responses.response_timeout_s`).")
