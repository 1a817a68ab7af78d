"""The events that hold the whole response, and the numbers of all events."""

from collections.abc import Sequence

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseStreamEvent,
)

from apis.events import EventBatch
from apis.wire.base import remember_json
from providers.responses.events.unvalidated import unvalidated

_build_created_event = unvalidated(ResponseCreatedEvent)
_build_in_progress_event = unvalidated(ResponseInProgressEvent)
_build_completed_event = unvalidated(ResponseCompletedEvent)
_build_incomplete_event = unvalidated(ResponseIncompleteEvent)
_build_failed_event = unvalidated(ResponseFailedEvent)


def first_events(response: Response) -> EventBatch:
    """Return the events with which a stream of this response begins."""
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


def assign_sequence_numbers(events: Sequence[ResponseStreamEvent], next_number: int) -> int:
    """Number the events from `next_number` on and return the number after them: the one place that assigns numbers."""
    for event in events:
        vars(event)["sequence_number"] = next_number  # pydantic's own assignment takes as long as everything else here
        next_number += 1
    return next_number
