"""How MCP servers are declared: what of theirs models are offered, by which names, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from apis.chat import ChatAllowedTools, NamedFunction
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import DONE, Json, kinds, mcp, offered, playing, stacked, tool_outputs, with_mcp
from tests.support.servers.serving import serving

USER: Json = {"role": "user", "content": "hi"}


async def test_the_model_is_offered_each_tool_under_the_servers_label() -> None:
    async with stacked(DONE) as (served, real):
        about = "Ours."
        await create(served, tools=[function("echo"), mcp(real, server_description=about, allowed_tools=["echo"])])
        tool = [*(chat_requests(served)[-1].tools or ())][-1]
        assert offered(served) == ["echo", "real__echo"]
    declared: Any = tool.model_dump(exclude_none=True)
    assert declared["function"]["description"] == "Says it again.\nOurs."
    assert declared["function"]["parameters"]["required"] == ["text"]


async def test_a_model_that_knows_namespaces_is_offered_the_server_as_one() -> None:
    script: Script = [call("real.echo", '{"text": "hello"}', id="c1")]
    async with stacked(script, DONE, grouped=True) as (served, real):
        response = await create(served, tools=[mcp(real, allowed_tools=["echo"])])
        assert offered(served) == ["real.echo"]
        again = await create(served, tools=[mcp(real)], input=[USER, *map(bare, response.output)], store=False)
        assert messages(served)[1]["tool_calls"][0]["function"]["name"] == "real.echo"
    assert response.output[1].output == "hello"
    assert again.status == "completed"


async def test_a_name_in_the_wrong_namespace_is_corrected() -> None:
    async with stacked([call("functions.real__echo", '{"text": "a"}')], DONE) as (served, real):
        response = await create(served, tools=[mcp(real)])
        assert messages(served)[1]["tool_calls"][0]["function"]["name"] == "real__echo"
    assert response.output[1].output == "a"


NAMES = [
    "web.search",
    "web/search",
    "web:search",
    "web search",
    "web_search",
    "suche✓",
    "查询",
    "n" * 128,
    "a.b." + "n" * 100,
]


def name_oddly(real: RealServer) -> None:
    """Give the server tools of these names, each of which says its own."""

    def saying(name: str) -> Callable[[], str]:
        return lambda: f"I am {name}"

    for name in NAMES:
        real.mcp.add_tool(saying(name), name=name, structured_output=False)


@pytest.mark.parametrize("grouped", [False, True])
async def test_names_that_models_do_not_know_are_offered_in_another_form(grouped: bool) -> None:
    async with stacked(DONE, grouped=grouped) as (served, real):
        name_oddly(real)
        declared = mcp(real, allowed_tools=NAMES)
        listed = await create(served, tools=[declared])
        names = offered(served)
        parts = [part for each in names for part in each.split(".", 1 if grouped else 0)]
    assert [tool.name for tool in listed.output[0].tools] == NAMES
    assert len(set(names)) == len(NAMES)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part) for part in parts)
    calls: list[Script] = [[call(each, "{}", id="c1")] for each in names]
    script = [turn for asking in calls for turn in (asking, DONE, asking, DONE, DONE)]
    async with stacked(*script, grouped=grouped) as (served, real):
        name_oddly(real)
        declared = {**declared, "server_url": real.url}
        for name, offered_name in zip(NAMES, names, strict=True):
            choice = {"type": "mcp", "server_label": "real", "name": name}
            first = await create(served, tools=[declared], tool_choice=choice)
            asks = await create(served, tools=[{**declared, "require_approval": "always"}])
            answers = [{"type": "mcp_approval_response", "approval_request_id": asks.output[-1].id, "approve": True}]
            second = await create(served, tools=[declared], input=answers, previous_response_id=asks.id)
            items = [USER, *map(bare, first.output), USER]
            await create(served, tools=[declared], input=items, store=False)
            assert messages(served)[1]["tool_calls"][0]["function"]["name"] == offered_name
            assert (first.output[1].name, first.output[1].output) == (name, f"I am {name}")
            assert (second.output[0].name, second.output[0].output) == (name, f"I am {name}")
            assert asks.output[-1].name == name


async def test_two_servers_with_equal_tools_are_distinguished() -> None:
    script: Script = [{"calls": [call("real__note", '{"text": "a"}'), call("other__note", '{"text": "b"}')]}]
    real = RealServer()
    other = RealServer()
    async with (
        real.serving(),
        other.serving(),
        serving(playing(script, DONE), tool_servers=with_mcp(real.url, other.url)) as served,
    ):
        response = await create(served, tools=[mcp(real), mcp(other, server_label="other")])
    assert kinds(response) == ["mcp_list_tools", "mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert (real.notes, other.notes) == (["a"], ["b"])


@pytest.mark.parametrize("allowed", [["echo"], {"tool_names": ["echo"]}, {"read_only": True}])
async def test_a_tool_that_is_not_allowed_is_neither_offered_nor_called(allowed: Any) -> None:
    async with stacked([call("real__note", '{"text": "a"}', id="c1")], DONE) as (served, real):
        response = await create(served, tools=[mcp(real, allowed_tools=allowed)])
        assert offered(served) == ["real__echo"]
        assert "no tool named 'real__note'" in tool_outputs(served)["c1"]
    assert [tool.name for tool in response.output[0].tools] == ["echo"]
    assert kinds(response) == ["mcp_list_tools", "message"]
    assert real.notes == []


async def test_a_choice_may_name_the_server_or_one_of_its_tools() -> None:
    note: Script = [call("real__note", '{"text": "a"}')]
    async with stacked(note, DONE, note, DONE) as (served, real):
        choice = {"type": "mcp", "server_label": "real", "name": "note"}
        await create(served, tools=[mcp(real)], tool_choice=choice)
        await create(served, tools=[mcp(real, allowed_tools=["echo", "note"])], tool_choice={**choice, "name": None})
        named, _, either, _ = (chat.tool_choice for chat in chat_requests(served))
    assert isinstance(named, NamedFunction)
    assert named.function.name == "real__note"
    assert isinstance(either, ChatAllowedTools)
    names = [each.function.name for each in either.allowed_tools.tools if isinstance(each, NamedFunction)]
    assert names == ["real__echo", "real__note"]


async def test_a_tool_that_is_called_as_one_of_the_clients_is_left_out() -> None:
    async with stacked([call("real__note", '{"text": "a"}')]) as (served, real):
        tools = [function("real__note"), mcp(real, allowed_tools=["echo", "note"])]
        response = await create(served, tools=tools)
        assert offered(served) == ["real__note", "real__echo"]
        again = await create(
            served,
            tools=tools,
            input=[{"type": "function_call_output", "call_id": response.output[1].call_id, "output": "x"}],
            previous_response_id=response.id,
        )
    assert kinds(response) == ["mcp_list_tools", "function_call"]
    assert again.status == "completed"
    assert real.notes == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tunnel_id": "t"}, "tools[1].tunnel_id"),
        ({"connector_id": "c"}, "tools[1].connector_id"),
        ({"server_label": "a__b"}, "tools[1].server_label"),
        ({"server_label": "a_"}, "tools[1].server_label"),
        ({"server_label": "a"}, "tools[1].server_label"),
        ({"server_label": "a b"}, "tools[1].server_label"),
        ({"server_label": "functions"}, "tools[1].server_label"),
        ({"command": "sh"}, "tools[1].command"),
        ({"args": ["-c", "id"]}, "tools[1].args"),
        ({"env": {"A": "b"}}, "tools[1].env"),
        ({"server_url": None}, "tools[1].server_url"),
        ({"server_url": "ftp://a.example"}, "tools[1].server_url"),
        ({"server_url": "file:///etc/passwd"}, "tools[1].server_url"),
        ({"server_url": "http://u:p@a.example/"}, "tools[1].server_url"),
        ({"server_url": "a.example"}, "tools[1].server_url"),
        ({"server_url": "http://a.example/#b"}, "tools[1].server_url"),
        ({"server_url": None, "connector_id": "connector_gmail"}, "tools[1].connector_id"),
        ({"headers": {"Host": "a"}}, "tools[1].headers"),
        ({"headers": {"X-A": "a\r\nb"}}, "tools[1].headers"),
        ({"headers": {"X-A": "a", "x-a": "b"}}, "tools[1].headers"),
        ({"headers": {"Authorization": "a"}, "authorization": "b"}, "tools[1].authorization"),
        ({"authorization": "a\nb"}, "tools[1].headers"),
    ],
)
async def test_a_declaration_that_cannot_be_followed_is_refused(fields: Json, param: str) -> None:
    async with stacked() as (served, real):
        tool = {
            name: value for name, value in mcp(real, **{"server_label": "b", **fields}).items() if value is not None
        }
        error = await refusal(served, tools=[mcp(real, server_label="a"), tool])
        assert real.methods == []
        assert chat_requests(served) == []
    assert error["param"] == param
    assert error["code"] in ("invalid_value", "unknown_parameter", "unsupported_parameter")


async def test_hosts_that_the_run_config_does_not_allow_are_refused() -> None:
    real = RealServer()
    async with (
        real.serving(),
        serving(playing(DONE), tool_servers=with_mcp(real.url, allowed_hosts=["mcp.example"])) as served,
    ):
        error = await refusal(served, tools=[mcp(real)])
    assert (error["param"], error["code"], real.methods) == ("tools[0].server_url", "invalid_value", [])


async def test_there_are_32_servers_at_most() -> None:
    async with stacked() as (served, _):
        servers = [{"type": "mcp", "server_label": f"s{n}", "server_url": "https://a.example"} for n in range(33)]
        error = await refusal(served, tools=servers)
    assert (error["param"], error["code"]) == ("tools", "array_above_max_length")


async def test_without_an_mcp_client_the_tool_is_refused() -> None:
    async with serving() as served:
        error = await refusal(served, tools=[{"type": "mcp", "server_label": "a", "server_url": "https://a.example"}])
    assert error["param"] == "tools[0].type"
    assert "tool_servers" in error["message"]
