"""ResponseStreams: the life of a response from its first event to its last, which is stored before it is sent."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from typing import Final, TypeVar

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseStreamEvent,
)

from apis.accounts.charges import UNKNOWN_USE
from apis.errors import Overloaded, StackError, StoredValueTooLarge, StoreUnavailable
from apis.events import FLAT_EVENTS, TERMINAL_EVENTS, EventBatch
from apis.live_batch import LiveBatch, convert_batch
from apis.shared_timeout import SharedTimeout
from apis.wire.base import remember_json
from providers.common.fair_turns import run_long
from providers.responses.context.item_views import ItemView
from providers.responses.events.unvalidated import unvalidated
from providers.responses.run.deadline import ResponseDeadline
from providers.responses.run.first_batches import EARLY_FAILURE_WAIT_S, FirstBatches
from providers.responses.run.pending_response import PendingResponse, failure_to_error, use_of_response
from providers.responses.run.response_span import ResponseSpan
from providers.responses.store.conversation_lock import stream_with_lock
from providers.responses.store.history import History

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
_build_created_event = unvalidated(ResponseCreatedEvent)
_build_in_progress_event = unvalidated(ResponseInProgressEvent)
_build_completed_event = unvalidated(ResponseCompletedEvent)
_build_incomplete_event = unvalidated(ResponseIncompleteEvent)
_build_failed_event = unvalidated(ResponseFailedEvent)

_CLOSE_TIMEOUT_S: Final = 10
"""Seconds that `close` waits for writes that began after their streams ended."""


class ResponseStreams:
    """Streams responses that end within `timeout_s`, and stores them."""

    def __init__(self, history: History, timeout_s: float) -> None:
        self._history = history
        self._timeout = SharedTimeout(timeout_s)
        self._early_failure_wait = SharedTimeout(EARLY_FAILURE_WAIT_S)
        self._store_tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def end_running(self) -> None:
        """Fail the streams that are cancelled or closed from now on: the process ends, and no client has left."""
        self._is_ending = True

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
        """Yield the events of a response that only holds its input, once the model's engine has cached the prompt if it
        can. Its usage has the prompt's tokens."""
        initial = pending.build_initial_response()
        async with pending.lock or nullcontext():
            if pending.prefill is not None:
                pending.agent_loop.state.usage = await self.run_in_time(pending.prefill(pending.agent_loop.chat))
            final = pending.build_final_response()
            await pending.store(final, self._history)
        yield [*_first_events(initial), terminal_event(final)]

    async def run_in_time(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of `work`. Raises UpstreamTimeout where it takes longer than a response may."""
        with ResponseDeadline(self._timeout) as deadline:
            deadline.begin_wait()
            return await work

    async def _stream_events(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        pending.output.has_readers = pending.request.stream is True
        run = pending.agent_loop.run()
        begun, span, error = False, ResponseSpan(pending), None
        try:
            with ResponseDeadline(self._timeout) as deadline:
                async with aclosing(run):
                    deadline.begin_wait()
                    if pending.request.stream:
                        async with self._read_first_batches(run, pending) as first_batches:
                            begun = True
                            async for events in first_batches:
                                deadline.end_wait()
                                yield events
                                deadline.begin_wait()
                    async for events in run:
                        deadline.end_wait()
                        begun = True
                        yield events
                        deadline.begin_wait()
            final = pending.build_final_response()
            await pending.store(final, self._history)
            span.describe(final)
            yield [terminal_event(final)]
        except (GeneratorExit, asyncio.CancelledError) as exc:
            span.fail(exc)
            if begun and self._is_ending and isinstance(exc, asyncio.CancelledError):
                error = shutdown_error()
                yield await self._end_with_failure(pending, error)
                raise error from exc
            if begun:
                if pending.charge is not None:
                    pending.charge.claim()
                self._store_later(self._store_interrupted(pending))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # the stream's outer edge; a native panic is no Exception
            span.fail(exc)
            if not begun:
                raise
            error = failure_to_error(exc, pending.ids.response_id)
            error.repeats_work = bool(pending.output.items)
            yield await self._end_with_failure(pending, error)
            raise error from (exc.__cause__ if error is exc else exc)
        finally:
            span.end()
            del error  # an exception that is raised here has this frame, and would hold itself by it

    def _read_first_batches(self, batches: AsyncGenerator[EventBatch], pending: PendingResponse) -> FirstBatches:
        return FirstBatches(
            batches,
            self._early_failure_wait,
            lambda: _first_events(pending.build_initial_response()),
            awaits_tool_lists=pending.agent_loop.requires_tool_lists,
        )

    def _build_interrupted(self, pending: PendingResponse) -> Response:
        """Return the response as a client that left, or the end of the process, ended it."""
        if not self._is_ending:
            return pending.build_cancelled_response()
        pending.agent_loop.close_open_items()
        return pending.build_failed_response(shutdown_error())

    async def _end_with_failure(self, pending: PendingResponse, error: StackError) -> EventBatch:
        """Return the last events of a failed response: the open items end incomplete, then `response.failed`."""
        await pending.agent_loop.count_unfinished_prompt()
        events = await run_long(pending.agent_loop.close_open_items)  # their text may be large
        final = pending.build_failed_response(error)
        if isinstance(error, StoreUnavailable):
            self._store_later(self._store_or_log(pending, final))  # the client has waited for the store once already
        else:
            await self._store_or_log(pending, final)
        return [*events, terminal_event(final)]

    def _store_later(self, storing: Coroutine[None, None, None]) -> None:
        """Store in a task of its own, because the current one is being cancelled once its client is gone."""
        task = asyncio.create_task(storing)
        self._store_tasks.add(task)
        task.add_done_callback(self._store_tasks.discard)

    async def _store_interrupted(self, pending: PendingResponse) -> None:
        """Store the response as a client that left, or the end of the process, ended it, and count what it has used."""
        use = UNKNOWN_USE
        try:
            await pending.agent_loop.count_unfinished_prompt()
            final = await run_long(self._build_interrupted, pending)
            use = use_of_response(final)
            await self._store_or_log(pending, final)
        finally:
            if pending.charge is not None:
                pending.charge.end_claimed(use)

    async def _store_or_log(self, pending: PendingResponse, response: Response) -> None:
        try:
            try:
                await pending.store(response, self._history)
            except StoredValueTooLarge:  # its client has read the items; what is stored says why they are not there
                await pending.store(response.model_copy(update={"output": []}), self._history)
        except StackError as exc:
            _log.warning("a %s response was not stored: %s", response.status, exc.message)


def _first_events(response: Response) -> EventBatch:
    remember_json(response)
    created = _build_created_event(type="response.created", response=response, sequence_number=0)
    return [created, in_progress_event(response)]


def in_progress_event(response: Response) -> ResponseStreamEvent:
    """Return the `response.in_progress` event."""
    return _build_in_progress_event(type="response.in_progress", response=response, sequence_number=0)


def terminal_event(response: Response) -> ResponseStreamEvent:
    """Return the event that ends the stream of this final response; a cancelled one has no such event."""
    match response.status:
        case "completed":
            return _build_completed_event(type="response.completed", response=response, sequence_number=0)
        case "incomplete":
            return _build_incomplete_event(type="response.incomplete", response=response, sequence_number=0)
        case _:
            return _build_failed_event(type="response.failed", response=response, sequence_number=0)


class LiveEventView:
    """The events of one live stream as its request sees them, numbered from 0 on."""

    __slots__ = ("_next_number", "_view")

    def __init__(self, view: ItemView) -> None:
        self._view = view
        self._next_number = 0

    def show(self, events: EventBatch) -> EventBatch:
        """Number the next batch, and return it as the request sees it: live if it is."""
        return convert_batch(events, self._number_and_show)

    def show_end(self, events: EventBatch) -> EventBatch:
        """Return the terminal event of a batch that has one, and no event of any other batch: for a response that is
        not streamed. Batches that can be pushed are dropped where they arrive."""
        if events and events[-1].type in TERMINAL_EVENTS:
            return self._number_and_show(events[-1:])
        if isinstance(events, LiveBatch):
            events.push_to(_drop_events)
        return ()

    def _number_and_show(self, events: EventBatch) -> EventBatch:
        self._next_number = assign_sequence_numbers(events, self._next_number)
        if len(events) == 1 and events[0].type in FLAT_EVENTS:  # nearly every batch is one token
            return events
        return self._view.show_live_events(events)


def _drop_events(_: EventBatch) -> bool:
    return True


def assign_sequence_numbers(events: Sequence[ResponseStreamEvent], next_number: int) -> int:
    """Number the events from `next_number` on and return the number after them: the one place that assigns numbers."""
    for event in events:
        vars(event)["sequence_number"] = next_number  # pydantic's own assignment takes as long as everything else here
        next_number += 1
    return next_number


def shutdown_error() -> Overloaded:
    """Return the error of a response that the end of the process cut off."""
    return Overloaded("The server was shut down before the response was complete. Send the request again.")
