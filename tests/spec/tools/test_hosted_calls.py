"""Calls of the server's own tools: side by side, bounded, and what becomes of those that cannot be made."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.meeting_search import Meeting
from tests.support.sdk.requests import chat_requests, create, messages, responses, stream
from tests.support.servers.mcp_stack import mcp, stacked
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, call_chunks
from tests.support.servers.upstream_server import stream as streamed
from tests.support.waiting import until

Json = dict[str, Any]
TOOL: Json = {"type": "web_search"}
DONE: Script = [{"text": "Done."}]


def search(query: str, **fields: Any) -> Json:
    return call("web_search", f'{{"query": "{query}"}}', **fields)


def together(*queries: str) -> Script:
    return [{"calls": [search(query, id=f"c{number}") for number, query in enumerate(queries)]}]


@asynccontextmanager
async def meeting(*turns: Script, size: int = 1, **responses: Any) -> AsyncGenerator[tuple[Served, Meeting]]:
    """A stack whose model plays `turns`, and a search of which `size` calls must meet."""
    tools = {"provider": "tests.support.sdk.meeting_search:Meeting", "size": size}
    async with serving(scripted(*turns), tool_runtime=tools, responses=responses) as served:
        yield served, cast(Meeting, served.stack.tool_runtime)


def answers(served: Served) -> dict[str, str]:
    """Return the results of calls as the model gets them, in order, by the ids of the calls."""
    return {each["tool_call_id"]: each["content"] for each in messages(served) if each["role"] == "tool"}


async def test_calls_of_one_turn_run_side_by_side() -> None:
    async with meeting(together("a", "b", "c"), DONE, size=3) as (served, tool):
        events = await stream(served, tools=[TOOL])
    names = [event.type.removeprefix("response.web_search_call.") for event in events]
    assert tool.most_running == 3
    assert [name for name in names if name in ("searching", "completed")] == ["searching"] * 3 + ["completed"] * 3


async def test_the_model_gets_results_in_the_order_of_its_calls() -> None:
    async with meeting(together("a", "b", "c"), DONE, size=3) as (served, _):
        events = await stream(served, tools=[TOOL])
        results = answers(served)
    done = [event.output_index for event in events if event.type == "response.web_search_call.completed"]
    assert done == [2, 1, 0]
    assert [*results] == ["c0", "c1", "c2"]
    assert [results[key].splitlines()[0] for key in results] == ["[3] a", "[2] b", "[1] c"]


async def test_only_so_many_run_at_a_time() -> None:
    async with meeting(together(*"abcdef"), DONE, size=2, parallel_tool_calls=2) as (served, tool):
        response = await create(served, tools=[TOOL])
    assert tool.most_running == 2
    assert [item.status for item in response.output] == ["completed"] * 7


async def test_of_very_many_calls_of_one_turn_the_first_are_run() -> None:
    queries = [f"q{number}" for number in range(66)]
    async with meeting(together(*queries), DONE, max_tool_calls=1000) as (served, tool):
        response = await create(served, tools=[TOOL])
        results = answers(served)
    assert len(tool.queries) == 64
    assert [item.status for item in response.output] == [*["completed"] * 64, "failed", "failed", "completed"]
    assert "only 64" in results["c65"]


async def test_a_call_that_takes_too_long_is_stopped_and_the_model_gets_an_error() -> None:
    async with meeting(together("alone", "b"), DONE, tool_timeout_s=0.2) as (served, tool):
        response = await create(served, tools=[TOOL])
        results = answers(served)
    assert [item.status for item in response.output] == ["failed", "completed", "completed"]
    assert "longer than 0.2 s" in results["c0"]
    assert results["c1"].startswith("[1] b")
    assert tool.running == 0


async def test_each_call_of_a_tool_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """With its tool, ids, time and outcome, and without its arguments; also one that was cancelled."""
    caplog.set_level(logging.INFO)
    line = re.compile(r"the call (\S+) of the tool (\S+) in (\S+) took \d\.\d{3} s: (.*)")
    async with meeting(together("secret", "words"), DONE, size=2) as (served, _):
        response = await create(served, tools=[TOOL])
    ids = [item.id for item in response.output if item.type == "web_search_call"]
    logged = [match.groups() for record in caplog.records if (match := line.fullmatch(record.getMessage()))]
    assert sorted(logged) == [(item_id, "web_search", response.id, "completed") for item_id in sorted(ids)]
    caplog.clear()
    async with meeting([search("secret")], size=2) as (served, tool):
        async with asyncio.timeout(10):
            async with await create(served, tools=[TOOL], stream=True) as events:
                async for event in events:
                    if event.type == "response.web_search_call.searching":
                        break
            await until(lambda: not tool.running and tool.queries)
    logged = [match.groups() for record in caplog.records if (match := line.fullmatch(record.getMessage()))]
    assert [outcome for *_, outcome in logged] == ["cancelled"]
    assert "secret" not in caplog.text
    assert tool.queries == ["secret"]


async def test_the_bug_of_a_tool_is_an_error_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async with meeting([search("bug", id="c0")], DONE) as (served, _):
        response = await create(served, tools=[TOOL])
        results = answers(served)
    assert [item.status for item in response.output] == ["failed", "completed"]
    assert results["c0"] == "The tool failed on an error of its own."
    assert "a secret of the house" in caplog.text


async def test_what_a_tool_gives_is_cut_with_a_mark() -> None:
    async with meeting([search("long", id="c0")], DONE, max_tool_output_chars=1000) as (served, _):
        await create(served, tools=[TOOL])
        results = answers(served)["c0"]
    assert len(results) == 1000
    assert "4000 characters left out" in results
    assert results.startswith("x")
    assert results.endswith("x")


async def test_calls_of_later_turns_are_sent_as_they_were_made() -> None:
    turns: list[Script] = [[search("a", id="c0")], [search("b", id="c1")], DONE]
    async with meeting(*turns) as (served, _):
        await create(served, tools=[TOOL])
        assert [message["role"] for message in messages(served)] == ["user", "assistant", "tool", "assistant", "tool"]
        prompts = [chat.messages for chat in chat_requests(served)]
    assert prompts[2][: len(prompts[1])] == prompts[1]


async def test_a_name_in_the_wrong_namespace_is_understood() -> None:
    async with meeting([call("functions.web_search", '{"query": "a"}')], DONE) as (served, tool):
        response = await create(served, tools=[TOOL])
    assert tool.queries == ["a"]
    assert response.output_text == "Done."


async def test_an_undeclared_call_is_an_error_for_the_model_and_hidden_from_the_client() -> None:
    async with meeting([call("imagined", id="c0")], DONE) as (served, tool):
        response = await create(served, tools=[TOOL, function("get")])
        sent_messages = messages(served)
    assert [item.type for item in response.output] == ["message"]
    assert sent_messages[1]["tool_calls"][0]["function"]["name"] == "imagined"
    assert sent_messages[2]["content"] == "There is no tool named 'imagined'. Call only tools that you were given."
    assert tool.queries == []


async def test_an_undeclared_call_and_a_search_of_one_turn_both_get_results() -> None:
    script: Script = [{"calls": [call("imagined", id="c0", custom=True), search("a", id="c1")]}]
    async with meeting(script, DONE) as (served, _):
        response = await create(served, tools=[TOOL])
        results = answers(served)
        calls = messages(served)[1]["tool_calls"]
    assert [item.type for item in response.output] == ["web_search_call", "message"]
    assert sorted(results) == sorted(each["id"] for each in calls) == ["c0", "c1"]
    assert results["c1"].startswith("[1] a")


async def test_an_undeclared_call_made_with_one_of_the_client_is_left_out() -> None:
    script: Script = [{"calls": [call("imagined"), call("get", "{}")]}]
    async with meeting(script) as (served, _):
        response = await create(served, tools=[TOOL, function("get")])
    assert [(item.type, item.name) for item in response.output] == [("function_call", "get")]
    assert response.status == "completed"


@pytest.mark.parametrize("tools", [[TOOL], [function("get")], []], ids=["hosted", "the client's", "none"])
async def test_a_model_that_insists_on_a_missing_tool_is_not_asked_forever(tools: list[Json]) -> None:
    async with meeting([{"reasoning": "hm"}, call("imagined")]) as (served, _):
        events = await stream(served, tools=tools)
        assert [bool(chat.tools) for chat in chat_requests(served)] == [bool(tools)] * 3 + [False]
    last = events[-1].response
    assert events[-1].type == "response.incomplete"
    assert last.incomplete_details.reason == "max_messages"
    assert [item.type for item in last.output] == ["reasoning"] * 4


async def test_a_model_that_is_given_no_tools_any_more_may_answer() -> None:
    async with meeting(*[[call("imagined")]] * 3, DONE) as (served, _):
        response = await create(served, tools=[TOOL])
    assert (response.status, response.output_text) == ("completed", "Done.")


async def test_a_call_made_with_the_answer_of_a_model_without_tools_is_ignored() -> None:
    async with meeting(*[[call("imagined")]] * 3, [{"text": "Done."}, search("a")]) as (served, tool):
        response = await create(served, tools=[TOOL])
    assert (response.status, response.output_text, tool.queries) == ("completed", "Done.", [])


async def test_an_undeclared_call_is_not_in_the_history_of_later_turns() -> None:
    async with meeting([call("imagined")], DONE, [{"text": "Yes."}]) as (served, _):
        first = await create(served, tools=[TOOL])
        await create(served, input="Sure?", previous_response_id=first.id)
        assert [message["role"] for message in messages(served)] == ["user", "assistant", "user"]


@pytest.mark.parametrize("kind", ["code_interpreter", "file_search", "mcp"])
async def test_a_choice_of_a_tool_that_was_not_declared_is_refused(kind: str) -> None:
    choice = {"type": kind, **({"server_label": "x"} if kind == "mcp" else {})}
    async with meeting() as (served, _):
        with pytest.raises(Exception, match="not found in 'tools'"):
            await create(served, tools=[TOOL], tool_choice=choice)


# --- for ever --------------------------------------------------------------------------------------------------------


async def ended(served: Served, **fields: Any) -> Any:
    """The response, made in the background."""
    response = await create(served, background=True, **fields)
    async with asyncio.timeout(10), await responses(served).retrieve(response.id, stream=True) as answer:
        async for _ in answer:
            pass
    return await responses(served).retrieve(response.id)


@pytest.mark.parametrize("way", [create, ended])
async def test_a_model_that_goes_on_calling_beyond_its_limit_is_not_asked_for_ever(way: Callable[..., Any]) -> None:
    async with meeting(*([search(query)] for query in "abcdefgh"), max_tool_calls=32) as (served, tool):
        response = await way(served, tools=[TOOL], max_tool_calls=1)
        assert len(chat_requests(served)) == 5
        assert chat_requests(served)[-1].tools is None
        sent_results = [message["content"] for message in messages(served) if message["role"] == "tool"]
    assert tool.queries == ["a"]
    assert [item.status for item in response.output] == ["completed"]
    assert [text.startswith("Not run: no more tool calls") for text in sent_results] == [False, True, True, True]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_messages")


async def test_what_a_model_answers_beyond_its_limit_is_the_answer() -> None:
    """The call beyond the limit is no item."""
    async with meeting([search("a")], [search("b")], DONE) as (served, tool):
        response = await create(served, tools=[TOOL], max_tool_calls=1)
    assert (response.status, response.output_text, tool.queries) == ("completed", "Done.", ["a"])
    assert [item.type for item in response.output] == ["web_search_call", "message"]


@pytest.mark.parametrize("in_one_turn", [False, True], ids=["one by one", "side by side"])
async def test_one_call_made_over_and_over_is_run_so_often_and_no_more(in_one_turn: bool) -> None:
    turns: list[Script] = [together(*["same"] * 9), DONE] if in_one_turn else [*[[search("same")]] * 7, DONE]
    async with meeting(*turns) as (served, tool):
        response = await create(served, tools=[TOOL])
        sent_results = [message["content"] for message in messages(served) if message["role"] == "tool"]
    assert tool.queries == ["same"] * 5
    assert [text.startswith("Not run: this very call") for text in sent_results] == [False] * 5 + [True] * (
        4 if in_one_turn else 2
    )
    assert (response.status, response.output_text) == ("completed", "Done.")


async def test_another_call_than_the_one_made_over_and_over_is_run() -> None:
    turns: list[Script] = [*[[search("same")]] * 6, [search("other")], [search("same")], DONE]
    async with meeting(*turns) as (served, tool):
        response = await create(served, tools=[TOOL])
    assert tool.queries == [*["same"] * 5, "other", "same"]
    assert response.status == "completed"


async def test_calls_of_a_server_are_bounded_too() -> None:
    async with stacked([call("real__note", '{"text": "a"}')]) as (served, real):
        response = await create(served, tools=[mcp(real, require_approval="never")])
        assert len(chat_requests(served)) == 9
    assert real.notes == ["a"] * 5
    assert response.status == "incomplete"


async def test_a_remote_model_is_bounded_too() -> None:
    async with UpstreamServer(streamed(call_chunks("web_search", '{"query": "a"}'))) as upstream:
        section = {"provider": "vllm", "base_url": upstream.base_url}
        async with serving(
            section, tool_runtime={"provider": "tests.support.sdk.meeting_search:Meeting", "size": 1}
        ) as served:
            response = await create(served, model="fake-model", tools=[TOOL])
    assert len(upstream.chats) == 9
    assert "tools" not in upstream.chats[-1].json
    assert [item.status for item in response.output] == [*["completed"] * 5, *["failed"] * 3]
    assert response.status == "incomplete"


async def test_a_model_that_is_asked_for_tokens_is_bounded_too() -> None:
    section = {"provider": "next_token", "function": "tests.support.models.token_functions:searches", "model": "mine"}
    tools = {"provider": "tests.support.sdk.meeting_search:Meeting", "size": 1}
    async with serving(section, tool_runtime=tools) as served:
        response = await create(served, model="mine", tools=[TOOL], max_tool_calls=1)
    assert [item.status for item in response.output] == ["completed"]
    assert response.status == "incomplete"
