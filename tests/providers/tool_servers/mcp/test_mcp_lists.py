"""Lists of tools as MCP servers of the field send them: odd tools and schemas, and pages without an end."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.support.servers.mcp_calls import called, declared, listed, text_of, tools_of
from tests.support.servers.mcp_field import GOOD, reached, recorded

Json = dict[str, Any]

OBJECT: Final = {"type": "object"}
MENDED: Final[dict[str, tuple[Json, Json]]] = {
    "no schema": ({}, OBJECT),
    "a schema that is null": ({"inputSchema": None}, OBJECT),
    "a schema that is a list": ({"inputSchema": []}, OBJECT),
    "a schema that is true": ({"inputSchema": True}, OBJECT),
    "a schema as a text": ({"inputSchema": '{"type": "object", "required": ["q"]}'}, {**OBJECT, "required": ["q"]}),
    "an empty schema": ({"inputSchema": {}}, OBJECT),
    "a schema of two types": ({"inputSchema": {"type": ["object", "null"]}}, OBJECT),
    "properties that are null": ({"inputSchema": {"type": "object", "properties": None}}, OBJECT),
    "properties that are none": (
        {"inputSchema": {**OBJECT, "properties": {"a": None, "b": "string", "c": [], "d": True}}},
        {**OBJECT, "properties": {"a": {}, "b": {}, "c": {}, "d": True}},
    ),
    "keywords with other values": (
        {
            "inputSchema": {
                **OBJECT,
                "properties": {
                    "a": {"type": "str", "required": True, "default": None},
                    "b": {"type": ["STRING", "any"], "enum": None, "pattern": "(", "minLength": -1},
                    "c": {"type": 5, "enum": [], "items": "x", "anyOf": [{"type": "int"}, None]},
                },
                "additionalProperties": "false",
            }
        },
        {
            **OBJECT,
            "properties": {
                "a": {"type": "string", "default": None},
                "b": {"type": "string"},
                "c": {"items": {}, "anyOf": [{"type": "integer"}, {}]},
            },
            "additionalProperties": {},
        },
    ),
    "references that lead nowhere": (
        {
            "inputSchema": {
                **OBJECT,
                "properties": {"a": {"$ref": "#/$defs/none"}, "b": {"$ref": "https://a/"}, "c": {"$ref": "#/$defs/C"}},
                "$defs": {"C": {"type": "string"}},
            }
        },
        {
            **OBJECT,
            "properties": {"a": {}, "b": {}, "c": {"$ref": "#/$defs/C"}},
            "$defs": {"C": {"type": "string"}},
        },
    ),
    "a reference that leads back": (
        {"inputSchema": {**OBJECT, "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}},
        {**OBJECT, "properties": {"a": {}}, "$defs": {"A": {}}},
    ),
    "a recursive schema": (
        {"inputSchema": {**OBJECT, "properties": {"a": {"$ref": "#"}}}},
        {**OBJECT, "properties": {"a": {"$ref": "#"}}},
    ),
    "a lone surrogate": (
        {"inputSchema": {**OBJECT, "properties": {"a": {"title": "\ud83d"}}}},
        {**OBJECT, "properties": {"a": {"title": "\ufffd"}}},
    ),
    "required that is null": ({"inputSchema": {"required": None}}, {**OBJECT, "required": []}),
    "required that is true": ({"inputSchema": {"required": True}}, {**OBJECT, "required": []}),
    "required with numbers": ({"inputSchema": {"required": ["q", 1, "q"]}}, {**OBJECT, "required": ["q"]}),
    "a title that is a number": ({"inputSchema": OBJECT, "title": 5}, OBJECT),
    "a description that is null": ({"inputSchema": OBJECT, "description": None}, OBJECT),
    "a description that is a list": ({"inputSchema": OBJECT, "description": ["a"]}, OBJECT),
    "annotations that are a list": ({"inputSchema": OBJECT, "annotations": [1]}, OBJECT),
    "hints that are texts": ({"inputSchema": OBJECT, "annotations": {"readOnlyHint": "yes", "title": 1}}, OBJECT),
    "outputSchema without a type": ({"inputSchema": OBJECT, "outputSchema": {"properties": {}}}, OBJECT),
    "icons that are a text": ({"inputSchema": OBJECT, "icons": "x"}, OBJECT),
    "execution that is a text": ({"inputSchema": OBJECT, "execution": "sync"}, OBJECT),
    "_meta that is a list": ({"inputSchema": OBJECT, "_meta": [1]}, OBJECT),
}


@pytest.mark.parametrize("oddity", MENDED)
async def test_a_tool_that_can_be_mended_is_offered(oddity: str) -> None:
    """The other tools are offered, too."""
    entry, schema = MENDED[oddity]
    async with reached({"tools": [GOOD, {"name": "odd", **entry}, {**GOOD, "name": "last"}]}) as (server, mcp):
        tools = await tools_of(mcp, listed(declared(server.url)))
    assert [tool.name for tool in tools] == ["good", "odd", "last"]
    assert tools[1].input_schema == schema
    assert (tools[1].description, tools[1].annotations) == ("", {})


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "odd",
        [],
        {"inputSchema": OBJECT},
        {"name": None, "inputSchema": OBJECT},
        {"name": 5, "inputSchema": OBJECT},
        {"name": "", "inputSchema": OBJECT},
        {"name": "a tool\nof ours", "inputSchema": OBJECT},
        {"name": "x" * 129, "inputSchema": OBJECT},
        {"name": "good", "inputSchema": OBJECT},
        {"name": "odd", "inputSchema": {"type": "string"}},
        {"name": "odd", "inputSchema": {"type": 5}},
    ],
)
async def test_a_tool_beyond_repair_is_left_out_and_the_others_stay(
    entry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what is left out."""
    async with reached({"tools": [GOOD, entry, {**GOOD, "name": "last"}]}) as (server, mcp):
        tools = await tools_of(mcp, listed(declared(server.url)))
        assert await text_of(mcp, replace(called(declared(server.url), "last"), listed_tool=tools[1]))
    assert [tool.name for tool in tools] == ["good", "last"]
    assert tools[0].input_schema == GOOD["inputSchema"]
    assert "of the tools of MCP server 'label' is left out" in caplog.text


@pytest.mark.parametrize("name", ["a/b", "a.b", "a:b", "a tool of ours", "naïve", "查询 ✓"])
async def test_a_tool_is_listed_and_called_under_its_own_name(name: str) -> None:
    """Lists of allowed tools have it, too."""
    entry = {**GOOD, "name": name}
    async with reached({"tools": [GOOD, entry]}) as (server, mcp):
        declaration = declared(server.url, allowed_tools=[name])
        tools = await tools_of(mcp, listed(declaration))
        assert await text_of(mcp, replace(called(declaration, name), listed_tool=tools[0])) == f"RESULT of {name}"
        assert [call["name"] for call in server.calls] == [name]
    assert [tool.name for tool in tools] == [name]


@pytest.mark.parametrize("name", ["one_outnotype", "one_titlenum", "schema1_empty"])
async def test_the_tools_of_a_recorded_server_are_offered(name: str) -> None:
    """The tools are those that servers in use send."""
    async with reached(recorded(name)) as (server, mcp):
        tools = await tools_of(mcp, listed(declared(server.url)))
    assert len(tools) == 2


@pytest.mark.parametrize("version", [None, 1.0, "1.0", "2024-10-07", "DRAFT"])
async def test_a_version_that_is_unknown_is_the_usual_one(version: Any) -> None:
    """A server without one speaks what there is."""
    async with reached({"handshake": {"protocolVersion": version}}) as (server, mcp):
        assert [tool.name for tool in await tools_of(mcp, listed(declared(server.url)))] == ["good"]


@pytest.mark.parametrize(("tools", "names"), [(None, []), ({"good": {"inputSchema": OBJECT}}, ["good"])])
async def test_a_list_of_tools_may_be_null_or_an_object(tools: Any, names: list[str]) -> None:
    """Some languages write an empty list as null."""

    def page(_: str | None) -> Json:
        return {"tools": tools}

    async with reached({"page": page}) as (server, mcp):
        assert [tool.name for tool in await tools_of(mcp, listed(declared(server.url)))] == names


async def test_a_handshake_without_what_is_not_needed_is_enough() -> None:
    """The name of a server, and what it can do, are for others to read."""
    async with reached({"handshake": {"serverInfo": None, "capabilities": None, "instructions": 5}}) as (server, mcp):
        assert [tool.name for tool in await tools_of(mcp, listed(declared(server.url)))] == ["good"]


async def test_a_list_is_followed_to_its_end() -> None:
    """A recorded server lists 101 tools on eleven pages."""
    async with reached(recorded("pages_10_101")) as (server, mcp):
        assert len(await tools_of(mcp, listed(declared(server.url)))) == 101


def tools_from(first: int, count: int) -> list[Json]:
    return [{**GOOD, "name": f"tool_{number}"} for number in range(first, first + count)]


def repeat_cursor(cursor: str | None) -> Json:
    return {"tools": tools_from(0, 2), "nextCursor": "same"}


def alternate_cursors(cursor: str | None) -> Json:
    following = {"a": "ab", "ab": "a"}.get(cursor or "", "a")
    return {"tools": tools_from(len(cursor or ""), 1), "nextCursor": following}


def repeat_tools(cursor: str | None) -> Json:
    return {"tools": tools_from(0, 2), "nextCursor": f"{cursor}x"}


def list_nothing(cursor: str | None) -> Json:
    return {"tools": [], "nextCursor": f"{cursor}x"}


def list_more(cursor: str | None) -> Json:
    return {"tools": tools_from(int(cursor or 0), 300), "nextCursor": int(cursor or 0) + 300}


def refuse_cursor(cursor: str | None) -> Json:
    if cursor is not None:
        raise ValueError("Bad cursor")
    return {"tools": tools_from(0, 2), "nextCursor": "2"}


ENDLESS: Final[dict[str, tuple[Callable[[str | None], Json], int, int]]] = {
    "the cursor stays": (repeat_cursor, 2, 2),
    "cursors go round": (alternate_cursors, 3, 3),
    "new cursors, old tools": (repeat_tools, 9, 2),
    "new cursors, no tools": (list_nothing, 8, 0),
    "ever more tools": (list_more, 4, 1024),
    "a refusal": (refuse_cursor, 2, 2),
}


@pytest.mark.parametrize("habit", ENDLESS)
async def test_a_list_without_an_end_is_ended_and_the_log_says_so(habit: str, caplog: pytest.LogCaptureFixture) -> None:
    """The tools that were listed until then stay."""
    page, requests, count = ENDLESS[habit]
    async with reached({"page": page}) as (server, mcp):
        assert len(await tools_of(mcp, listed(declared(server.url)))) == count
        assert server.methods.count("tools/list") == requests
    assert "is left out" in caplog.text


@pytest.mark.parametrize("end", [2, 2000])
async def test_a_list_that_takes_too_long_has_the_tools_of_the_pages_until_then(
    end: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its server sends ever more pages, or not one more."""

    async def send_one(cursor: str | None) -> Json:
        number = int(cursor or 0)
        if number == end:
            await asyncio.Event().wait()
        return {"tools": tools_from(number, 1), "nextCursor": str(number + 1)}

    async with reached({"page": send_one}, list_timeout_s=1) as (server, mcp):
        tools = await tools_of(mcp, listed(declared(server.url)))
        assert await text_of(mcp, called(declared(server.url), "tool_0")) == "RESULT of tool_0"
    assert [tool.name for tool in tools] == [f"tool_{number}" for number in range(len(tools))]
    assert len(tools) == 2 if end == 2 else 0 < len(tools) < 1024
    assert "is left out further pages: they take too long" in caplog.text


@pytest.mark.parametrize("cursor", ["", None])
async def test_an_empty_cursor_is_none(cursor: Any) -> None:
    """The list has ended."""

    def list_all(_: str | None) -> Json:
        return {"tools": [GOOD], "nextCursor": cursor}

    async with reached({"page": list_all}) as (server, mcp):
        await tools_of(mcp, listed(declared(server.url)))
        assert server.methods.count("tools/list") == 1


@pytest.mark.parametrize("levels", [200, 300, 20_000])
async def test_a_tool_that_is_nested_too_deeply_is_left_out_alone(
    levels: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A value of a call's result is left out of it likewise."""
    odd = {"name": "odd", "inputSchema": {**OBJECT, "properties": {"a": "]}"}}, "description": "]["}

    def nest(answer: Json) -> tuple[bytes, str, int]:
        inner = b'{"items":' * levels + b'"}"' + b"}" * levels
        return json.dumps(answer).encode().replace(b'"]}"', inner), "application/json", 200

    content = [{"type": "text", "text": "first"}, {"type": "odd", "value": "]}"}]
    habit = {"tools": [GOOD, odd, {**GOOD, "name": "last"}], "result": {"content": content}, "wire": nest}
    async with reached(habit) as (server, mcp):
        tools = await tools_of(mcp, listed(declared(server.url)))
        text = await text_of(mcp, called(declared(server.url), "last"))
    assert [tool.name for tool in tools] == ["good", "last"]
    assert "'odd': its schema is nested too deeply" in caplog.text
    assert text.startswith("first\n")
    assert "[nested too deeply]" in text
