"""The events built without validation equal those of the SDK's constructors, and so does their JSON."""

from typing import Any

import orjson
import pytest
from openai.types.responses import (
    ResponseCustomToolCallInputDeltaEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseRefusalDeltaEvent,
    ResponseTextDeltaEvent,
)
from pydantic import BaseModel

from apis.events import event_to_json
from apis.wire.base import sdk_model_to_json
from providers.responses.events.response_events import (
    arguments_delta_event,
    input_delta_event,
    reasoning_delta_event,
    text_delta_event,
)
from stack.http.sse import encode_frames

TOP = {"token": "b", "logprob": -1.0, "bytes": [98]}
LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [TOP]}
PAIRS: list[tuple[BaseModel, type[BaseModel]]] = [
    (text_delta_event("msg_1", 2, 3, "héllo\n\u2028😀", []), ResponseTextDeltaEvent),
    (text_delta_event("msg_1", 2, 3, "a", [LOGPROB]), ResponseTextDeltaEvent),
    (reasoning_delta_event("rs_1", 0, 'say "hm"'), ResponseReasoningTextDeltaEvent),
    (arguments_delta_event("fc_1", 1, '{"a'), ResponseFunctionCallArgumentsDeltaEvent),
    (input_delta_event("ctc_1", 1, "*** Begin"), ResponseCustomToolCallInputDeltaEvent),
]


@pytest.mark.parametrize(("event", "kind"), PAIRS)
def test_an_event_equals_the_constructors(event: Any, kind: type[BaseModel]) -> None:
    built = kind.model_validate(event.model_dump())
    assert event == built
    assert event.model_fields_set == built.model_fields_set
    event.sequence_number = built.sequence_number = 7  # pyright: ignore[reportAttributeAccessIssue]  # all events have one
    assert event.model_dump_json() == built.model_dump_json()
    assert encode_frames([event], "openai").decode() == encode_frames([built], "openai").decode()  # pyright: ignore[reportArgumentType]  # events they are


REFUSAL = ResponseRefusalDeltaEvent(
    type="response.refusal.delta", item_id="msg_1", output_index=0, content_index=0, delta="No.", sequence_number=0
)


@pytest.mark.parametrize("event", [*(event for event, _ in PAIRS), REFUSAL])
def test_the_fast_json_of_an_event_equals_the_serializers(event: Any) -> None:
    assert orjson.loads(event_to_json(event)) == orjson.loads(sdk_model_to_json(event))
