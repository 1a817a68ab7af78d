"""The JSON of the SDK's models, compared with that of pydantic's own serializers."""

from typing import Any

import orjson
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseTextDeltaEvent,
)
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from apis.wire.base import remember_json, remembered_json, sdk_model_to_json

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"schema_": {"type": "string"}}, "$defs": {"async_": {}}}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "G\u00fcn\u2028 \U0001f600", "annotations": []}],
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1.5,
    "model": "m",
    "output": [MESSAGE, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "async": True}],
    "parallel_tool_calls": True,
    "tool_choice": {"type": "function", "name": "f"},
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": None, "async": False}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "metadata": None,
    "temperature": 1e-7,
    "beyond_the_sdk": {"deep": [{"nothing": None}]},
}
DELTA = {
    "type": "response.output_text.delta",
    "content_index": 0,
    "delta": "x",
    "item_id": "msg_1",
    "logprobs": [{"token": "x", "logprob": -0.1, "top_logprobs": [{"token": "y"}]}],
    "output_index": 0,
    "sequence_number": 3,
}


def pydantic_json(model: BaseModel) -> bytes:
    return model.model_dump_json(by_alias=True, exclude_unset=True).encode()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Response, RESPONSE),
        (ResponseOutputMessage, MESSAGE),
        (ResponseOutputMessage, {**MESSAGE, "phase": None}),
        (ResponseTextDeltaEvent, DELTA),
        (ResponseFunctionToolCall, RESPONSE["output"][1]),
    ],
)
def test_the_json_equals_that_of_pydantic(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    model = kind.model_validate(fields)
    assert sdk_model_to_json(model) == pydantic_json(model)
    assert orjson.loads(sdk_model_to_json(model)) == fields
    copy = model.model_copy(update={"status": "incomplete"})
    assert sdk_model_to_json(copy) == pydantic_json(copy)


def test_a_number_of_any_size_is_written() -> None:
    tools = [{**RESPONSE["tools"][0], "parameters": {"maximum": 10**30}}]
    response = Response.model_validate({**RESPONSE, "tools": tools})
    assert b'"maximum":1000000000000000000000000000000}' in sdk_model_to_json(response)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(PydanticSerializationError):
        sdk_model_to_json(ResponseOutputMessage.model_validate({**MESSAGE, "beyond": object()}))


def test_json_is_remembered_for_one_model_and_for_no_copy_of_it() -> None:
    response = Response.model_validate(RESPONSE)
    assert remembered_json(response) is None
    remember_json(response, b"{}")
    assert sdk_model_to_json(response) is remembered_json(response)  # of a large answer, without a copy
    assert remembered_json(response) == b"{}"
    for deep in (False, True):
        copy = response.model_copy(update={"status": "failed"}, deep=deep)
        assert remembered_json(copy) is None
        assert orjson.loads(sdk_model_to_json(copy))["status"] == "failed"
