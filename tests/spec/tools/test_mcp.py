"""MCP servers that requests declare: their tools are listed once and called here, over every transport."""

import asyncio
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from apis.chat import ChatFunctionTool
from providers.responses.run import response_runner
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers import mcp_server
from tests.support.servers.mcp_server import Kind, RealServer
from tests.support.servers.mcp_stack import DONE, Json, kinds, mcp, offered, playing, stacked, tool_outputs, with_mcp
from tests.support.servers.serving import serving

USER: Json = {"role": "user", "content": "hi"}
ECHO: Script = [call("real__echo", '{"text": ', '"hello"}', id="c1")]


@pytest.mark.parametrize("kind", ["streamable_http", "sse"])
async def test_the_tools_are_listed_and_the_one_that_is_called_runs(kind: Kind) -> None:
    async with stacked(ECHO, DONE, kind=kind) as (served, real):
        response = await create(served, tools=[mcp(real)])
        _, called, answer = messages(served)
    listing, item, message = response.output
    assert (listing.type, listing.id[:5], listing.server_label, listing.error) == (
        "mcp_list_tools",
        "mcpl_",
        "real",
        None,
    )
    assert {tool.name for tool in listing.tools} >= {"echo", "note", "fail"}
    assert (item.type, item.id[:4], item.status, item.server_label) == ("mcp_call", "mcp_", "completed", "real")
    assert (item.name, item.arguments, item.output, item.error) == ("echo", '{"text": "hello"}', "hello", None)
    assert item.approval_request_id is None
    assert message.content[0].text == "Done."
    assert called["tool_calls"][0]["function"] == {"name": "real__echo", "arguments": '{"text": "hello"}'}
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": "hello"}


async def test_a_server_of_the_run_config_is_named_by_its_label_alone() -> None:
    command = {"command": sys.executable, "args": [str(Path(mcp_server.__file__))]}
    async with serving(playing(ECHO, DONE), tool_servers=with_mcp(servers={"real": command})) as served:
        tool = {"type": "mcp", "server_label": "real", "require_approval": "never"}
        response = await create(served, tools=[tool])
    assert response.output[1].output == "hello"


async def test_a_connector_of_the_run_config_is_named_by_its_id() -> None:
    real = RealServer()
    async with real.serving():
        servers = with_mcp(real.url, connectors={"connector_wiki": real.url})
        async with serving(playing(ECHO, DONE), tool_servers=servers) as served:
            tool = {
                "type": "mcp",
                "server_label": "real",
                "connector_id": "connector_wiki",
                "require_approval": "never",
            }
            response = await create(served, tools=[tool])
    assert response.output[1].output == "hello"


async def test_each_stage_sends_its_event_when_it_happens() -> None:
    async with stacked(ECHO, DONE) as (served, real):
        events = await stream(served, tools=[mcp(real)])
    assert [event.type.removeprefix("response.") for event in events][2:13] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ]


@pytest.mark.parametrize("required", ["never", "always"])
async def test_a_call_without_arguments_is_one_with_an_empty_object(required: str) -> None:
    bare_call = call("real__structured", "", id="c1")
    async with stacked([bare_call], DONE) as (served, real):
        events = await stream(served, tools=[mcp(real, require_approval=required)])
        response = events[-1].response
        if required == "always":
            answers = [
                {"type": "mcp_approval_response", "approval_request_id": response.output[-1].id, "approve": True}
            ]
            await create(served, tools=[mcp(real)], input=answers, previous_response_id=response.id)
        _, called, _ = messages(served)
    assert response.output[1].arguments == "{}"
    done = [event.arguments for event in events if event.type == "response.mcp_call_arguments.done"]
    assert done == (["{}"] if required == "never" else [])
    assert called["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_every_item_of_a_server_has_a_status_and_may_be_sent_back() -> None:
    async with stacked(ECHO, [call("real__note", '{"text": "a"}', id="c2")], DONE) as (served, real):
        tools = [mcp(real, require_approval={"always": {"tool_names": ["note"]}, "never": {"tool_names": ["echo"]}})]
        events = await stream(served, tools=tools)
        response = events[-1].response
        again = await create(served, tools=tools, input=[USER, *map(bare, response.output)])
    begun = [event.item.status for event in events if event.type == "response.output_item.added"]
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]
    assert [item.status for item in response.output] == ["completed"] * 3
    assert begun == ["in_progress"] * 3
    assert again.status == "completed"


async def test_a_call_is_streamed_before_the_server_answers_and_a_disconnect_stops_it() -> None:
    async with stacked([call("real__hang", id="c1")]) as (served, real):
        events = await create(served, tools=[mcp(real)], stream=True)
        async with asyncio.timeout(10):
            async for event in events:
                if event.type == "response.mcp_call_arguments.done":
                    break
            await real.reached.wait()
            await events.close()
            await real.dropped.wait()


# --- listed once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["chained", "sent back", "referred to"])
async def test_a_server_is_listed_once_in_a_conversation(how: str) -> None:
    async with stacked(ECHO, DONE) as (served, real):
        first = await create(served, tools=[mcp(real)])
        listed = [*first.output[0].tools]
        match how:
            case "chained":
                fields: Json = {"input": "more", "previous_response_id": first.id}
            case "sent back":
                fields = {"input": [USER, *map(bare, first.output), USER], "store": False}
            case _:
                fields = {"input": [USER, *({"type": "item_reference", "id": item.id} for item in first.output)]}
        second = await create(served, tools=[mcp(real)], **fields)
        names = offered(served)
    assert kinds(second) == ["mcp_call", "message"]
    assert second.output[0].output == "hello"
    assert sorted(names) == sorted(f"real__{tool.name}" for tool in listed)


async def test_a_server_is_listed_again_when_its_declaration_changes() -> None:
    async with stacked(DONE) as (served, real):
        first = await create(served, tools=[mcp(real, allowed_tools=["echo"])])
        assert offered(served) == ["real__echo"]
        second = await create(served, tools=[mcp(real, allowed_tools=["echo", "note"])], previous_response_id=first.id)
        assert offered(served) == ["real__echo", "real__note"]
        third = await create(
            served,
            tools=[mcp(real, allowed_tools=["echo", "note"], authorization="another-token")],
            previous_response_id=second.id,
        )
    assert kinds(second) == ["mcp_list_tools", "message"]
    assert kinds(third) == ["message"]


@pytest.mark.parametrize(("stored", "expected"), [(False, "mcp_call"), (True, "mcp_list_tools")])
async def test_a_list_that_is_sent_back_shows_nothing_of_the_servers_own(*, stored: bool, expected: str) -> None:
    """The store knows which declaration it was listed for; what is not stored counts as it is."""
    async with stacked(ECHO, DONE) as (served, real):
        first = await create(served, tools=[mcp(real)], store=stored)
        listing = bare(first.output[0])
        assert "declaration" not in listing
        second = await create(served, tools=[mcp(real, allowed_tools=["echo"])], input=[listing, USER])
        assert offered(served) == ["real__echo"]
    assert kinds(second)[0] == expected


async def test_a_list_that_a_client_sends_is_offered_only_where_it_is_valid() -> None:
    tools = [
        {"name": "echo", "input_schema": {"type": "object"}, "annotations": ["odd"]},
        {"name": "a\nb", "input_schema": {"type": "object"}},
        {"name": "no_schema", "input_schema": None},
        {"name": "wrong", "input_schema": {"type": "object", "properties": 5}},
    ]
    listing = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "real", "tools": tools}
    async with stacked(ECHO, DONE) as (served, real):
        response = await create(served, tools=[mcp(real)], input=[listing, USER])
        assert [tool.name for tool in chat_requests(served)[0].tools or ()] == ["real__echo"]
    assert kinds(response) == ["mcp_call", "mcp_list_tools", "message"]


async def test_a_tool_that_its_server_has_changed_since_is_called_and_listed_again() -> None:
    """The call is made, and the model's next turn has the tool as it is now."""
    script: Script = [call("real__note", '{"text": "a"}', id="c1")]
    async with stacked(DONE, script, DONE, DONE) as (served, real):
        first = await create(served, tools=[mcp(real)])
        real.mcp.remove_tool("note")
        real.mcp.remove_tool("fail")

        @real.mcp.tool(structured_output=False)
        def note(text: str, copy_to: str = "") -> str:
            """Takes a note, and knows the time."""
            real.notes.append(text)
            return text

        # the runtime's session remembers the list it was given; a new one is as another server process would see it
        second = await create(served, tools=[mcp(real, authorization="a-new-token")], previous_response_id=first.id)
        answers = tool_outputs(served)
        note_tool = next(tool for tool in chat_requests(served)[-1].tools or () if tool.name == "real__note")
        names = offered(served)
        third = await create(served, tools=[mcp(real, authorization="a-new-token")], previous_response_id=second.id)
    assert kinds(second) == ["mcp_call", "mcp_list_tools", "message"]
    assert (second.output[0].status, answers["c1"], real.notes) == ("completed", "a", ["a"])
    assert isinstance(note_tool, ChatFunctionTool)
    assert note_tool.function.description == "Takes a note, and knows the time."
    assert "real__fail" not in names
    assert kinds(third) == ["message"]


async def test_a_tool_that_is_gone_is_listed_no_more() -> None:
    """The model reads that a tool has gone, and is not offered it again."""
    script: Script = [call("real__note", '{"text": "a"}', id="c1")]
    async with stacked(DONE, script, script, DONE) as (served, real):
        first = await create(served, tools=[mcp(real)])
        real.mcp.remove_tool("note")
        second = await create(served, tools=[mcp(real, authorization="a-new-token")], previous_response_id=first.id)
        answers = tool_outputs(served)
    assert kinds(second) == ["mcp_call", "mcp_list_tools", "message"]
    assert second.output[0].error.message == "The tool 'note' is no longer there."
    assert "no tool named 'real__note'" in answers["c1"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def unreachable(real: RealServer) -> Json:
    return mcp(real, server_url=real.url.replace("127.0.0.2", "127.0.0.3"))


def unauthorized(real: RealServer) -> Json:
    return mcp(real, server_url=f"{real.url}/nowhere")


@pytest.mark.parametrize("broken", [unreachable, unauthorized])
async def test_a_server_that_cannot_be_listed_refuses_the_request_before_a_model_is_asked(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """424 with the code and the words that OpenAI uses, streamed or not."""
    monkeypatch.setattr(response_runner, "EARLY_FAILURE_WAIT_S", 5)
    async with stacked(DONE) as (served, real):
        error = await refusal(served, 424, tools=[broken(real), function("get")])
        assert chat_requests(served) == []
    assert (error["type"], error["code"]) == ("external_connector_error", "http_error")
    assert error["message"].startswith("Error retrieving tool list from MCP server: 'real'. ")


async def test_a_server_that_fails_slowly_ends_the_stream_with_a_failed_response() -> None:
    """Once the stream has begun, the error is that of the response."""
    async with stacked(DONE) as (served, real):
        real.refuses, real.refusal_delay_s = True, 0.2
        events = await stream(served, tools=[mcp(real)])
        assert chat_requests(served) == []
    failed = events[-1].response
    assert (events[-1].type, kinds(failed)) == ("response.failed", ["mcp_list_tools"])
    assert "response.mcp_list_tools.failed" in [event.type for event in events]
    assert failed.error.message.startswith("Error retrieving tool list from MCP server: 'real'. ")


GOING_ON: Final = {"continue_without_mcp_servers": True}


async def test_a_server_that_cannot_be_reached_is_reported_and_the_response_goes_on_where_the_config_says_so() -> None:
    async with stacked(DONE, responses=GOING_ON) as (served, real):
        tool = unreachable(real)
        events = await stream(served, tools=[tool, function("get")])
        assert offered(served) == ["get"]
    response = events[-1].response
    listing, message = response.output
    assert (response.status, listing.tools, message.content[0].text) == ("completed", [], "Done.")
    assert listing.error
    assert "response.mcp_list_tools.failed" in [event.type for event in events]


async def test_a_server_that_could_not_be_listed_is_asked_again_by_the_next_response() -> None:
    async with stacked(DONE, responses=GOING_ON) as (served, real):
        real.refuses = True
        first = await create(served, tools=[mcp(real)])
        real.refuses = False
        second = await create(served, tools=[mcp(real)], previous_response_id=first.id)
    assert first.output[0].error
    assert second.output[0].error is None
    assert second.output[0].tools


async def test_a_tools_own_failure_is_an_error_object_and_sent_to_the_model() -> None:
    async with stacked([call("real__fail", '{"why": "not today"}', id="c1")], DONE) as (served, real):
        events = await stream(served, tools=[mcp(real)])
        assert tool_outputs(served) == {"c1": "Error executing tool fail: not today"}
    item = events[-1].response.output[1]
    assert (item.status, item.output) == ("failed", None)
    assert item.error.type == "mcp_tool_execution_error"
    assert item.error.content == [{"type": "text", "text": "Error executing tool fail: not today"}]
    assert "response.mcp_call.failed" in [event.type for event in events]


@pytest.mark.parametrize("arguments", ["{oops", "[1]", '{"text": 5}'])
async def test_wrong_arguments_are_an_error_that_the_model_sees(arguments: str) -> None:
    async with stacked([call("real__note", arguments, id="c1")], DONE) as (served, real):
        response = await create(served, tools=[mcp(real)])
        assert tool_outputs(served)["c1"]
    assert (response.output[1].status, response.output[1].arguments) == ("failed", arguments)
    assert response.output[1].error.type
    assert real.notes == []


async def test_a_call_that_takes_too_long_is_an_error() -> None:
    async with stacked([call("real__hang", id="c1")], DONE, responses={"tool_timeout_s": 0.3}) as (served, real):
        response = await create(served, tools=[mcp(real)])
        async with asyncio.timeout(10):
            await real.dropped.wait()
    assert response.output[1].error.message == "The tool took longer than 0.3 s and was stopped."


async def test_calls_over_the_limit_are_ignored() -> None:
    """They are neither made nor shown; the model alone reads why."""
    script: Script = [{"calls": [call("real__note", '{"text": "a"}'), call("real__note", '{"text": "b"}')]}]
    async with stacked(script, DONE) as (served, real):
        response = await create(served, tools=[mcp(real)], max_tool_calls=1)
        assert "no more tool calls" in str(messages(served)[-1]["content"])
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert response.output[1].status == "completed"
    assert real.notes == ["a"]


async def test_a_call_that_the_limit_of_tokens_cut_off_is_not_made() -> None:
    script: Script = [call("real__note", '{"text":', *[" "] * 30, '"a"}')]
    async with stacked(script) as (served, real):
        events = await stream(served, tools=[mcp(real)], max_output_tokens=16)
    item = events[-1].response.output[1]
    assert (item.type, item.status) == ("mcp_call", "incomplete")
    assert real.notes == []


async def test_a_model_that_fails_while_it_calls_leaves_whole_items() -> None:
    script: Script = [call("real__note", '{"text":'), {"fail": "gone"}]
    async with stacked(script) as (served, real):
        events = await stream(served, tools=[mcp(real)])
    assert events[-1].type == "response.failed"
    assert [item.type for item in events[-1].response.output] == ["mcp_list_tools", "mcp_call"]


async def test_a_long_result_is_cut_with_a_mark_in_the_item_too() -> None:
    script: Script = [call("real__long", '{"characters": 5000}', id="c1")]
    async with stacked(script, DONE, responses={"max_tool_output_chars": 1000}) as (served, real):
        response = await create(served, tools=[mcp(real)])
        assert tool_outputs(served)["c1"] == response.output[1].output
    assert len(response.output[1].output) == 1000
    assert "characters left out" in response.output[1].output


async def test_earlier_calls_are_replayed_in_later_turns() -> None:
    async with stacked(ECHO, DONE, DONE, DONE) as (served, real):
        first = await create(served, tools=[mcp(real)])
        before = chat_requests(served)[-1].messages
        await create(served, previous_response_id=first.id)
        chained = chat_requests(served)[-1].messages
        await create(served, input=[USER, *map(bare, first.output), USER])
        sent_back = chat_requests(served)[-1].messages
        await responses(served).delete(first.id)
        items = [{**bare(item), "id": f"own_{number}"} for number, item in enumerate(first.output)]
        await create(served, input=[USER, *items, USER])
        foreign = messages(served)
    assert chained[: len(before)] == before
    assert sent_back[: len(before)] == before
    assert foreign[1]["tool_calls"][0]["function"] == {"name": "real__echo", "arguments": '{"text": "hello"}'}
    assert foreign[2]["content"] == "hello"
