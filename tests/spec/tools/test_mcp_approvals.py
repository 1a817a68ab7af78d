"""Calls of MCP tools that wait for leave: asked for as the last item of a response, given or refused by the next."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import DONE, Json, kinds, mcp, offered, playing, stacked, tool_outputs, with_mcp
from tests.support.servers.serving import Served, serving

USER: Json = {"role": "user", "content": "hi"}
ARGUMENTS = '{"text": "a"}'
NOTE: Script = [{"reasoning": "I had better."}, call("real__note", '{"text":', ' "a"}', id="c1")]


def approval(request: Any, approve: bool = True, **fields: Any) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **fields}


async def answer(served: Served, how: str, first: Any, *items: Json, **fields: Any) -> Any:
    """The response after `first`, in one of the ways that a client may keep a conversation."""
    match how:
        case "chained":
            return await create(served, input=[*items], previous_response_id=first.id, **fields)
        case "sent back":
            return await create(served, input=[USER, *map(bare, first.output), *items], **fields)
        case "sent back, nothing stored":
            return await create(served, input=[USER, *map(bare, first.output), *items], store=False, **fields)
        case _:
            references = [{"type": "item_reference", "id": item.id} for item in first.output]
            return await create(served, input=[USER, *references, *items], **fields)


HOW = ["chained", "sent back", "sent back, nothing stored", "referred to"]


@pytest.mark.parametrize("required", [None, "always", {"never": {"tool_names": ["echo"]}}])
async def test_a_call_waits_for_leave_and_the_response_ends_with_the_question(required: Any) -> None:
    async with stacked(NOTE) as (served, real):
        events = await stream(served, tools=[mcp(real, require_approval=required)])
        whole = await create(served, tools=[mcp(real, require_approval=required)])
        assert len(chat_requests(served)) == 2
    response = events[-1].response
    assert kinds(response) == kinds(whole) == ["mcp_list_tools", "reasoning", "mcp_approval_request"]
    item = response.output[-1]
    assert (item.id[:5], item.server_label, item.name, item.arguments) == ("mcpr_", "real", "note", ARGUMENTS)
    assert response.status == "completed"
    assert [event.type for event in events[-3:]] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert not [event for event in events if "mcp_call" in event.type]
    assert real.notes == []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_approved_call_is_made_first_of_all(how: str, streamed: bool) -> None:
    async with stacked(NOTE, DONE) as (served, real):
        tools = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        request = first.output[-1]
        second = await answer(served, how, first, approval(request), tools=tools, stream=streamed)
        if streamed:
            events = [event async for event in second]
            second = events[-1].response
            assert [event.type.removeprefix("response.") for event in events][2:8] == [
                "output_item.added",
                "mcp_call.in_progress",
                "mcp_call_arguments.delta",
                "mcp_call_arguments.done",
                "mcp_call.completed",
                "output_item.done",
            ]
        chat = messages(served)
    item, message = second.output
    assert (item.type, item.status, item.name, item.arguments) == ("mcp_call", "completed", "note", ARGUMENTS)
    assert (item.output, item.approval_request_id) == ("1 notes", request.id)
    assert message.content[0].text == "Done."
    assert real.notes == ["a"]
    assert [each["role"] for each in chat] == ["user", "assistant", "tool"]
    assert chat[1]["reasoning"] == "I had better."
    assert chat[1]["tool_calls"][0]["function"] == {"name": "real__note", "arguments": ARGUMENTS}
    assert chat[2]["content"] == "1 notes"


@pytest.mark.parametrize("how", HOW)
async def test_a_refused_call_is_not_made_and_the_model_sees_why(how: str) -> None:
    async with stacked(NOTE, DONE) as (served, real):
        tools = [mcp(real)]
        first = await create(served, tools=[mcp(real, require_approval="always")])
        refused = approval(first.output[-1], approve=False, reason="Not on Sundays.")
        second = await answer(served, how, first, refused, tools=tools)
        chat = messages(served)
    assert kinds(second) == ["message"]
    assert [each["role"] for each in chat] == ["user", "assistant", "tool"]
    assert chat[1]["tool_calls"][0]["function"] == {"name": "real__note", "arguments": ARGUMENTS}
    assert "did not approve" in chat[2]["content"]
    assert "Not on Sundays." in chat[2]["content"]
    assert real.notes == []


async def test_an_approval_is_used_once() -> None:
    async with stacked(NOTE, DONE) as (served, real):
        tools = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        approved = approval(first.output[-1])
        second = await create(served, tools=tools, input=[approved, approved], previous_response_id=first.id)
        third = await create(served, tools=tools, input=[approved], previous_response_id=second.id)
        everything = [USER, *map(bare, first.output), approved, *map(bare, second.output), USER]
        fourth = await create(served, tools=tools, input=everything, store=False)
    assert [kinds(each)[0] for each in (second, third, fourth)] == ["mcp_call", "reasoning", "message"]
    assert real.notes == ["a"]


@pytest.mark.parametrize("yes", [True, False])
async def test_two_answers_that_differ_are_refused(yes: bool) -> None:
    async with stacked(NOTE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        answers = [approval(first.output[-1], yes), approval(first.output[-1], not yes)]
        error = await refusal(served, tools=[mcp(real)], input=answers, previous_response_id=first.id)
    assert (error["param"], error["code"]) == ("input[1].approval_request_id", "invalid_value")
    assert ("approved" if yes else "refused") in error["message"]
    assert real.notes == []


async def again(served: Served, how: str, before: list[Any], *answers: Json, **fields: Any) -> Any:
    """Give the second of two answers after the first one and what came of it."""
    if how == "chained":
        return await create(served, input=[answers[1]], previous_response_id=before[1].id, **fields)
    first, second = ([*map(bare, each.output)] for each in before)
    return await create(served, input=[USER, *first, answers[0], *second, answers[1]], **fields)


@pytest.mark.parametrize("how", ["chained", "sent back"])
@pytest.mark.parametrize("yes", [True, False])
async def test_an_answer_is_not_taken_back_later(yes: bool, how: str) -> None:
    async with stacked(NOTE, DONE) as (served, real):
        tools = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        answers = approval(first.output[-1], yes), approval(first.output[-1], not yes)
        second = await answer(served, how, first, answers[0], tools=tools)
        with pytest.raises(BadRequestError) as caught:
            await again(served, how, [first, second], *answers, tools=tools)
        assert len(chat_requests(served)) == 2
    assert "approval_request_id" in (caught.value.param or "")
    assert real.notes == (["a"] if yes else [])


async def cut_off(served: Served, **fields: Any) -> Any:
    """The response of a request whose client leaves while a call runs."""
    identity = ""
    async with await create(served, stream=True, **fields) as events:
        async for event in events:
            identity = event.response.id if event.type == "response.created" else identity
            if event.type == "response.mcp_call_arguments.done":
                break
    async with asyncio.timeout(10):
        while True:
            with suppress(NotFoundError):
                return await responses(served).retrieve(identity)


@pytest.mark.parametrize("how", ["chained", "sent back"])
async def test_an_interrupted_call_is_not_repeated_and_the_client_and_the_model_see_why(how: str) -> None:
    hang: Script = [call("real__hang", "{}", id="c1")]
    async with stacked(hang, DONE, DONE) as (served, real):
        served.streams.check = False
        tools = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        yes = approval(first.output[-1])
        cut = await cut_off(served, tools=tools, previous_response_id=first.id, input=[yes])
        assert (cut.output[0].type, cut.output[0].status) == ("mcp_call", "incomplete")
        third = await again(served, how, [first, cut], yes, yes, tools=tools)
        chat = messages(served)
        fourth = await again(served, "chained", [first, third], yes, yes, tools=tools)
    item, message = third.output
    assert (item.type, item.status, item.approval_request_id) == ("mcp_call", "failed", first.output[-1].id)
    assert "Nobody knows" in item.error.message
    assert message.content[0].text == "Done."
    assert [each["role"] for each in chat] == ["user", "assistant", "tool"]
    assert (chat[2]["tool_call_id"], "Nobody knows" in chat[2]["content"]) == ("c1", True)
    assert kinds(fourth) == ["message"]


@pytest.mark.parametrize("tools", [[], [function()], [{"type": "tool_search"}]], ids=["none", "a function", "a search"])
async def test_an_approval_without_the_server_is_refused_and_not_acted_on_later(tools: list[Json]) -> None:
    async with stacked(NOTE, DONE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        input_items = [approval(first.output[-1])]
        error = await refusal(served, tools=tools, input=input_items, previous_response_id=first.id)
        assert (error["param"], "'real'" in error["message"]) == ("input[0].approval_request_id", True)
        later = await create(served, tools=[mcp(real)], previous_response_id=first.id)
    assert "mcp_call" not in kinds(later)
    assert real.notes == []


async def test_an_approval_of_an_unknown_request_is_refused() -> None:
    async with stacked(DONE) as (served, _):
        answers = [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}]
        error = await refusal(served, input=answers)
    assert error["param"] == "input[0].approval_request_id"


async def test_a_finished_approved_call_may_be_sent_back_without_the_server() -> None:
    async with stacked(NOTE, DONE, DONE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        answers = approval(first.output[-1])
        second = await answer(served, "sent back", first, answers, tools=[mcp(real, require_approval="always")])
        items = [USER, *map(bare, first.output), answers, *map(bare, second.output), USER]
        await create(served, input=items)
    assert real.notes == ["a"]


async def test_approved_calls_count_among_those_that_a_response_may_make() -> None:
    asking: Script = [{"calls": [call("real__note", f'{{"text": "{each}"}}', id=f"c{each}") for each in "ab"]}]
    async with stacked(asking, DONE) as (served, real):
        tools = [mcp(real, require_approval="always"), function()]
        first = await create(served, tools=tools)
        answers = [approval(each) for each in first.output[1:]]
        second = await create(served, tools=tools, input=answers, previous_response_id=first.id, max_tool_calls=1)
        assert "no more tool calls are allowed" in tool_outputs(served)["cb"]
        assert offered(served) == ["get"]
    assert [item.status for item in second.output] == ["completed", "failed", "completed"]
    assert real.notes == ["a"]


async def test_several_calls_are_approved_one_by_one() -> None:
    asking: Script = [{"calls": [call("real__note", f'{{"text": "{each}"}}', id=f"c{each}") for each in "abc"]}]
    async with stacked(asking, DONE) as (served, real):
        tools = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        requests = first.output[1:]
        answers = [approval(requests[0]), approval(requests[1], approve=False), approval(requests[2])]
        second = await create(served, tools=tools, input=answers, previous_response_id=first.id)
        sent_outputs = tool_outputs(served)
    assert [each.type for each in requests] == ["mcp_approval_request"] * 3
    assert kinds(second) == ["mcp_call", "mcp_call", "message"]
    assert real.notes == ["a", "c"]
    assert sorted(sent_outputs) == ["ca", "cb", "cc"]
    assert "did not approve" in sent_outputs["cb"]


async def test_a_call_without_approval_runs_while_another_waits_for_one() -> None:
    script: Script = [{"calls": [call("real__note", ARGUMENTS), call("real__echo", '{"text": "x"}'), call("get")]}]
    async with stacked(script, DONE) as (served, real):
        tools = [function("get"), mcp(real, require_approval={"never": {"read_only": True}})]
        first = await create(served, tools=tools)
        *_, echoed, got, request = first.output
        outputs = [{"type": "function_call_output", "call_id": got.call_id, "output": "x"}, approval(request)]
        second = await create(served, tools=tools, input=outputs, previous_response_id=first.id)
    assert [item.type for item in (echoed, got, request)] == ["mcp_call", "function_call", "mcp_approval_request"]
    assert echoed.output == "x"
    assert second.output[0].output == "1 notes"
    assert second.output_text == "Done."


async def test_a_call_with_wrong_arguments_fails_without_an_approval_request() -> None:
    async with stacked([call("real__note", "{oops", id="c1")], DONE) as (served, real):
        response = await create(served, tools=[mcp(real, require_approval="always")])
        assert "not JSON" in tool_outputs(served)["c1"]
    assert kinds(response) == ["mcp_list_tools", "message"]


async def test_the_model_sees_an_approved_call_that_fails() -> None:
    async with stacked([call("real__fail", '{"why": "no"}', id="c1")], DONE) as (served, real):
        tools = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        second = await create(served, tools=tools, input=[approval(first.output[-1])], previous_response_id=first.id)
        assert tool_outputs(served)["c1"] == "Error executing tool fail: no"
    assert (second.output[0].status, second.output[0].error.type) == ("failed", "mcp_tool_execution_error")


async def test_an_approved_call_of_a_tool_that_is_no_longer_allowed_is_not_made() -> None:
    async with stacked(NOTE, DONE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        tools = [mcp(real, allowed_tools=["echo"])]
        second = await create(served, tools=tools, input=[approval(first.output[-1])], previous_response_id=first.id)
    listing, item, _ = second.output
    assert (listing.type, item.type, item.status) == ("mcp_list_tools", "mcp_call", "failed")
    assert "offers no tool 'note'" in item.error.message
    assert real.notes == []


@pytest.mark.parametrize("needed", ["always", {"never": {"read_only": True}}])
async def test_a_tool_that_changed_before_its_approval_is_approved_again(needed: Any) -> None:
    """A user approves the tool that the user has seen."""
    again: Script = [call("real__note", '{"text": "b"}', id="c2")]
    async with stacked(NOTE, again, DONE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        real.mcp.remove_tool("note")

        @real.mcp.tool(structured_output=False)
        def note(text: str, copy_to: str = "") -> str:
            real.notes.append(text)
            return text

        tools = [mcp(real, authorization="a-new-token", require_approval=needed)]
        second = await create(served, tools=tools, input=[approval(first.output[-1])], previous_response_id=first.id)
        assert real.notes == []
        third = await create(served, tools=tools, input=[approval(second.output[-1])], previous_response_id=second.id)
    assert kinds(second) == ["mcp_call", "mcp_list_tools", "mcp_approval_request"]
    assert "needs an approval of its own" in second.output[0].error.message
    assert kinds(third) == ["mcp_call", "message"]
    assert real.notes == ["b"]


async def test_a_tool_that_needs_an_approval_since_it_changed_waits_for_one() -> None:
    """A tool that is no longer read-only is not called on the ground that it was."""
    script: Script = [call("real__echo", '{"text": "a"}', id="c1")]
    async with stacked(DONE, script, script) as (served, real):
        free = {"never": {"read_only": True}}
        first = await create(served, tools=[mcp(real, require_approval=free)])
        real.mcp.remove_tool("echo")

        @real.mcp.tool(structured_output=False)
        def echo(text: str) -> str:
            real.notes.append(text)
            return text

        tools = [mcp(real, require_approval=free, authorization="a-new-token")]
        second = await create(served, tools=tools, previous_response_id=first.id)
    assert kinds(second) == ["mcp_call", "mcp_list_tools", "mcp_approval_request"]
    assert real.notes == []


async def test_an_approval_without_a_request_is_refused() -> None:
    async with stacked() as (served, real):
        input_items = [USER, {"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}]
        error = await refusal(served, tools=[mcp(real)], input=input_items)
    assert error["param"] == "input[1].approval_request_id"
    assert "mcpr_x" in error["message"]


async def test_an_approval_for_a_server_that_is_not_declared_is_refused() -> None:
    async with stacked(NOTE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        error = await refusal(
            served,
            tools=[mcp(real, server_label="other")],
            input=[approval(first.output[-1])],
            previous_response_id=first.id,
        )
    assert "'real'" in error["message"]


async def test_a_question_that_is_not_answered_leaves_the_conversation_as_it_was() -> None:
    async with stacked(NOTE, DONE) as (served, real):
        first = await create(served, tools=[mcp(real, require_approval="always")])
        second = await create(served, input="Forget it.", tools=[mcp(real)], previous_response_id=first.id)
        assert [each["role"] for each in messages(served)] == ["user", "assistant", "user"]
        assert "real__note" in offered(served)
    assert kinds(second) == ["message"]
    assert real.notes == []


async def test_counting_the_tokens_of_an_approval_does_not_make_the_call() -> None:
    async with stacked(NOTE, DONE) as (served, real):
        tools: Any = [mcp(real, require_approval="always")]
        first = await create(served, tools=tools)
        value: Any = [approval(first.output[-1])]
        await served.client.responses.input_tokens.count(
            model="scripted", input=value, previous_response_id=first.id, tools=tools
        )
    assert real.notes == []


@pytest.mark.parametrize("how", ["chained", "sent back", "referred to"])
async def test_an_approval_holds_for_the_server_that_was_declared_when_it_was_asked_for(how: str) -> None:
    """The approved call is not made at another server that has the label now, though no item says which."""
    async with stacked(NOTE, DONE) as (served, real):
        other = mcp(real, require_approval="always", server_url=f"{real.url}?other=1")
        first = await create(served, tools=[mcp(real, require_approval="always")])
        assert "server" not in bare(first.output[-1])
        with pytest.raises(BadRequestError) as refused:
            await answer(served, how, first, approval(first.output[-1]), tools=[other])
        assert "another MCP server" in refused.value.message
        assert str(refused.value.param).endswith(".approval_request_id")
        assert real.notes == []
        narrowed = mcp(real, require_approval="always", allowed_tools=["note"], authorization="new-token")
        second = await answer(served, how, first, approval(first.output[-1]), tools=[narrowed])
    assert "mcp_call" in kinds(second)
    assert real.notes == ["a"]


async def test_the_operator_may_require_an_approval_of_a_server_that_it_configures() -> None:
    """`require_approval: never` of the request does not lift it."""
    real = RealServer()
    async with real.serving():
        rules = {"url": real.url, "require_approval": ["note"], "allowed_tools": ["note", "echo"]}
        servers = with_mcp(real.url, servers={"real": rules})
        async with serving(playing(NOTE, DONE), tool_servers=servers) as served:
            tools = [{"type": "mcp", "server_label": "real", "require_approval": "never"}]
            first = await create(served, tools=tools)
            assert offered(served) == ["real__echo", "real__note"]
            assert kinds(first)[-1] == "mcp_approval_request"
            assert real.notes == []
            second = await answer(served, "chained", first, approval(first.output[-1]), tools=tools)
    assert "mcp_call" in kinds(second)
    assert real.notes == ["a"]
