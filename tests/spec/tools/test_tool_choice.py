"""A tool choice is enforced by the server, also where the model ignores it."""

from typing import Any, Final, cast

import pytest
from openai import APIStatusError, BadRequestError

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.meeting_search import Meeting
from tests.support.sdk.requests import chat_requests, create, messages, refusal, stream
from tests.support.sdk.web_pages import browsing
from tests.support.servers.mcp_stack import DONE, Json, mcp, stacked
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, call_chunks
from tests.support.servers.upstream_server import stream as streamed

F, G = function("f"), function("g")
PATCH: Json = {"type": "custom", "name": "patch"}
SEARCH: Json = {"type": "web_search"}
MEETING: Json = {"provider": "tests.support.sdk.meeting_search:Meeting"}
NO: Script = [{"text": "I will not."}]


def named(name: str) -> Json:
    return {"type": "function", "name": name}


def allowed(mode: str, *tools: Json) -> Json:
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools]}


def search(query: str) -> Json:
    return call("web_search", f'{{"query": "{query}"}}')


def calls_made(response: Any) -> list[str]:
    return [getattr(item, "name", item.type) for item in response.output]


def queries(served: Served) -> list[str]:
    return cast(Meeting, served.stack.tool_runtime).queries


# --- what may be called ----------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Any, list[Json], str, str]] = {
    "none": ("none", [F], "f", ""),
    "none, of the server's": ("none", [SEARCH], "web_search", ""),
    "another function": (named("f"), [F, G], "g", "f"),
    "another function, said in full": (named("f"), [F, G], "functions.g", "f"),
    "a custom tool": (named("f"), [F, PATCH], "patch", "f"),
    "a function, not the custom tool": ({"type": "custom", "name": "patch"}, [F, PATCH], "f", "patch"),
    "one of the server's": (named("f"), [F, SEARCH], "web_search", "f"),
    "one that is not allowed": (allowed("auto", named("f")), [F, G], "g", ""),
    "none of those demanded": (allowed("required", named("f"), SEARCH), [F, G, SEARCH], "g", "f"),
    "one of the server's that is not allowed": (allowed("auto", named("f")), [F, SEARCH], "web_search", ""),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
async def test_a_call_that_was_not_chosen_is_an_error_for_the_model_alone(
    case: tuple[Any, list[Json], str, str], streams: bool
) -> None:
    choice, tools, wrong, right = case
    script = scripted([call(wrong, '{"query": "a"}')], [call(right)] if right else DONE)
    async with serving(script, tool_runtime=MEETING) as served:
        fields: Json = {"tools": tools, "tool_choice": choice}
        response = (await stream(served, **fields))[-1].response if streams else await create(served, **fields)
        sent_messages = messages(served)
        assert queries(served) == []
    assert (response.status, calls_made(response)) == ("completed", [right or "message"])
    assert [message["role"] for message in sent_messages] == ["user", "assistant", "tool"]
    assert sent_messages[-1]["content"].startswith(f"Not run: the tool '{wrong}' may not be called now.")


async def test_a_search_that_is_demanded_is_made_in_place_of_what_is_not() -> None:
    async with serving(scripted([call("f")], [search("a")], DONE), tool_runtime=MEETING) as served:
        response = await create(served, tools=[F, SEARCH], tool_choice=SEARCH)
        assert queries(served) == ["a"]
    assert calls_made(response) == ["web_search_call", "message"]


async def test_a_chosen_call_is_returned_and_one_made_with_it_is_not() -> None:
    script = scripted([{"calls": [call("g"), call("f", '{"a": 1}')]}])
    async with serving(script) as served:
        response = await create(served, tools=[F, G], tool_choice=named("f"))
        assert len(chat_requests(served)) == 1
    assert [(item.name, item.arguments) for item in response.output] == [("f", '{"a": 1}')]


async def test_what_is_allowed_is_all_that_is_allowed_in_every_turn() -> None:
    script = scripted([search("a")], [call("g")], [search("b")], [call("f")])
    async with serving(script, tool_runtime=MEETING) as served:
        choice = allowed("auto", named("f"), SEARCH)
        response = await create(served, tools=[F, G, SEARCH], tool_choice=choice)
        assert queries(served) == ["a", "b"]
        sent_choice = [chat.tool_choice for chat in chat_requests(served)]
    assert calls_made(response) == ["web_search_call", "web_search_call", "f"]
    assert all(each == sent_choice[0] for each in sent_choice)


async def test_of_a_set_that_is_demanded_the_rest_is_free_after_the_first_call() -> None:
    script = scripted([search("a")], [call("g")], DONE)
    async with serving(script, tool_runtime=MEETING) as served:
        choice = allowed("required", named("f"), SEARCH)
        response = await create(served, tools=[F, G, SEARCH], tool_choice=choice)
        modes = [chat.tool_choice.allowed_tools.mode for chat in chat_requests(served)]  # type: ignore[union-attr] # it is a set
    assert modes == ["required", "auto", "auto"]
    assert calls_made(response) == ["web_search_call", "message"]


async def test_a_named_tool_is_one_of_many_after_its_call() -> None:
    async with serving(scripted([search("a")], [call("g")]), tool_runtime=MEETING) as served:
        response = await create(served, tools=[G, SEARCH], tool_choice=SEARCH)
        assert chat_requests(served)[-1].tool_choice == "auto"
    assert calls_made(response) == ["web_search_call", "g"]


async def test_a_browser_of_the_models_own_is_what_is_chosen() -> None:
    turns: list[Script] = [[call("browser.find", '{"pattern": "a"}')], [call("browser.search", '{"query": "a"}')], DONE]
    async with browsing(*turns, native=True) as (served, _):
        response = await create(served, tools=[F, SEARCH], tool_choice=allowed("required", SEARCH))
        assert len(chat_requests(served)) == 3
    assert calls_made(response) == ["web_search_call", "web_search_call", "message"]
    async with browsing([call("browser.search", '{"query": "a"}')], DONE, native=True) as (served, there):
        response = await create(served, tools=[F, SEARCH], tool_choice=allowed("auto", named("f")))
        assert there.exa.requests == []
    assert calls_made(response) == ["message"]


async def test_a_model_that_insists_on_what_it_may_not_call_is_not_asked_for_ever() -> None:
    async with serving(scripted([call("f")])) as served:
        response = await create(served, tools=[F], tool_choice="none")
        assert len(chat_requests(served)) == 4
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_messages")


# --- what has to be called -------------------------------------------------------------------------------------------

DEMANDS: dict[str, tuple[Any, str]] = {
    "required": ("required", "A tool has to be called now. Call one of those that you were given."),
    "a function": (named("f"), "A tool has to be called now. Call `f`."),
    "some of them": (allowed("required", named("g"), named("f")), "A tool has to be called now. Call `f` or `g`."),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", DEMANDS.values(), ids=DEMANDS)
async def test_a_model_that_makes_no_call_is_asked_once_more(case: tuple[Any, str], streams: bool) -> None:
    choice, reminder = case
    async with serving(scripted(NO, [call("f")])) as served:
        fields: Json = {"tools": [F, G], "tool_choice": choice}
        response = (await stream(served, **fields))[-1].response if streams else await create(served, **fields)
        first, second = chat_requests(served)
        assert second.tool_choice == first.tool_choice
        sent_messages = messages(served)
    assert calls_made(response) == ["message", "f"]
    assert response.status == "completed"
    assert [(each["role"], each["content"]) for each in sent_messages[1:]] == [
        ("assistant", "I will not."),
        ("user", reminder),
    ]


@pytest.mark.parametrize("script", [NO, [], [{"reasoning": "hm"}], [call("g")]], ids=["text", "", "thought", "other"])
async def test_a_model_that_will_not_make_its_call_fails_the_response(script: Script) -> None:
    async with serving(scripted(script)) as served:
        with pytest.raises(APIStatusError, match="no call of `f`, which `tool_choice` demands") as caught:
            await create(served, tools=[F, G], tool_choice=named("f"))
        assert len(chat_requests(served)) == 2
    assert caught.value.status_code == 502


async def test_a_stream_without_the_call_that_is_demanded_fails() -> None:
    async with serving(scripted(NO)) as served:
        last = (await stream(served, tools=[F, G], tool_choice=named("f")))[-1]
    assert last.type == "response.failed"
    assert "`tool_choice` demands" in last.response.error.message
    assert calls_made(last.response) == ["message", "message"]


async def test_the_second_asking_leaves_no_trace_in_what_is_said_later() -> None:
    async with serving(scripted(NO, [call("f", id="c1")], DONE)) as served:
        first = await create(served, tools=[F], tool_choice="required")
        output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
        await create(served, input=[output], previous_response_id=first.id)
        assert [message["role"] for message in messages(served)] == ["user", "assistant", "tool"]


async def test_an_answer_that_was_cut_is_not_asked_for_again() -> None:
    async with serving(scripted([{"text": "Well"}, {"finish": "length"}])) as served:
        response = await create(served, tools=[F], tool_choice="required")
        assert len(chat_requests(served)) == 1
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_both_askings_share_one_budget() -> None:
    async with serving(scripted([{"text": ["a"] * 15}], [{"text": ["b"] * 15}])) as served:
        response = await create(served, tools=[F], tool_choice="required", max_output_tokens=20)
        assert [chat.max_completion_tokens for chat in chat_requests(served)] == [20, 5]
    assert (response.status, response.usage.output_tokens) == ("incomplete", 20)


async def test_a_remote_server_that_does_not_keep_the_choice_is_held_to_it() -> None:
    async with UpstreamServer(streamed(call_chunks("g", "{}")), streamed(call_chunks("f", "{}"))) as upstream:
        async with serving({"provider": "vllm", "base_url": upstream.base_url}) as served:
            response = await create(served, model="fake-model", tools=[F, G], tool_choice=named("f"))
        assert len(upstream.chats) == 2
    assert calls_made(response) == ["f"]


# --- servers that cannot be asked for their tools ---------------------------------------------------------------------

GOING_ON: Final = {"continue_without_mcp_servers": True}
OF_SERVER: Json = {"type": "mcp", "server_label": "real"}


@pytest.mark.parametrize("choice", ["required", OF_SERVER, allowed("required", OF_SERVER)])
async def test_a_choice_of_a_server_that_is_down_is_that_servers_fault(choice: Any) -> None:
    async with stacked(DONE, responses=GOING_ON) as (served, real):
        down = mcp(real, server_url=f"{real.url}/nowhere")
        error = await refusal_of(served, tools=[down], tool_choice=choice)
        events = await stream(served, tools=[down], tool_choice=choice)
        assert chat_requests(served) == []
    listing = events[-1].response.output[0]
    assert error["type"] == "server_error"
    assert "MCP server 'real' could not be listed" in error["message"]
    assert listing.error in error["message"]
    assert events[-1].response.error.message == error["message"]


async def refusal_of(served: Served, **fields: Any) -> Json:
    with pytest.raises(APIStatusError) as caught:
        await create(served, **fields)
    assert caught.value.status_code == 502
    return cast(Json, caught.value.body)


async def test_without_a_server_that_is_down_the_others_are_allowed() -> None:
    async with stacked([call("f")], responses=GOING_ON) as (served, real):
        down = mcp(real, server_url=f"{real.url}/nowhere")
        response = await create(served, tools=[down, F], tool_choice=allowed("required", OF_SERVER, named("f")))
    assert calls_made(response) == ["mcp_list_tools", "f"]


async def test_where_only_a_server_that_is_down_is_allowed_the_model_answers() -> None:
    async with stacked([call("f")], DONE, responses=GOING_ON) as (served, real):
        down = mcp(real, server_url=f"{real.url}/nowhere")
        response = await create(served, tools=[down, F], tool_choice=allowed("auto", OF_SERVER))
    assert calls_made(response) == ["mcp_list_tools", "message"]


async def test_a_second_asking_does_not_ask_for_a_server_that_is_down() -> None:
    async with stacked(NO, [call("f")], responses=GOING_ON) as (served, real):
        down = mcp(real, server_url=f"{real.url}/nowhere")
        response = await create(served, tools=[down, F], tool_choice=allowed("required", OF_SERVER, named("f")))
    assert calls_made(response) == ["mcp_list_tools", "message", "f"]


async def test_a_tool_that_a_server_does_not_have_is_the_clients_fault() -> None:
    async with stacked(DONE) as (served, real):
        with pytest.raises(BadRequestError, match="'nothing' not found"):
            await create(served, tools=[mcp(real)], tool_choice={**OF_SERVER, "name": "nothing"})
        assert (await refusal(served, tools=[F], tool_choice=OF_SERVER))["param"] == "tool_choice"
