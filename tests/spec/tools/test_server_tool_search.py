"""The tool search that the server runs: its items, and the tools that the model can call from then on."""

from typing import Any

import pytest

from tests.support.sdk.answer_shapes import call, function
from tests.support.sdk.requests import chat_requests, create, stream
from tests.support.servers.mcp_stack import offered, tool_outputs
from tests.support.servers.serving import scripted, serving

Json = dict[str, Any]
SEARCH: Json = {"type": "tool_search"}
WEATHER = function("get_weather", description="The forecast of a city.", defer_loading=True)
ORDERS: Json = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers and their orders.",
    "tools": [
        function("list_orders", description="Lists open orders.", defer_loading=True),
        function("refund", description="Pays money back.", defer_loading=True),
    ],
}
TOOLS: list[Json] = [SEARCH, WEATHER, ORDERS, function("now")]
DONE: list[Any] = [{"text": "Done."}]


def searching(query: str) -> list[Any]:
    return [call("tool_search", f'{{"query": "{query}"}}', id="c1")]


async def test_a_search_shows_its_items_and_the_found_tool_can_be_called() -> None:
    """Depth of the hosted tools: tool_search_call, tool_search_output, then the call, as OpenAI shows them."""
    async with serving(scripted(searching("weather forecast"), [call("get_weather", id="c2")])) as served:
        events = await stream(served, tools=TOOLS)
        first, second = [[tool.name for tool in chat.tools or ()] for chat in chat_requests(served)]
        results = tool_outputs(served)
    searched, result, called = events[-1].response.output
    assert (searched.type, searched.execution, searched.status) == ("tool_search_call", "server", "completed")
    assert (searched.arguments, searched.call_id) == ({"query": "weather forecast"}, None)
    assert (result.type, result.execution, [tool.name for tool in result.tools]) == (
        "tool_search_output",
        "server",
        ["get_weather"],
    )
    assert (called.type, called.name) == ("function_call", "get_weather")
    assert (first, second) == (["now", "tool_search"], ["now", "get_weather", "tool_search"])
    assert results["c1"] == "These tools can be called now:\nget_weather: The forecast of a city."


async def test_tools_of_a_namespace_are_found_with_it_and_later_turns_offer_them() -> None:
    """Depth of the hosted tools: what was found stays found along a chain, and need not be sent back."""
    async with serving(scripted(searching("open orders"), DONE, DONE, DONE)) as served:
        first = await create(served, tools=TOOLS)
        await create(served, tools=TOOLS, input="more", previous_response_id=first.id)
        chained = offered(served)
        items = [item.model_dump(mode="json", exclude_unset=True) for item in first.output]
        await create(served, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *items])
        sent_back = offered(served)
    (group,) = first.output[1].tools
    assert (group.type, group.name, group.tools[0].name) == ("namespace", "crm", "list_orders")
    assert "crm__list_orders" in chained
    assert "get_weather" not in chained
    assert sorted(sent_back) == sorted(chained)


@pytest.mark.parametrize("arguments", ['{"query": "zebra"}', '{"query": ""}', "{oops", "{}"])
async def test_a_search_without_a_result_is_reported_to_the_model(arguments: str) -> None:
    """Depth of the hosted tools: the response goes on."""
    async with serving(scripted([call("tool_search", arguments, id="c1")], DONE)) as served:
        response = await create(served, tools=TOOLS)
        results = tool_outputs(served)["c1"]
    assert response.output_text == "Done."
    assert response.output[0].status == "completed"
    assert results
    assert ("get_weather" in results) == ("zebra" in arguments)


async def test_without_deferred_tools_no_search_is_offered() -> None:
    """Depth of the hosted tools: the search is then not offered."""
    async with serving(scripted(DONE)) as served:
        await create(served, tools=[SEARCH, function("now")])
        assert offered(served) == ["now"]
