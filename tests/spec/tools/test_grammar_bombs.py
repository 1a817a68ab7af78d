"""Grammars and schemas that would end a server are refused by their field, wherever a client puts one."""

from collections.abc import Mapping
from typing import Any

import pytest
from openai import APIStatusError

from tests.support.laws.grammar_forms import FORMS
from tests.support.sdk.batch_files import batch_line, create_batch, read_results, wait_for_end
from tests.support.sdk.requests import create
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
SIZE = 3_500
REFERENCES: Json = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/d0"}},
    "$defs": {**{f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(4000)}, "d4000": {"type": "string"}},
}
HARMONY: Json = {
    "provider": "next_token",
    "function": "tests.support.models.token_functions:plain",
    "model": "scripted",
}
BATCHES: Json = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05, "retry_s": 0.1}}


def tool(form: str = "a chain of rules", **fields: Any) -> Json:
    syntax, build = FORMS[form]
    grammar = {"type": "grammar", "syntax": syntax, "definition": build(SIZE)}
    return {"type": "custom", "name": "g", "format": grammar, **fields}


def chat_tool() -> Json:
    grammar = {"syntax": "lark", "definition": FORMS["a chain of rules"][1](SIZE)}
    return {"type": "custom", "custom": {"name": "g", "format": {"type": "grammar", "grammar": grammar}}}


def function(**fields: Any) -> Json:
    return {"type": "function", "function": {"name": "f", "parameters": REFERENCES, **fields}}


def namespace(inner: Json) -> Json:
    return {"type": "namespace", "name": "n", "description": "N.", "tools": [inner]}


SEARCH: Json = {"type": "tool_search", "execution": "client"}
ADDED: Json = {"type": "additional_tools", "role": "developer", "tools": [tool()]}
SEARCHED: list[Json] = [
    {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {}},
    {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [tool()]},
]
RESPONSES: Mapping[str, tuple[Json, str]] = {
    "tools": ({"tools": [tool()]}, "tools[0].format.definition"),
    "a chain of terminals": ({"tools": [tool("a chain of terminals")]}, "tools[0].format.definition"),
    "a schema": ({"tools": [tool("a chain of $ref")]}, "tools[0].format.definition"),
    "a namespace": ({"tools": [namespace(tool())]}, "tools[0].tools[0].format.definition"),
    "a deferred tool": ({"tools": [SEARCH, tool(defer_loading=True)]}, "tools[1].format.definition"),
    "the background": ({"tools": [tool()], "background": True}, "tools[0].format.definition"),
    "the input": ({"input": [ADDED, {"role": "user", "content": "hi"}]}, "input"),
    "a search": ({"tools": [SEARCH], "input": [*SEARCHED, {"role": "user", "content": "hi"}]}, "input"),
}


async def error_of(call: Any) -> Json:
    with pytest.raises(APIStatusError) as caught:
        await call
    assert caught.value.status_code == 400, caught.value
    body: Any = caught.value.body
    return body


@pytest.mark.parametrize("engine", ["scripted", "harmony"])
@pytest.mark.parametrize("place", RESPONSES)
async def test_a_response_refuses_it_by_its_field(place: str, engine: str) -> None:
    """Also what items of the input and searches add."""
    fields, param = RESPONSES[place]
    async with serving(HARMONY if engine == "harmony" else None) as served:
        error = await error_of(create(served, **fields))
    assert (error["param"], error["code"]) == (param, "invalid_grammar")


async def test_every_other_route_refuses_it_too() -> None:
    """The count of input tokens, a conversation, a compaction and a batch's line."""
    async with serving(more=BATCHES) as served:
        counting = served.client.responses.input_tokens.count(model="scripted", input="hi", tools=[tool()])  # pyright: ignore[reportArgumentType] - plain JSON
        assert (await error_of(counting))["param"] == "tools[0].format.definition"
        items: Any = [ADDED]
        conversation = await served.client.conversations.create(items=items)
        assert (await error_of(create(served, conversation=conversation.id)))["code"] == "invalid_grammar"
        compacting = served.client.responses.compact(
            model="scripted", input=[*items, {"role": "user", "content": "hi"}]
        )
        assert (await error_of(compacting))["code"] == "invalid_grammar"
        lines = [batch_line("bad", tools=[tool()]), batch_line("good")]
        batch = await wait_for_end(served.client, await create_batch(served.client, lines))
        [line] = await read_results(served.client, batch.error_file_id)
        assert line["response"]["body"]["error"]["code"] == "invalid_grammar"
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 1


def chat(served: Served, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "hi"}]
    completions: Any = served.client.chat.completions
    return completions.create(model="scripted", messages=messages, **fields)


FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "f", "schema": REFERENCES}}
CHATS: Mapping[str, tuple[Json, str, str]] = {
    "a custom tool": ({"tools": [chat_tool()]}, "tools[0].custom.format.grammar.definition", "invalid_grammar"),
    "a function": ({"tools": [function()]}, "tools[0].function.parameters", "invalid_function_parameters"),
    "a strict function": (
        {"tools": [function(strict=True)]},
        "tools[0].function.parameters",
        "invalid_function_parameters",
    ),
    "a format": ({"response_format": FORMAT}, "response_format.json_schema.schema", "invalid_json_schema"),
}


@pytest.mark.parametrize("engine", ["scripted", "harmony"])
@pytest.mark.parametrize("place", CHATS)
async def test_a_chat_refuses_it_by_its_field(place: str, engine: str) -> None:
    """Chats have the bound on references that responses have, on every engine."""
    fields, param, code = CHATS[place]
    async with serving(HARMONY if engine == "harmony" else None) as served:
        error = await error_of(chat(served, **fields))
        streamed = await error_of(chat(served, stream=True, **fields))
    assert (error["param"], error["code"]) == (param, code)
    assert error == streamed


async def test_a_chat_takes_a_schema_that_only_looks_odd() -> None:
    """The engine judges the rest."""
    odd = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}, "b": {"items": "none"}}}
    async with serving() as served:
        completion = await chat(served, tools=[function(parameters=odd)])
    assert completion.choices[0].finish_reason == "stop"
