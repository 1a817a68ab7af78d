"""ResponseRunner: the life of a response from its first event to its last, which is stored before it is sent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from typing import Final, TypeVar

from openai.types.responses import Response

from apis.accounts.charges import UNKNOWN_USE
from apis.errors import StackError, StoredValueTooLarge, StoreUnavailable
from apis.events import EventBatch, ResponseStreamEvent
from apis.shared_timeout import SharedTimeout
from apis.sink import Sink
from providers.common.fair_turns import run_long
from providers.responses.context.item_views import ItemView
from providers.responses.events.response_events import first_events, terminal_event
from providers.responses.run.live_events import EARLY_FAILURE_WAIT_S, LiveEvents
from providers.responses.run.pending_response import (
    PendingResponse,
    failure_to_error,
    shutdown_error,
    time_limit,
    use_of_response,
)
from providers.responses.run.response_span import ResponseSpan
from providers.responses.store.history import History

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_TIMEOUT_SETTING: Final = "responses.response_timeout_s"
_CLOSE_TIMEOUT_S: Final = 10
"""Seconds that `close` waits for writes that began after their runs were cancelled."""


Keep = Callable[[Response], Awaitable[None]]


class ResponseRunner:
    """Runs responses that end within `timeout_s`, and stores them."""

    def __init__(self, history: History, timeout_s: float) -> None:
        self._history = history
        self._timeout_s = timeout_s
        self._early_failure_wait = SharedTimeout(EARLY_FAILURE_WAIT_S)
        self._store_tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def end_running(self) -> None:
        """Fail the responses that are cancelled from now on: the process ends, and no client has left."""
        self._is_ending = True

    async def close(self) -> None:
        """Wait until the responses of runs that were cancelled are stored."""
        if self._store_tasks:
            await asyncio.wait(self._store_tasks, timeout=_CLOSE_TIMEOUT_S)

    async def run(
        self, pending: PendingResponse, sink: Sink[ResponseStreamEvent], view: ItemView, keep: Keep | None = None
    ) -> None:
        """Generate a response and put its events into `sink`, as `view` shows them. Before the last one `keep` is
        called with the final object. A failure after the first event puts `response.failed` and is then raised; a run
        that is cancelled stores the response as cancelled."""
        live = LiveEvents(sink, view, is_streamed=pending.request.stream is True)
        if pending.mailbox is not None:
            pending.mailbox.events = live
        async with pending.lock or nullcontext():
            await self._run(pending, live, keep)

    async def run_input_only(
        self, pending: PendingResponse, sink: Sink[ResponseStreamEvent], view: ItemView, keep: Keep | None = None
    ) -> None:
        """Put the events of a response that only holds its input, once the model's engine has cached the prompt if it
        can. Its usage has the prompt's tokens. The arguments are those of `run`."""
        live = LiveEvents(sink, view, is_streamed=pending.request.stream is True)
        initial = pending.build_initial_response()
        async with pending.lock or nullcontext():
            if pending.prefill is not None:
                pending.agent_loop.state.usage = await self.run_in_time(pending.prefill(pending.agent_loop.chat))
            final = pending.build_final_response()
            await pending.store(final, self._history)
        if keep is not None:
            await keep(final)
        await live.end([*first_events(initial), terminal_event(final)])

    async def run_in_time(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of `work`. Raises UpstreamTimeout where it takes longer than a response may."""
        async with time_limit(self._timeout_s, _TIMEOUT_SETTING):
            return await work

    async def _run(self, pending: PendingResponse, live: LiveEvents, keep: Keep | None) -> None:
        pending.output.has_readers = pending.request.stream is True
        span, error = ResponseSpan(pending), None
        live.open(
            lambda: first_events(pending.build_initial_response()),
            self._early_failure_wait,
            awaits_tool_lists=pending.agent_loop.requires_tool_lists,
        )
        try:
            async with time_limit(self._timeout_s, _TIMEOUT_SETTING):
                await pending.agent_loop.run(live)
            final = pending.build_final_response()
            await pending.store(final, self._history)
            span.describe(final)
            if keep is not None:
                await keep(final)
            await live.end([terminal_event(final)])
        except asyncio.CancelledError as exc:
            span.fail(exc)
            if live.has_begun and self._is_ending:
                error = shutdown_error()
                await live.end(await self._end_with_failure(pending, error))
                raise error from exc
            if live.has_begun:
                if pending.charge is not None:
                    pending.charge.claim()
                self._store_later(self._store_interrupted(pending))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # the stream's outer edge; a native panic is no Exception
            span.fail(exc)
            if not live.has_begun:
                raise
            error = failure_to_error(exc, pending.ids.response_id)
            error.repeats_work = bool(pending.output.items)
            await live.end(await self._end_with_failure(pending, error))
            raise error from (exc.__cause__ if error is exc else exc)
        finally:
            live.close()
            span.end()
            del error  # an exception that is raised here has this frame, and would hold itself by it

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
