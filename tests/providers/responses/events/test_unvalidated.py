"""Models built without validation equal those of the SDK's constructors, field by field and in their JSON."""

from typing import Any

import pytest
from openai.types.responses import (
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from apis.wire.base import sdk_model_to_json
from providers.responses.events.unvalidated import unvalidated

TEXT: dict[str, Any] = {"type": "output_text", "text": "héllo", "annotations": [], "logprobs": []}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (ResponseOutputText, TEXT),
    (ResponseOutputMessage, {**MESSAGE, "content": [ResponseOutputText.model_validate(TEXT)]}),
    (
        ResponseOutputItemDoneEvent,
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": ResponseOutputMessage.model_validate({**MESSAGE, "content": []}),
            "sequence_number": 3,
        },
    ),
    (
        ResponseTextDoneEvent,
        {
            "type": "response.output_text.done",
            "item_id": "msg_1",
            "output_index": 0,
            "content_index": 0,
            "text": "héllo",
            "logprobs": [],
            "sequence_number": 3,
        },
    ),
    (
        ResponseUsage,
        {
            "input_tokens": 1,
            "input_tokens_details": InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            "output_tokens": 2,
            "output_tokens_details": OutputTokensDetails(reasoning_tokens=1),
            "total_tokens": 3,
        },
    ),
]


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_model_equals_the_constructors(kind: Any, fields: dict[str, Any]) -> None:
    built, constructed = unvalidated(kind)(**fields), kind(**fields)
    assert built == constructed
    assert built.model_fields_set == constructed.model_fields_set
    assert sdk_model_to_json(built) == sdk_model_to_json(constructed)
    assert built.model_copy(update={"id": "x"}) == constructed.model_copy(update={"id": "x"})


def test_a_field_without_a_value_has_its_default_and_can_be_set() -> None:
    message = unvalidated(ResponseOutputMessage)(**MESSAGE, content=[])  # pyright: ignore[reportArgumentType]  # as the strings are literals
    assert message.phase is None
    assert b"phase" not in sdk_model_to_json(message)
    message.phase = "commentary"
    assert b'"phase":"commentary"' in sdk_model_to_json(message)
