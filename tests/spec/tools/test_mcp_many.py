"""MCP servers with many tools, and servers that wait until a search has found them."""

from typing import Any

import pytest
from openai import APIStatusError

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, create, refusal, stream
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


async def found(served: Any, first: Any, *tools: Json, declared: list[Json]) -> Any:
    """The response after the client's search has found `tools`."""
    output = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [*tools]}
    return await create(served, tools=declared, input=[output], previous_response_id=first.id)


async def test_a_deferred_server_is_not_contacted_until_a_search_returns_it() -> None:
    async with stacked(LATE, ECHO, DONE, DONE) as (served, real):
        declared = [mcp(real, defer_loading=True), SEARCH, function()]
        first = await create(served, tools=declared)
        assert (offered(served), kinds(first), real.methods) == (["get", "tool_search"], ["tool_search_call"], [])
        server = {"type": "mcp", "server_label": "real", "authorization": "secret-0123", "server_url": real.url}
        second = await found(served, first, server, declared=declared)
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
        await found(served, first, function("weather"), declared=declared)
        assert (offered(served), real.methods) == (["weather", "tool_search"], [])


@pytest.mark.parametrize("search", [[], [{"type": "tool_search"}]], ids=["no search", "the server's search"])
async def test_where_the_client_does_not_search_nothing_waits(search: list[Json]) -> None:
    async with stacked(DONE) as (served, real):
        await create(served, tools=[mcp(real, defer_loading=True), *search])
        assert "real__echo" in offered(served)
