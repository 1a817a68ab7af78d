"""The events of a response's stream: their kinds, their JSON, the form in which a log stores them; EventQueue, which
reports events to webhooks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseQueuedEvent,
)
from pydantic import BaseModel

from apis.wire.base import fields_to_write, sdk_model_to_json

if TYPE_CHECKING:
    from openai.types.responses import ResponseStreamEvent
else:  # the classes of all events would take half a megabyte, and a stream has events of few
    ResponseStreamEvent = BaseModel

INITIAL_EVENTS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
"""Types of the events that precede the first output item."""
INITIAL_EVENT_COUNT: Final = len(INITIAL_EVENTS)
"""Events of a background response before its first output item, one of each type."""
TERMINAL_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Types of the events that can end a stream."""
RESPONSE_EVENTS: Final = INITIAL_EVENTS | TERMINAL_EVENTS
"""Types of the events that hold the whole response object."""
ResponseStatusEvent = (
    ResponseCreatedEvent
    | ResponseQueuedEvent
    | ResponseInProgressEvent
    | ResponseCompletedEvent
    | ResponseIncompleteEvent
    | ResponseFailedEvent
)
"""An event that holds the whole response object. To ask for its type takes a tenth of asking for its class."""
ITEM_EVENTS: Final = frozenset({"response.output_item.added", "response.output_item.done"})
"""Types of the events that hold an item."""
ResponseItemEvent = ResponseOutputItemAddedEvent | ResponseOutputItemDoneEvent
"""An event that holds an item."""
FLAT_EVENTS: Final = frozenset(
    f"response.{name}.delta"
    for name in ("output_text", "reasoning_text", "refusal", "function_call_arguments", "custom_tool_call_input")
)
"""Types of the events whose fields are plain values, as nearly all events of a stream are."""

EventList = list[ResponseStreamEvent]
"""Events that their receiver may extend."""
EventBatch = Sequence[ResponseStreamEvent]
"""Events that became ready together."""


class LoggedEvent(NamedTuple):
    """An event as a log stores it: `data` is one line of JSON with its `sequence_number`, `type` the type in it."""

    type: str
    data: bytes


ResponseEvent = ResponseStreamEvent | LoggedEvent
"""A live event, or one that a log stored."""
ResponseEventBatch = Sequence[ResponseEvent]
"""Live events, or events that a log stored; a batch may mix them."""


def event_to_json(event: ResponseStreamEvent) -> bytes:
    """Return the event as the API writes it, except that times of a response object may be floats."""
    return flat_event_to_json(event) if event.type in FLAT_EVENTS else sdk_model_to_json(event)


def flat_event_to_json(event: ResponseStreamEvent) -> bytes:
    """Return an event of one of the FLAT_EVENTS, which has all its fields set, as the API writes it."""
    return orjson.dumps(event.__dict__, fields_to_write)


def response_event_to_json(event: ResponseStatusEvent, response: bytes) -> bytes:
    """Return an event that holds a response object whose JSON is known."""
    end = b',"sequence_number":%d,"type":"%b"}' % (event.sequence_number, event.type.encode())
    return b"".join((b'{"response":', response, end))
