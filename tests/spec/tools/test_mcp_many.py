"""MCP servers with many tools, and servers that wait until a search has found them."""

import json
from typing import Any

import pytest
from openai import APIStatusError

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, refusal, stream
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import DONE, Json, kinds, mcp, offered, stacked, tool_outputs

USER: Json = {"role": "user", "content": "hi"}
SEARCH: Json = {"type": "tool_search", "execution": "client"}
LATE: Script = [call("tool_search", '{"query": "echo"}', id="c1")]
ECHO: Script = [call("real__echo", '{"text": "hello"}', id="c2")]


def widen(real: RealServer, count: int) -> None:
    """Give the server so many tools more."""

    def answer() -> str:
        return "yes"

    for number in range(count):
        real.mcp.tool(name=f"wide_{number}")(answer)


async def test_more_tools_than_a_model_can_be_offered_fail_the_response_and_say_what_to_do() -> None:
    async with stacked(DONE) as (served, real):
        widen(real, 130)
        events = await stream(served, tools=[mcp(real)])
        failed = events[-1].response
        assert (events[-1].type, kinds(failed)) == ("response.failed", ["mcp_list_tools"])
        assert "128" in failed.error.message
        assert "allowed_tools" in failed.error.message
        with pytest.raises(APIStatusError) as caught:
            await create(served, tools=[mcp(real)])
        assert (caught.value.status_code, caught.value.param) == (400, "tools")
        items = [USER, *map(bare, failed.output)]
        assert (await refusal(served, tools=[mcp(real)], input=items))["param"] == "tools"
        few = mcp(real, allowed_tools=["wide_7", "echo"])
        assert (await create(served, tools=[few])).status == "completed"
        assert sorted(offered(served)) == ["real__echo", "real__wide_7"]


async def test_the_clients_own_tools_count_too() -> None:
    async with stacked(DONE) as (served, real):
        widen(real, 100)
        own = [function(f"own_{number}") for number in range(100)]
        events = await stream(served, tools=[mcp(real), *own])
    assert events[-1].type == "response.failed"


async def find_tools(served: Any, first: Any, *tools: Json, declared: list[Json]) -> Any:
    """The response after the client's search has found `tools`."""
    output = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [*tools]}
    return await create(served, tools=declared, input=[output], previous_response_id=first.id)


async def test_a_deferred_server_is_not_contacted_until_a_search_returns_it() -> None:
    async with stacked(LATE, ECHO, DONE, DONE) as (served, real):
        declared = [mcp(real, defer_loading=True), SEARCH, function()]
        first = await create(served, tools=declared)
        assert (offered(served), kinds(first), real.methods) == (["get", "tool_search"], ["tool_search_call"], [])
        server = {"type": "mcp", "server_label": "real", "authorization": "secret-0123", "server_url": real.url}
        second = await find_tools(served, first, server, declared=declared)
        assert kinds(second) == ["mcp_list_tools", "mcp_call", "message"]
        assert second.output[1].output == "hello"
        assert "real__echo" in offered(served)
        assert "real" in tool_outputs(served)["c1"]
        assert "secret-0123" not in tool_outputs(served)["c1"]
        third = await create(served, tools=declared, previous_response_id=second.id)
        assert ("real__echo" in offered(served), kinds(third)) == (True, ["message"])


async def test_a_search_without_the_server_does_not_load_it() -> None:
    async with stacked(LATE, DONE) as (served, real):
        declared = [mcp(real, defer_loading=True), SEARCH]
        first = await create(served, tools=declared)
        await find_tools(served, first, function("weather"), declared=declared)
        assert (offered(served), real.methods) == (["weather", "tool_search"], [])


async def test_without_a_search_nothing_waits() -> None:
    async with stacked(DONE) as (served, real):
        await create(served, tools=[mcp(real, defer_loading=True)])
        assert "real__echo" in offered(served)


def sought(query: str) -> list[Json]:
    return [call("tool_search", json.dumps({"query": query}), id="s1")]


async def test_a_deferred_server_is_listed_once_this_servers_search_has_found_it() -> None:
    declared: list[Json] = [{"type": "tool_search"}, function("now")]
    async with stacked(sought("speech and echoes"), ECHO, DONE, DONE) as (served, real):
        declared.append(mcp(real, defer_loading=True, server_description="Echoes a text.", authorization="secret-0123"))
        events = await stream(served, tools=declared)
        first = events[-1].response
        assert kinds(first) == ["tool_search_call", "tool_search_output", "mcp_list_tools", "mcp_call", "message"]
        (server,) = first.output[1].tools
        assert (server.type, server.server_label) == ("mcp", "real")
        assert first.output[3].output == "hello"
        assert "secret-0123" not in first.to_json()
        chats = [[tool.name for tool in chat.tools or ()] for chat in chat_requests(served)]
        assert chats[0] == ["now", "tool_search"], "its tools wait"
        assert "real__echo" in chats[1]
        await create(served, tools=declared, input="more", previous_response_id=first.id)
        assert "real__echo" in offered(served), "what was found stays found"


async def test_a_deferred_server_that_no_search_finds_is_not_contacted() -> None:
    async with stacked(sought("zebra"), DONE) as (served, real):
        response = await create(
            served, tools=[{"type": "tool_search"}, mcp(real, defer_loading=True, server_description="Echoes a text.")]
        )
        assert kinds(response) == ["tool_search_call", "tool_search_output", "message"]
        assert "real" in tool_outputs(served)["s1"]
        assert (offered(served), real.methods) == (["tool_search"], [])


async def test_a_found_server_that_is_down_fails_the_response_or_the_model_goes_on() -> None:
    for goes_on in (False, True):
        declared: list[Json] = [
            {"type": "tool_search"},
            {"type": "mcp", "server_label": "gone", "server_url": "http://127.0.0.1:9/mcp", "defer_loading": True},
        ]
        async with stacked(sought("gone"), DONE, responses={"continue_without_mcp_servers": goes_on}) as (served, _):
            if goes_on:
                response = await create(served, tools=declared)
                assert kinds(response) == ["tool_search_call", "tool_search_output", "mcp_list_tools", "message"]
                assert response.output[2].error
            else:
                with pytest.raises(APIStatusError, match="gone"):
                    await create(served, tools=declared)
