"""Tools with a real vLLM, whose structured output makes even a small model call them as they are declared."""

import json
from typing import Any

import jsonschema_rs
import pytest
from openai.types.responses import Response, ResponseCustomToolCall, ResponseFunctionToolCall

from tests.live.asking import FRANCE, answer, chat, deltas, streamed
from tests.support.servers.serving import Served

pytestmark = [pytest.mark.live, pytest.mark.timeout(300, func_only=True)]


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A function whose arguments are all required."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    parameters["required"] = list(properties)
    return {"type": "function", "name": name, "description": name, "parameters": parameters, "strict": True}


WEATHER = function("get_weather", city={"enum": ["Paris", "Rome", "Oslo"]}, unit={"enum": ["celsius", "kelvin"]})
CLOCK = function("get_time", hour={"type": "integer", "minimum": 0, "maximum": 23})
SAY = {"type": "custom", "name": "say", "description": "Says a sentence aloud."}
HOW = 'Answer with a call: {"name": "say", "arguments": {"input": "Hello, how are you?"}}'
ROME = "What is the temperature in Rome?"
CALL_WEATHER = {"type": "function", "name": "get_weather"}


def call_of(response: Response) -> ResponseFunctionToolCall:
    (item,) = response.output
    assert isinstance(item, ResponseFunctionToolCall)
    return item


async def test_a_named_function_is_called_with_arguments_of_its_schema(served: Served) -> None:
    final, events = await streamed(
        served, ROME, tools=[CLOCK, WEATHER], tool_choice=CALL_WEATHER, max_output_tokens=256
    )
    call = call_of(final)
    assert (call.name, call.status, final.status) == ("get_weather", "completed", "completed")
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 1
    assert deltas(events, "function_call_arguments") == call.arguments
    jsonschema_rs.validate(WEATHER["parameters"], json.loads(call.arguments))


async def test_required_makes_a_call_of_a_declared_function(served: Served) -> None:
    tools = {"get_weather": WEATHER, "get_time": CLOCK}
    fields: dict[str, Any] = {"tools": list(tools.values()), "tool_choice": "required", "max_output_tokens": 256}
    for response in (await answer(served, ROME, **fields), (await streamed(served, ROME, **fields))[0]):
        assert response.status == "completed"
        assert response.output
        for call in response.output:
            assert isinstance(call, ResponseFunctionToolCall)
            jsonschema_rs.validate(tools[call.name]["parameters"], json.loads(call.arguments))


async def test_only_allowed_functions_are_called(served: Served) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    response = await answer(served, ROME, tools=[WEATHER, CLOCK], tool_choice=choice, max_output_tokens=256)
    assert {getattr(item, "name", None) for item in response.output} == {"get_time"}


async def test_the_result_of_a_call_is_fed_back(served: Served) -> None:
    first = await answer(served, ROME, tools=[WEATHER], tool_choice=CALL_WEATHER, max_output_tokens=256)
    tool_text = "The temperature in Rome is 17 degrees."
    result = {"type": "function_call_output", "call_id": call_of(first).call_id, "output": tool_text}
    second, _ = await streamed(served, [result], tools=[WEATHER], tool_choice="none", previous_response_id=first.id)
    assert second.status == "completed"
    assert "17" in second.output_text
    third = await answer(served, "Say it again.", tools=[WEATHER], previous_response_id=second.id)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.total_tokens


async def test_a_free_text_tool_is_called_with_text(served: Served) -> None:
    fields: dict[str, Any] = {"instructions": HOW, "tools": [SAY]}
    choice = {"type": "custom", "name": "say"}
    final, events = await streamed(served, "Say hello to everybody.", tool_choice=choice, **fields)
    (call,) = final.output
    assert isinstance(call, ResponseCustomToolCall)
    assert (call.name, call.input) == ("say", "Hello, how are you?")
    assert deltas(events, "custom_tool_call_input") == call.input
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "It was said."}
    after = await answer(served, [output], tool_choice="none", previous_response_id=final.id, **fields)
    assert after.output_text


async def test_a_model_that_may_call_may_answer_in_text(served: Served) -> None:
    final, _ = await streamed(served, FRANCE, tools=[WEATHER])
    assert "Paris" in final.output_text


async def test_a_call_that_is_cut_off_is_incomplete(served: Served) -> None:
    final, events = await streamed(served, ROME, tools=[WEATHER], tool_choice=CALL_WEATHER, max_output_tokens=16)
    assert events[-1].type == "response.incomplete"
    assert final.status == "incomplete"
    assert all(getattr(item, "status", None) == "incomplete" for item in final.output)


async def test_chat_completions_make_the_same_call_whole_and_streamed(served: Served) -> None:
    declared = {key: value for key, value in WEATHER.items() if key != "type"}
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": declared}]}
    fields["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    whole = await chat(served, ROME, **fields)
    (call,) = whole.choices[0].message.tool_calls
    jsonschema_rs.validate(WEATHER["parameters"], json.loads(call.function.arguments))
    stream = await chat(served, ROME, **fields, stream=True)
    choices: list[Any] = [chunk.choices[0] async for chunk in stream if chunk.choices]
    pieces: list[Any] = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == call.function.arguments
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "tool_calls"


async def test_an_answer_has_its_schema_where_tools_may_be_called_too(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {"text": {"format": {"type": "json_schema", "name": "place", "schema": schema}}}
    fields |= {"tools": [WEATHER], "max_output_tokens": 256, "temperature": 0}
    first = await answer(served, ROME, tool_choice=CALL_WEATHER, **fields)
    result = {"type": "function_call_output", "call_id": call_of(first).call_id, "output": "It is 17 degrees in Rome."}
    second, _ = await streamed(served, [result], previous_response_id=first.id, **fields)
    assert json.loads(second.output_text)["city"] in ("Paris", "Rome", "Oslo")
