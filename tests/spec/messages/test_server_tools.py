"""The web search of this server as Anthropic's server tools: in messages, in streams, and sent back."""

from typing import Any

import pytest

from tests.spec.tools.test_web_search import search, searching
from tests.support.sdk.messages import ADD, HI, create, messages_client, replay, stream

SEARCH: Any = {
    "type": "web_search_20250305",
    "name": "web_search",
    "max_uses": 3,
    "allowed_domains": ["site1.example.com"],
    "user_location": {"type": "approximate", "city": "Rome", "country": "IT"},
}


@pytest.mark.parametrize("send", [create, stream])
async def test_a_search_is_a_call_of_the_server_with_its_result(send: Any) -> None:
    async with searching([search()], [{"text": "Sunny【1】."}]) as (served, exa), messages_client(served) as client:
        answer = await send(client, tools=[SEARCH, ADD])
    use, result, text = answer.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "web_search", {"query": "rome"})
    assert (result.type, result.tool_use_id) == ("web_search_tool_result", use.id)
    assert (result.content[0].url, result.content[0].title) == ("https://site1.example.com/page", "Title 1")
    assert result.content[0].encrypted_content.startswith("rs3.")
    assert text.citations[0].url == "https://site1.example.com/page"
    assert (answer.stop_reason, answer.usage.server_tool_use.web_search_requests) == ("end_turn", 1)
    assert exa.requests[0][1]["query"] == "rome"


@pytest.mark.parametrize("send", [create, stream])
async def test_the_model_reads_what_it_found_again(send: Any) -> None:
    turns: Any = [[search()], [{"text": "Sunny."}], [{"text": "Still."}]]
    async with searching(*turns) as (served, exa), messages_client(served) as client:
        first = await send(client, tools=[SEARCH])
        await send(client, [*HI, replay(first), {"role": "user", "content": "and now?"}], tools=[SEARCH])
        inference: Any = served.stack.inference
        chat = inference.requests[-1]
    assert len(exa.requests) == 1
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert "First passage of 1." in chat.messages[2].content


@pytest.mark.parametrize("send", [create, stream])
async def test_a_failed_search_is_a_result_with_an_error(send: Any) -> None:
    turns: Any = [[search("status 500")], [{"text": "No idea."}]]
    async with searching(*turns) as (served, _), messages_client(served) as client:
        answer = await send(client, tools=[SEARCH])
    assert answer.content[1].content.error_code == "unavailable"
    assert answer.content[2].text == "No idea."


async def test_calls_of_other_servers_are_left_out() -> None:
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}
    foreign_result = {
        "type": "web_search_result",
        "url": "https://a.example",
        "title": "A",
        "encrypted_content": "EqgfCioIARgB",
    }
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [foreign_result]}
    blocks: list[Any] = [use, result, {"type": "text", "text": "A says so."}]
    messages: Any = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": "go on"}]
    async with searching([{"text": "ok"}]) as (served, _), messages_client(served) as client:
        answer = await create(client, messages, tools=[SEARCH])
    assert answer.content[0].text == "ok"
