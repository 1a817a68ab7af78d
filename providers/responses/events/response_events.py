"""The events of a stream: their constructors, and their numbers.

Every event has `sequence_number=0` until its response puts it into the stream.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, get_args

from openai.types import responses
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseQueuedEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseTextDeltaEvent,
)

from apis.events import EventBatch, ResponseStreamEvent
from apis.wire.base import remember_json
from providers.responses.events.unvalidated import build_unvalidated, unvalidated

_build_created_event = unvalidated(ResponseCreatedEvent)
_build_queued_event = unvalidated(ResponseQueuedEvent)
_build_in_progress_event = unvalidated(ResponseInProgressEvent)
_build_completed_event = unvalidated(ResponseCompletedEvent)
_build_incomplete_event = unvalidated(ResponseIncompleteEvent)
_build_failed_event = unvalidated(ResponseFailedEvent)
_TEXT_FIELDS: Final = set(ResponseTextDeltaEvent.model_fields)
_REASONING_FIELDS: Final = set(ResponseReasoningTextDeltaEvent.model_fields)
_ARGUMENTS_FIELDS: Final = set(ResponseFunctionCallArgumentsDeltaEvent.model_fields)
_INPUT_FIELDS: Final = set(ResponseCustomToolCallInputDeltaEvent.model_fields)


def first_events(response: Response) -> EventBatch:
    """Return the events with which a stream of this response begins."""
    remember_json(response)
    return [created_event(response), in_progress_event(response)]


def created_event(response: Response) -> ResponseCreatedEvent:
    """Return the `response.created` event."""
    return _build_created_event(type="response.created", response=response, sequence_number=0)


def queued_event(response: Response) -> ResponseQueuedEvent:
    """Return the `response.queued` event."""
    return _build_queued_event(type="response.queued", response=response, sequence_number=0)


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


def item_event(kind: str, item_id: str, index: int, **fields: Any) -> ResponseStreamEvent:
    """Return the event of this type about the item at `index` of the output, with the fields of its own."""
    return build_event(kind, item_id=item_id, output_index=index, **fields)


def build_event(kind: str, **fields: Any) -> ResponseStreamEvent:
    """Return the event of this type with these fields, which are validated."""
    event_class = _TEXT_EVENTS.get(kind) or _import_all_classes()[kind]
    return event_class(type=kind, sequence_number=0, **fields)


def _by_type(classes: Iterable[Any]) -> Mapping[str, Any]:
    return {get_args(event_class.model_fields["type"].annotation)[0]: event_class for event_class in classes}


_TEXT_EVENTS: Final = _by_type(
    (
        ResponseContentPartAddedEvent,
        ResponseContentPartDoneEvent,
        ResponseFunctionCallArgumentsDoneEvent,
        ResponseReasoningTextDoneEvent,
    )
)
"""The classes that a stream of text and calls of functions has, by the types of their events."""


@cache
def _import_all_classes() -> Mapping[str, Any]:
    """Return the classes of all events, which are imported for the first event of a hosted tool."""
    return _by_type(get_args(get_args(responses.ResponseStreamEvent)[0]))


# Those that are sent once per token are built without validation, since their fields come typed from our own code: in a
# third of the constructor's time, which would be the largest part of the time per token.
def text_delta_event(
    item_id: str, index: int, content_index: int, text: str, logprobs: list[Any]
) -> ResponseTextDeltaEvent:
    fields = {
        "content_index": content_index,
        "delta": text,
        "item_id": item_id,
        "logprobs": logprobs,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.output_text.delta",
    }
    if logprobs:  # plain dicts, which validation turns into models
        return ResponseTextDeltaEvent.model_validate(fields)
    return build_unvalidated(ResponseTextDeltaEvent, fields, _TEXT_FIELDS)


def reasoning_delta_event(item_id: str, index: int, text: str) -> ResponseReasoningTextDeltaEvent:
    fields = {
        "content_index": 0,
        "delta": text,
        "item_id": item_id,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.reasoning_text.delta",
    }
    return build_unvalidated(ResponseReasoningTextDeltaEvent, fields, _REASONING_FIELDS)


def arguments_delta_event(item_id: str, index: int, text: str) -> ResponseFunctionCallArgumentsDeltaEvent:
    fields = {
        "delta": text,
        "item_id": item_id,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.function_call_arguments.delta",
    }
    return build_unvalidated(ResponseFunctionCallArgumentsDeltaEvent, fields, _ARGUMENTS_FIELDS)


def input_delta_event(item_id: str, index: int, text: str) -> ResponseCustomToolCallInputDeltaEvent:
    fields = {
        "delta": text,
        "item_id": item_id,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.custom_tool_call_input.delta",
    }
    return build_unvalidated(ResponseCustomToolCallInputDeltaEvent, fields, _INPUT_FIELDS)


def assign_sequence_numbers(events: Sequence[ResponseStreamEvent], next_number: int) -> int:
    """Number the events from `next_number` on and return the number after them: the one place that assigns numbers."""
    for event in events:
        vars(event)["sequence_number"] = next_number  # pydantic's own assignment takes as long as everything else here
        next_number += 1
    return next_number
