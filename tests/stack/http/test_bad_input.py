"""Requests that are wrong, streamed or not: each is refused before any model is asked, by the field that is wrong."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from providers.inference.scripted import Scripted
from tests.stack.http.raw import ask, check_error
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Fields = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as running:
        yield running


def count_requests(served: Served) -> int:
    """How often the model has been asked since this was last asked."""
    assert isinstance(served.stack.inference, Scripted)
    count = len(served.stack.inference.requests)
    served.stack.inference.requests.clear()
    return count


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def function(name: Any = "f", **fields: Any) -> Fields:
    return {"type": "function", "name": name, **fields}


def form(schema: Any, **fields: Any) -> Fields:
    return {"text": {"format": {"type": "json_schema", "name": "answer", "schema": schema, **fields}}}


def search(*domains: str) -> Fields:
    return {"type": "web_search", "filters": {"allowed_domains": [*domains]}}


DOMAINS = "tools[0].filters.allowed_domains"
OBJECT: Fields = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL: Fields = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: Fields = {"type": "function_call_output", "call_id": "c1", "output": "x"}

# the fields in addition to model and input -> code, param
FIELDS: dict[str, tuple[Fields, str | None, str | None]] = {
    "no model": ({"model": ...}, "missing_required_parameter", "model"),
    "no input": ({"input": ...}, "missing_required_parameter", "input"),
    "a null model": ({"model": None}, "invalid_type", "model"),
    "an empty model": ({"model": ""}, "empty_string", "model"),
    "a long model": ({"model": "m" * 300}, "string_above_max_length", "model"),
    "a model of two lines": ({"model": "a\nb"}, "invalid_value", "model"),
    "a model with NUL": ({"model": "a\0"}, "invalid_value", "model"),
    "a chat request": ({"input": ..., "messages": [user("x")]}, "unsupported_parameter", "messages"),
    "temperature in quotes": ({"temperature": "0.5"}, "invalid_type", "temperature"),
    "temperature true": ({"temperature": True}, "invalid_type", "temperature"),
    "temperature in a list": ({"temperature": [1]}, "invalid_type", "temperature"),
    "temperature below": ({"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    "temperature above": ({"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    "temperature far above": ({"temperature": 1e308}, "decimal_above_max_value", "temperature"),
    "top_p above": ({"top_p": 1.01}, "decimal_above_max_value", "top_p"),
    "stream in quotes": ({"stream": "true"}, "invalid_type", "stream"),
    "stream 1": ({"stream": 1}, "invalid_type", "stream"),
    "store 0": ({"store": 0}, "invalid_type", "store"),
    "max_output_tokens 15": ({"max_output_tokens": 15}, "integer_below_min_value", "max_output_tokens"),
    "max_output_tokens 2**63": ({"max_output_tokens": 2**63}, "integer_above_max_value", "max_output_tokens"),
    "max_output_tokens 2**64": ({"max_output_tokens": 2**64}, "integer_above_max_value", "max_output_tokens"),
    "max_output_tokens 2**70": ({"max_output_tokens": 2**70}, "integer_above_max_value", "max_output_tokens"),
    "max_output_tokens 10**300": ({"max_output_tokens": 10**300}, "integer_above_max_value", "max_output_tokens"),
    "max_output_tokens 16.0": ({"max_output_tokens": 16.0}, "invalid_type", "max_output_tokens"),
    "max_tool_calls 0": ({"max_tool_calls": 0}, "integer_below_min_value", "max_tool_calls"),
    "top_logprobs 21": ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    "seed 2**64": ({"seed": 2**64}, "integer_above_max_value", "seed"),
    "truncation maybe": ({"truncation": "maybe"}, "invalid_value", "truncation"),
    "a service tier of our own": ({"service_tier": "x"}, "invalid_value", "service_tier"),
    "extreme effort": ({"reasoning": {"effort": "extreme"}}, "invalid_value", "reasoning.effort"),
    "include x": ({"include": ["x"]}, "invalid_value", "include[0]"),
    "reasoning as text": ({"reasoning": "high"}, "invalid_type", "reasoning"),
    "a long safety_identifier": ({"safety_identifier": "x" * 129}, "string_above_max_length", "safety_identifier"),
    "a long prompt_cache_key": ({"prompt_cache_key": "x" * 10240}, "string_above_max_length", "prompt_cache_key"),
    "17 pairs of metadata": ({"metadata": {str(n): "" for n in range(17)}}, "array_above_max_length", "metadata"),
    "metadata with a number": ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
    "metadata with a long value": ({"metadata": {"a": "x" * 513}}, "string_above_max_length", "metadata.a"),
    "metadata with a long key": (
        {"metadata": {"k" * 65536: ""}},
        "string_above_max_length",
        "metadata." + "k" * 64,
    ),
    "background and no store": ({"background": True, "store": False}, "invalid_value", "background"),
    "a conversation without an id": ({"conversation": {}}, "missing_required_parameter", "conversation.id"),
    "conversation and previous": (
        {"conversation": {"id": "conv_1"}, "previous_response_id": "resp_1"},
        "mutually_exclusive_parameters",
        "conversation",
    ),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "invalid_value", "prompt.id"),
    "context_management": ({"context_management": [{"type": "x"}]}, "invalid_value", "context_management[0].type"),
    "moderation": ({"moderation": {}}, "missing_required_parameter", "moderation.model"),
}
ITEMS: dict[str, tuple[Any, str, str | None]] = {
    "a number": (5, "invalid_type", "input"),
    "an empty list": ([], "invalid_value", "input"),
    "an object": ({"role": "user"}, "invalid_type", "input"),
    "text in a list": (["x"], "invalid_type", "input[0]"),
    "an item of nothing": ([{"content": "x"}], "missing_required_parameter", "input[0].type"),
    "an unknown type": ([{"type": "telepathy"}], "invalid_value", "input[0].type"),
    "an unknown type further on": ([user("x"), {"type": "telepathy"}], "invalid_value", "input[1].type"),
    "a very long type": ([{"type": "t" * 100_000}], "invalid_value", "input[0].type"),
    "role tool": ([{"role": "tool", "content": "x"}], "invalid_value", "input[0].role"),
    "role 5": ([{"role": 5, "content": "x"}], "invalid_value", "input[0].role"),
    "a message without content": ([{"role": "user"}], "missing_required_parameter", "input[0].content"),
    "null content": ([user(None)], "invalid_type", "input[0].content"),
    "output_text from the user": (
        [user([{"type": "output_text", "text": "x"}])],
        "invalid_value",
        "input[0].content[0].type",
    ),
    "input_image from the assistant": (
        [{"role": "assistant", "content": [{"type": "input_image", "image_url": "https://a.b/c"}]}],
        "invalid_value",
        "input[0].content[0].type",
    ),
    "a part without text": ([user([{"type": "input_text"}])], "missing_required_parameter", "input[0].content[0].text"),
    "a part without a type": ([user([{"text": "x"}])], "missing_required_parameter", "input[0].content[0].type"),
    "a part whose text is null": (
        [user([{"type": "input_text", "text": None}])],
        "invalid_type",
        "input[0].content[0].text",
    ),
    "an image without a url": (
        [user([{"type": "input_image"}])],
        "missing_required_parameter",
        "input[0].content[0].image_url",
    ),
    "an image by ftp": (
        [user([{"type": "input_image", "image_url": "ftp://a/b"}])],
        "invalid_image_url",
        "input[0].content[0].image_url",
    ),
    "an image of a local file": (
        [user([{"type": "input_image", "image_url": "file:///etc/passwd"}])],
        "invalid_image_url",
        "input[0].content[0].image_url",
    ),
    "an image by file id": (
        [user([{"type": "input_image", "file_id": "file-1"}])],
        "not_configured",
        "input[0].content[0].file_id",
    ),
    "a file by url": (
        [user([{"type": "input_file", "file_url": "https://127.0.0.1/b"}])],
        "invalid_value",
        "input[0].content[0].file_url",
    ),
    "a call without output": ([user("x"), CALL], "", "input"),
    "an output without call": ([user("x"), OUTPUT], "", "input"),
    "an output before its call": ([OUTPUT, CALL], "", "input"),
    "two outputs of one call": ([CALL, OUTPUT, {**OUTPUT, "output": "y"}], "invalid_value", "input"),
    "a call without a name": ([{**CALL, "name": ""}, OUTPUT], "empty_string", "input[0].name"),
    "a call whose name holds NUL": ([{**CALL, "name": "f\0"}, OUTPUT], "invalid_value", "input[0].name"),
    "arguments as an object": ([{**CALL, "arguments": {}}, OUTPUT], "invalid_type", "input[0].arguments"),
    "an output that is a number": ([CALL, {**OUTPUT, "output": 5}], "invalid_type", "input[1].output"),
    "an id with NUL": ([{**user("x"), "id": "msg_\0"}], "invalid_value", "input[0].id"),
    "an id twice": ([{**user("x"), "id": "msg_1"}, {**user("y"), "id": "msg_1"}], "invalid_value", "input[1].id"),
}
PARAMETERS: dict[str, Fields] = {
    "parameters without a type": {"properties": {}},
    "parameters of a string": {"type": "string"},
    "parameters of an objekt": {"type": "objekt"},
    "an unknown type inside": {"type": "object", "properties": {"a": {"type": "strin"}}},
    "a foreign reference inside": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a"}}},
    "properties as a list": {"type": "object", "properties": []},
}
TOOLS: dict[str, tuple[Any, str, str | None]] = {
    "129 tools": ([function(f"f{n}") for n in range(129)], "array_above_max_length", "tools"),
    "tools as an object": ({"f": function()}, "invalid_type", "tools"),
    "an unknown type": ([function(), {"type": "teleport"}], "invalid_value", "tools[1].type"),
    "no type": ([{"name": "f"}], "missing_required_parameter", "tools[0].type"),
    "a chat completions tool": (
        [{"type": "function", "function": {"name": "f"}}],
        "missing_required_parameter",
        "tools[0].name",
    ),
    "a stdio server": (
        [{"type": "mcp", "server_label": "x", "command": "sh"}],
        "unsupported_parameter",
        "tools[0].type",
    ),
    "no name": ([{"type": "function"}], "missing_required_parameter", "tools[0].name"),
    **{
        f"the name {name[:12]!r}": ([function(name)], "invalid_value", "tools[0].name")
        for name in ("", "f" * 65, "a b", "a.b", "a\nb", "a\n", "<|call|>", "аbc", "f\0", "../f")
    },
    "the name 5": ([function(5)], "invalid_type", "tools[0].name"),
    "a name twice": ([function(), function()], "invalid_value", "tools[1].name"),
    "a name of two kinds": ([function(), {"type": "custom", "name": "f"}], "invalid_value", "tools[1].name"),
    "a search that is not there": ([{"type": "web_search"}], "unsupported_parameter", "tools[0].type"),
    "a search over 101 domains": ([search(*["a.b"] * 101)], "array_above_max_length", DOMAINS),
    **{
        f"a search in {domain[:8]!r}": ([search("a.example", domain)], "invalid_value", f"{DOMAINS}[1]")
        for domain in ("*.com", "https://a.example/x", "a.com\nsite:b.com", "a.com OR site:b.com", "a..b", "127.0.0.1")
    },
    "an empty grammar": (
        [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": ""}}],
        "empty_string",
        "tools[0].format.definition",
    ),
    "parameters as a list": ([function(parameters=[])], "invalid_type", "tools[0].parameters"),
    "parameters as text": ([function(parameters="{}")], "invalid_type", "tools[0].parameters"),
    **{
        name: ([function("g"), function(parameters=parameters)], "invalid_function_parameters", "tools[1].parameters")
        for name, parameters in PARAMETERS.items()
    },
}
CHOICES: dict[str, tuple[Fields, str, str]] = {
    "an absent function": ({"tool_choice": {"type": "function", "name": "g"}}, "invalid_value", "tool_choice"),
    "an absent hosted tool": ({"tool_choice": {"type": "web_search"}}, "invalid_value", "tool_choice"),
    "an unknown mode": ({"tool_choice": "perhaps"}, "invalid_value", "tool_choice"),
    "an unknown type": ({"tool_choice": {"type": "psychic"}}, "invalid_value", "tool_choice.type"),
    "a number": ({"tool_choice": 5}, "invalid_type", "tool_choice"),
    "required of nothing": ({"tools": [], "tool_choice": "required"}, "invalid_value", "tool_choice"),
    "an absent one allowed": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
        "invalid_value",
        "tool_choice",
    ),
    "none allowed": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "empty_array",
        "tool_choice.tools",
    ),
}
FORMATS: dict[str, tuple[Fields, str, str]] = {
    "an unknown type": ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
    "no schema": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "missing_required_parameter",
        "text.format.schema",
    ),
    "no name": (
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        "missing_required_parameter",
        "text.format.name",
    ),
    "a name with spaces": (form({}, name="my answer"), "invalid_value", "text.format.name"),
    "a schema that is text": (form("{}"), "invalid_type", "text.format.schema"),
    "a reference to itself": (form({"$ref": "#"}), "invalid_json_schema", "text.format.schema"),
    "a schema that is too large": (form({"description": "x" * 300_000}), "invalid_json_schema", "text.format.schema"),
}


def cases() -> dict[str, tuple[Fields, str | None, str | None]]:
    tables = {
        "field": FIELDS,
        "item": {name: ({"input": value}, code or None, param) for name, (value, code, param) in ITEMS.items()},
        "tools": {name: ({"tools": value}, code, param) for name, (value, code, param) in TOOLS.items()},
        "choice": {name: ({"tools": [function()], **each}, *rest) for name, (each, *rest) in CHOICES.items()},
        "format": FORMATS,
    }
    return {f"{table}: {name}": case for table, rows in tables.items() for name, case in rows.items()}  # pyright: ignore[reportReturnType]  # the rest of a row is its code and param


CASES = cases()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "code", "param"), CASES.values(), ids=CASES)
async def test_a_wrong_request_is_refused_by_the_field_that_is_wrong(
    served: Served, fields: Fields, code: str | None, param: str | None, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "scripted", "input": "hi", "stream": stream, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    count_requests(served)
    answer = await ask(served.url, body)
    error = check_error(answer, 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    if param is not None:
        assert error["param"] == param
    assert len(json.dumps(error)) < 1500
    assert not caplog.records
    assert not count_requests(served)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(served: Served, stream: bool) -> None:
    for model in ("gpt-9", "../x", "a/b"):
        error = check_error(await ask(served.url, {"model": model, "input": "hi", "stream": stream}), 404)
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["resp_" + "0" * 32, "resp_", "x" * 256, "resp_\0", "😀" * 256, "a/b", "../../x"])
async def test_an_unknown_previous_response_is_refused_with_any_id(served: Served, value: str, stream: bool) -> None:
    body = {"model": "scripted", "input": "hi", "previous_response_id": value, "stream": stream}
    error = check_error(await ask(served.url, body), 400)
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("value", "code"), [("", "empty_string"), ("x" * 257, "string_above_max_length"), (5, "invalid_type")]
)
async def test_what_can_be_no_id_is_refused_as_such(served: Served, value: Any, code: str) -> None:
    error = check_error(await ask(served.url, {"model": "scripted", "input": "hi", "previous_response_id": value}), 400)
    assert (error["code"], error["param"]) == (code, "previous_response_id")


@pytest.mark.parametrize("value", ["msg_" + "0" * 36, "x", "😀" * 256])
async def test_an_unknown_item_is_not_found(served: Served, value: str) -> None:
    items = [user("hi"), {"type": "item_reference", "id": value}]
    error = check_error(await ask(served.url, {"model": "scripted", "input": items}), 404)
    assert error["param"] == "input[1].id"


PATHS = ["resp_", "resp_" + "0" * 32, "x" * 10_240, "%00", "%2e%2e%2f", "%27;%20DROP", "%F0%9F%98%80", "conv_1", "%ff"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("value", PATHS)
async def test_an_unknown_id_in_the_path_is_not_found(served: Served, value: str, method: str) -> None:
    error = check_error(await ask(served.url, method=method, path=f"/v1/responses/{value}"), 404)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", None, None)


@pytest.mark.parametrize("path", ["{}/cancel", "{}/input_items"])
async def test_nothing_of_an_unknown_response_is_found(served: Served, path: str) -> None:
    method = "POST" if path.endswith("cancel") else "GET"
    where = f"/v1/responses/{path.format('resp_' + '0' * 32)}"
    check_error(await ask(served.url, method=method, path=where), 404)


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "integer_below_min_value"),
        ("limit=101", "limit", "integer_above_max_value"),
        ("limit=x", "limit", "invalid_type"),
        ("limit=-1", "limit", "invalid_type"),
        ("limit=" + "9" * 5000, "limit", "invalid_type"),
        ("limit=%C2%B2", "limit", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("after=" + "x" * 2000, "after", "invalid_value"),
    ],
)
async def test_a_wrong_page_of_input_items_is_refused(served: Served, query: str, param: str, code: str) -> None:
    response = await ask(served.url, {"model": "scripted", "input": "hi"})
    answer = await ask(served.url, method="GET", path=f"/v1/responses/{response.json['id']}/input_items?{query}")
    error = check_error(answer, 400)
    assert (error["param"], error["code"]) == (param, code)


ACCEPTED: dict[str, Fields] = {
    "unknown fields": {"foo": {"bar": [1]}, "access_programs": None, "image": None},
    "a key of 64 KiB": {"k" * 65536: 1},
    "1,000 keys": {f"k{n}": n for n in range(1000)},
    "nulls for all that is optional": dict.fromkeys(("tools", "text", "reasoning", "metadata", "store", "include")),
    "NUL in text": {"input": "a\0b", "instructions": "\0"},
    "unsupported things that are null": dict.fromkeys(("background", "conversation", "prompt", "moderation")),
    "an id that is no ASCII": {"input": [{**user("x"), "id": "😀" * 256}]},
    "a tool without parameters": {"tools": [function(), function("g", parameters=None), function("h", parameters={})]},
    "parameters as generators write them": {
        "tools": [
            function(parameters={"$schema": "http://json-schema.org/draft-07/schema#", "$id": "F", **OBJECT}),
            function(
                "g",
                parameters={
                    "type": "object",
                    "$defs": {
                        "n": {"anyOf": [{"$ref": "#/$defs/m"}, {"type": "null"}]},
                        "m": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}},
                    },
                },
            ),
        ]
    },
    "a schema that is recursive": form(
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}, strict=False
    ),
}


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED)
async def test_what_real_clients_send_is_taken(served: Served, fields: Fields) -> None:
    answer = await ask(served.url, {"model": "scripted", "input": "hi", **fields})
    assert answer.status == 200, answer
    response = await ask(served.url, method="GET", path=f"/v1/responses/{answer.json['id']}")
    assert response.json == answer.json
