"""The events that are sent once per token. Their fields come typed from our own code, so they are built without
validation: in a third of the constructor's time, which would be the largest part of the time per token."""

from typing import Any, Final

from openai.types.responses import (
    ResponseCustomToolCallInputDeltaEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseTextDeltaEvent,
)

from providers.responses.events.unvalidated import build_unvalidated

_TEXT_FIELDS: Final = set(ResponseTextDeltaEvent.model_fields)
_REASONING_FIELDS: Final = set(ResponseReasoningTextDeltaEvent.model_fields)
_ARGUMENTS_FIELDS: Final = set(ResponseFunctionCallArgumentsDeltaEvent.model_fields)
_INPUT_FIELDS: Final = set(ResponseCustomToolCallInputDeltaEvent.model_fields)


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
