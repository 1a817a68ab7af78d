"""LiveEvents: the events of one response on their way to its client."""

import asyncio
from collections.abc import Callable
from typing import Final

from openai.types.responses import ResponseOutputItemAddedEvent, ResponseOutputItemDoneEvent

from apis.events import FLAT_EVENTS, EventBatch, ResponseStreamEvent
from apis.inference import CALL_ATTEMPTS, CallAttempts
from apis.shared_timeout import SharedTimeout
from apis.sink import Sink
from apis.wire.item_types import LISTING_TYPES
from providers.responses.context.item_views import ItemView
from providers.responses.events.response_events import assign_sequence_numbers

EARLY_FAILURE_WAIT_S: Final = 0.04
"""Seconds that the first event waits for the model: a refusal within them becomes an HTTP status."""
_HEAD_WAIT_S: Final = 1 - EARLY_FAILURE_WAIT_S
"""Seconds more that it waits for a server that has been sent the request, and has not yet answered with a status."""
_RETRY_WAIT_S: Final = 10
"""Seconds that the first event waits for servers of which one has failed already."""
_UNLISTED_PHASES: Final = {f"response.{name}.{phase}" for name in LISTING_TYPES for phase in ("in_progress", "failed")}


class LiveEvents(Sink[ResponseStreamEvent]):
    """Numbers the events of a response from 0 on, and passes them to `sink` as its request sees them: all of them where
    it `is_streamed`, only the last one otherwise.

    A stream begins with the events of `build_first_events`, which wait for the first batch for a short time, so that an
    early refusal by the model is an HTTP error and no stream. Where a server has been sent the call, they wait for its
    status, for a second at most; where an attempt fails meanwhile, until a server accepts the next one or all have
    failed. With `awaits_tool_lists` the refusal of a server whose tools cannot be listed is no stream, too: batches of
    a listing that has not succeeded wait with the first events. `has_begun` is true once something has left.
    """

    def __init__(self, sink: Sink[ResponseStreamEvent], view: ItemView, *, is_streamed: bool) -> None:
        self.has_begun = False
        self._sink = sink
        self._view = view
        self._is_streamed = is_streamed
        self.next_number = 0
        """The number of the event that comes next."""
        self._opening: _Opening | None = None

    def open(
        self,
        build_first_events: Callable[[], EventBatch],
        early_failure_wait: SharedTimeout,
        *,
        awaits_tool_lists: bool,
    ) -> None:
        """Begin to wait for the first batch. Call it in the task that asks the model."""
        if self._is_streamed:
            self._opening = _Opening(self._begin, build_first_events, early_failure_wait, awaits_tool_lists)

    def close(self) -> None:
        """End the wait for the first batch."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    def write(self, batch: EventBatch) -> bool:
        if not self._is_streamed:
            self.has_begun = True
            return True
        events = batch if self._opening is None else self._add_first_events(batch, self._opening)
        return self._sink.write(self._number_and_show(events)) if events else True

    async def put(self, batch: EventBatch) -> None:
        if not self._is_streamed:
            self.has_begun = True
            return
        events = batch if self._opening is None else self._add_first_events(batch, self._opening)
        if events:
            await self._sink.put(self._number_and_show(events))

    async def ready(self) -> None:
        await self._sink.ready()

    async def end(self, batch: EventBatch) -> None:
        """Pass on the last events, of which the very last one ends the response."""
        await (self.put(batch) if self._is_streamed else self._sink.put(self._number_and_show(batch[-1:])))

    def _begin(self) -> None:
        """Begin without a batch."""
        if self._opening is not None:
            events = self._opening.take_events()
            self.close()
            self.has_begun = True
            self._sink.write(self._number_and_show(events))

    def _add_first_events(self, batch: EventBatch, opening: "_Opening") -> EventBatch:
        if opening.holds(batch):
            return ()
        self.close()
        self.has_begun = True
        return [*opening.take_events(), *batch]

    def _number_and_show(self, events: EventBatch) -> EventBatch:
        self.next_number = assign_sequence_numbers(events, self.next_number)
        if len(events) == 1 and events[0].type in FLAT_EVENTS:  # nearly every batch is one token
            return events
        return self._view.show_live_events(events)


class _Opening:
    """The first events of a stream, which wait until `begin` is called, or the first batch comes. They are built while
    the model is waited for."""

    def __init__(
        self,
        begin: Callable[[], None],
        build_first_events: Callable[[], EventBatch],
        early_failure_wait: SharedTimeout,
        awaits_tool_lists: bool,  # noqa: FBT001 - of one caller
    ) -> None:
        self._begin = begin
        self._build_first_events = build_first_events
        self._early_failure_wait = early_failure_wait
        self._awaits_tool_lists = awaits_tool_lists
        self._first_events: EventBatch = ()
        self._held_events: list[ResponseStreamEvent] = []
        self._is_over = False
        self._attempts = CallAttempts()
        self._timer: asyncio.TimerHandle | None = None
        CALL_ATTEMPTS.set(self._attempts)
        self._loop = asyncio.get_running_loop()
        # the task, and those of other requests, ask their models in the next turn of the loop; this is done in the one
        # after that, so that no model is asked later for it
        self._loop.call_soon(self._loop.call_soon, self._build_early)
        early_failure_wait.start(self._end_early_wait)

    def holds(self, batch: EventBatch) -> bool:
        """Hold a batch back, and return true, if it does not begin the stream."""
        is_held = not batch or (self._awaits_tool_lists and all(map(_is_unlisted_event, batch)))
        if is_held:
            self._held_events += batch
        return is_held

    def take_events(self) -> EventBatch:
        """Return the first events, and those that were held back."""
        return [*(self._first_events or self._build_first_events()), *self._held_events]

    def cancel(self) -> None:
        """Wait no more."""
        self._is_over = True
        self._attempts.on_accepted = None
        self._early_failure_wait.cancel(self._end_early_wait)
        if self._timer is not None:
            self._timer.cancel()

    def _build_early(self) -> None:
        if not self._is_over:
            self._first_events = self._build_first_events()

    def _end_early_wait(self) -> None:
        if self._attempts.is_sent:
            self._wait_for_server(_HEAD_WAIT_S, self._end_head_wait)
        else:
            self._end_head_wait()

    def _end_head_wait(self) -> None:
        if self._attempts.has_failed:
            self._wait_for_server(_RETRY_WAIT_S, self._begin)
        else:
            self._begin()

    def _wait_for_server(self, limit_s: float, go_on: Callable[[], None]) -> None:
        """Wait until a server has accepted the call, and begin; or go on after the limit."""
        if self._attempts.is_accepted:
            self._begin()
        elif not self._is_over:
            self._attempts.on_accepted = self._begin
            self._timer = self._loop.call_later(limit_s, go_on)


def _is_unlisted_event(event: ResponseStreamEvent) -> bool:
    """Return True for an event of a server's listing that has not succeeded."""
    if isinstance(event, ResponseOutputItemAddedEvent | ResponseOutputItemDoneEvent):
        return event.item.type in LISTING_TYPES
    return event.type in _UNLISTED_PHASES
