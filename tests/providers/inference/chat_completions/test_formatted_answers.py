"""Tools and a text format on vLLM: calls are made, and the text has the format."""

import json
from typing import Any

import pytest

from tests.support.sdk.requests import create, stream
from tests.support.servers.serving import serving
from tests.support.servers.upstream_server import UpstreamServer, call_chunks, text_chunks
from tests.support.servers.upstream_server import stream as answer

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM: dict[str, Any] = {"format": {"type": "json_schema", "name": "form", "schema": SCHEMA}}
OBJECT: dict[str, Any] = {"format": {"type": "json_object"}}


def asks(upstream: UpstreamServer) -> list[tuple[bool, Any]]:
    """Return, for each chat, true if it had the format, and its tool choice."""
    bodies = [each.json for each in upstream.received if each.path.endswith("/chat/completions")]
    return [("response_format" in body, body.get("tool_choice")) for body in bodies]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_needs_no_format_and_an_answer_is_asked_for_again_with_it(streamed: bool) -> None:
    answers = [
        answer(call_chunks("f", "{}", call_id="c1")),
        answer(text_chunks("It is ", "one.")),
        answer(text_chunks('{"a": ', "1}")),
    ]
    async with (
        UpstreamServer(*answers) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        fields: dict[str, Any] = {"model": "fake-model", "tools": TOOLS, "text": FORM}
        first = (await stream(served, **fields))[-1].response if streamed else await create(served, **fields)
        assert [(item.type, item.name) for item in first.output] == [("function_call", "f")]
        assert asks(upstream) == [(False, "auto")]
        output = [{"type": "function_call_output", "call_id": "c1", "output": "1"}]
        fields |= {"input": output, "previous_response_id": first.id}
        second = (await stream(served, **fields))[-1].response if streamed else await create(served, **fields)
    assert json.loads(second.output_text) == {"a": 1}
    assert asks(upstream)[1:] == [(False, "auto"), (True, "none")]
    prompts = [json.dumps([each.json["messages"], each.json["tools"]]) for each in upstream.received[-2:]]
    assert prompts[0] == prompts[1], "the prompt is the same"


async def test_an_object_that_is_one_already_is_not_asked_for_again() -> None:
    async with (
        UpstreamServer(answer(text_chunks('{"a": ', "1}"))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        response = await create(served, model="fake-model", tools=TOOLS, text=OBJECT)
        assert (response.output_text, len(asks(upstream))) == ('{"a": 1}', 1)
        await create(served, model="fake-model", tools=TOOLS, text=FORM, tool_choice="none")
        await create(served, model="fake-model", text=FORM)
    assert [formed for formed, _ in asks(upstream)] == [False, True, True], "what a server can have it is asked for"
