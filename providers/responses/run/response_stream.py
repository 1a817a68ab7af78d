"""ResponseStreams: the life of a response from its first event to its last, which is stored before it is sent."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Final

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseStreamEvent,
)

from apis.errors import StackError, StoredValueTooLarge, StoreUnavailable, UpstreamTimeout
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
                    async with _peek_first_batch(batches) as first_batch:
                        begun = True
                        yield _first_events(pending.build_initial_response())
                        if events := await first_batch:
                            yield events
                    del first_batch
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
            try:
                await pending.store(response, self._history)
            except StoredValueTooLarge:  # its client has read the items; what is stored says why they are not there
                await pending.store(response.model_copy(update={"output": []}), self._history)
        except StackError as exc:
            _log.warning("a %s response was not stored: %s", response.status, exc.message)


@asynccontextmanager
async def _peek_first_batch(batches: AsyncGenerator[EventBatch]) -> AsyncGenerator[asyncio.Task[EventBatch]]:
    """Start the first batch as a task and wait for it briefly, so that an early refusal of the model is raised here."""

    async def first_batch() -> EventBatch:
        try:
            return await anext(batches)
        except StopAsyncIteration:  # anext's own default must not be a tuple: Python 3.11 fails on it
            return ()

    task = asyncio.create_task(first_batch())
    try:
        await asyncio.wait({task}, timeout=_EARLY_FAILURE_WAIT_S)
        if task.done():
            task.result()
        yield task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


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
