"""The events of which there is one for each token. Their fields come typed from our own code, so they are put together
without being validated again: a third of what the constructor costs, and the largest part of a token's price."""

from typing import Any, Final, TypeVar

from openai.types.responses import (
    ResponseCustomToolCallInputDeltaEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseTextDeltaEvent,
)
from pydantic import BaseModel

EventT = TypeVar("EventT", bound=BaseModel)

# what object.__setattr__ finds anew each time
_set_fields = BaseModel.__dict__["__dict__"].__set__
_set_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__
_FIELD_NAMES: Final[dict[type[BaseModel], set[str]]] = {
    kind: set(kind.model_fields)
    for kind in (
        ResponseCustomToolCallInputDeltaEvent,
        ResponseFunctionCallArgumentsDeltaEvent,
        ResponseReasoningTextDeltaEvent,
        ResponseTextDeltaEvent,
    )
}


def _build_event(kind: type[EventT], fields: dict[str, Any]) -> EventT:
    """`kind(**fields)` of all its fields. tests/providers/responses/events/test_token_events.py holds the two equal."""
    event = kind.__new__(kind)
    _set_fields(event, fields)
    _set_names(event, _FIELD_NAMES[kind])
    _set_extra(event, None)
    _set_private(event, None)
    return event


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
    # with logprobs it is the constructor's: they are given as plain dicts
    return ResponseTextDeltaEvent.model_validate(fields) if logprobs else _build_event(ResponseTextDeltaEvent, fields)


def reasoning_delta_event(item_id: str, index: int, text: str) -> ResponseReasoningTextDeltaEvent:
    fields = {
        "content_index": 0,
        "delta": text,
        "item_id": item_id,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.reasoning_text.delta",
    }
    return _build_event(ResponseReasoningTextDeltaEvent, fields)


def arguments_delta_event(item_id: str, index: int, text: str) -> ResponseFunctionCallArgumentsDeltaEvent:
    fields = {
        "delta": text,
        "item_id": item_id,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.function_call_arguments.delta",
    }
    return _build_event(ResponseFunctionCallArgumentsDeltaEvent, fields)


def input_delta_event(item_id: str, index: int, text: str) -> ResponseCustomToolCallInputDeltaEvent:
    fields = {
        "delta": text,
        "item_id": item_id,
        "output_index": index,
        "sequence_number": 0,
        "type": "response.custom_tool_call_input.delta",
    }
    return _build_event(ResponseCustomToolCallInputDeltaEvent, fields)
