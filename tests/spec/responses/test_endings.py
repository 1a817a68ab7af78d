"""How responses end: complete, cut short, failed, or left by their client."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
from openai import InternalServerError, NotFoundError

from providers.inference.scripted import Scripted
from tests.providers.inference.remote import sent
from tests.support.laws.stream_laws import check_frames
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import bare, called, create, messages, refusal, responses, stream, wire
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import (
    CUT,
    UpstreamServer,
    delta_chunk,
    error_answer,
    text_chunks,
    usage_chunk,
)
from tests.support.servers.upstream_server import stream as whole

SLOW = {"wait_s": 0.1}
"""Longer than a stream waits for its model before it begins."""
FOREVER = {"wait_s": 60}
USAGE = {"input_tokens": 9, "output_tokens": 7, "cached_tokens": 4, "reasoning_tokens": 3}


async def until(served: Served, condition: Callable[[], bool], within_s: float = 5) -> None:
    """Ask the server, which gives it the time to go on, until a condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await served.client.models.list()


# --- cut short -------------------------------------------------------------------------------------------------------

CUTS: dict[str, tuple[Script, list[tuple[str, str]]]] = {
    "in the text": ([{"text": ["a", "b"]}], [("message", "incomplete")]),
    "in the reasoning": ([{"reasoning": ["a", "b"]}], [("reasoning", "incomplete")]),
    "in the text after the reasoning": (
        [{"reasoning": "a"}, {"text": "b"}],
        [("reasoning", "completed"), ("message", "incomplete")],
    ),
    "in a call": ([call("get", '{"a"')], [("function_call", "incomplete")]),
    "in a custom call": ([call("patch", "***", custom=True)], [("custom_tool_call", "incomplete")]),
    "in the call after the text": (
        [{"text": "a"}, call("get", '{"a"')],
        [("message", "completed"), ("function_call", "incomplete")],
    ),
    "before anything": ([], []),
}


@pytest.mark.parametrize("reason", ["length", "content_filter"])
@pytest.mark.parametrize("case", CUTS.values(), ids=CUTS)
async def test_an_answer_cut_short_is_incomplete_and_says_why(
    case: tuple[Script, list[tuple[str, str]]], reason: str
) -> None:
    script, items = case
    async with serving(scripted([*script, {"finish": reason}])) as served:
        last = (await stream(served))[-1]
        stored = await responses(served).retrieve(last.response.id)
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"
    assert last.response.incomplete_details.reason == {"length": "max_output_tokens"}.get(reason, reason)
    assert last.response.completed_at is None
    assert last.response.error is None
    assert [(item.type, item.status) for item in last.response.output] == items
    assert bare(stored) == bare(last.response)


async def test_the_token_limit_of_the_request_cuts_the_answer() -> None:
    async with serving(scripted([{"text": [f"{number} " for number in range(40)]}])) as served:
        response = await create(served, max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 16
    assert response.output_text == "".join(f"{number} " for number in range(16))


async def test_an_incomplete_response_is_no_error_to_a_client_that_waits() -> None:
    async with serving(scripted([{"text": "a"}, {"finish": "length"}])) as served:
        response = await create(served)
    assert response.status == "incomplete"
    assert response.output_text == "a"


async def test_an_incomplete_response_can_be_followed() -> None:
    async with serving(scripted([{"text": "half"}, {"finish": "length"}])) as served:
        first = await create(served)
        await create(served, input="go on", previous_response_id=first.id)
        assert [message["content"] for message in messages(served)] == ["hi", "half", "go on"]


async def test_parallel_calls_that_the_limit_cuts_are_all_incomplete() -> None:
    """A client would run a call that passes for a whole one."""
    parallel = {"calls": [call("get", '{"a"', ":1"), call("put", '{"b"', ":2")]}
    async with serving(scripted([call("ask", "{}"), parallel, {"finish": "length"}])) as served:
        response = await create(served)
    assert response.status == "incomplete"
    assert [(item.name, item.status) for item in response.output] == [
        ("ask", "completed"),
        ("get", "incomplete"),
        ("put", "incomplete"),
    ]


# --- failed ----------------------------------------------------------------------------------------------------------

OPEN: dict[str, tuple[Script, list[tuple[str, str]]]] = {
    "in the text": ([{"text": ["a", "b"]}], [("message", "incomplete")]),
    "in the reasoning": ([{"reasoning": "a"}], [("reasoning", "incomplete")]),
    "in a call": ([call("get", '{"a"')], [("function_call", "incomplete")]),
    "in parallel calls": (
        [{"calls": [call("get", '{"a"'), call("put", '{"b"')]}],
        [("function_call", "incomplete"), ("function_call", "incomplete")],
    ),
    "in the call after the text": (
        [{"text": "a"}, call("patch", "***", custom=True)],
        [("message", "completed"), ("custom_tool_call", "incomplete")],
    ),
}


@pytest.mark.parametrize("case", OPEN.values(), ids=OPEN)
async def test_a_failure_in_the_middle_closes_open_items_and_is_reported(
    case: tuple[Script, list[tuple[str, str]]],
) -> None:
    script, items = case
    async with serving(scripted([*script, {"fail": "The upstream broke off."}])) as served:
        last = (await stream(served))[-1]
        stored = await responses(served).retrieve(last.response.id)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert last.response.error.message == "The upstream broke off."
    assert [(item.type, item.status) for item in last.response.output] == items
    assert bare(stored) == bare(last.response)


async def test_a_failure_after_the_beginning_is_an_event_of_the_stream() -> None:
    async with serving(scripted([SLOW, {"fail": "Too late for a status."}])) as served:
        events = await stream(served)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.message == "Too late for a status."


async def test_a_failure_at_once_is_an_http_status() -> None:
    async with serving(scripted([{"fail": "Nobody is there."}])) as served:
        error = await refusal(served, 502)
    assert error == {"message": "Nobody is there.", "type": "server_error", "param": None, "code": None}


async def test_a_failure_in_the_middle_is_an_error_to_a_client_that_waits() -> None:
    async with serving(scripted([{"text": "half"}, {"fail": "The upstream broke off."}])) as served:
        with pytest.raises(InternalServerError, match="The upstream broke off"):
            await create(served)


async def test_an_unknown_model_is_not_found() -> None:
    async with serving() as served:
        error = await refusal(served, 404, model="gpt-17")
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "gpt-17" in error["message"]


async def test_a_response_that_takes_too_long_fails_and_names_the_limit() -> None:
    script = scripted([SLOW, {"text": "a"}, SLOW, {"text": "b"}])
    async with serving(script, responses={"response_timeout_s": 0.15}) as served:
        last = (await stream(served))[-1]
    assert last.type == "response.failed"
    assert "response_timeout_s" in last.response.error.message


async def test_a_failed_response_can_be_followed() -> None:
    turns: list[Script] = [[{"text": "half"}, {"fail": "broken"}], [{"text": "whole"}]]
    async with serving(scripted(*turns)) as served:
        failed = (await stream(served))[-1].response
        assert (await create(served, input="again", previous_response_id=failed.id)).output_text == "whole"


@pytest.mark.parametrize("ending", [{"finish": "length"}, {"finish": "content_filter"}, {"fail": "broken"}])
async def test_the_sdk_accumulates_a_response_that_ends_badly(ending: dict[str, Any]) -> None:
    async with serving(scripted([{"reasoning": "hm"}, call("get", '{"a"'), ending])) as served:
        async with responses(served).stream(model="scripted", input="hi", **called(served)) as events:
            last = [event async for event in events][-1]
        assert bare(await responses(served).retrieve(last.response.id)) == bare(last.response)


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter", "tool_calls"])
async def test_usage_is_complete_at_every_ending(reason: str) -> None:
    async with serving(scripted([{"text": "a"}, {"finish": reason, "usage": USAGE}])) as served:
        whole = await create(served)
        streamed = (await stream(served))[-1].response
    for response in (whole, streamed):
        assert response.usage.model_dump(exclude_none=True) == {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 16,
        }


def spent(response: Any) -> tuple[int, int]:
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return response.usage.input_tokens, response.usage.output_tokens


async def test_a_failed_response_has_the_usage_of_what_it_gave() -> None:
    """The prompt counts where its length can be known."""
    async with serving(scripted([{"text": ["a", "b", "c"]}, {"fail": "broken"}])) as served:
        failed = (await stream(served))[-1].response
        stored = await responses(served).retrieve(failed.id)
        counted = await responses(served).input_tokens.count(model="scripted", input="hi")
    assert counted.input_tokens > 0
    assert spent(failed) == spent(stored) == (counted.input_tokens, 3)


async def test_an_answer_that_was_delayed_for_a_check_and_failed_it_has_usage() -> None:
    """Both answers of three deltas count, although nothing of them was sent."""
    async with serving(scripted([{"wait_s": 0.1}, {"text": ["Hello", " there", "."]}])) as served:
        failed = (await stream(served, text={"format": {"type": "json_object"}}))[-1].response
    assert failed.status == "failed"
    assert failed.output == []
    assert spent(failed)[0] > 0
    assert spent(failed)[1] == 6


async def test_a_failed_response_has_the_usage_of_the_turns_before_too() -> None:
    searching: Script = [call("web_search", '{"query": "a"}'), {"finish": "tool_calls", "usage": USAGE}]
    script = scripted(searching, [{"reasoning": ["a", "b"]}, {"fail": "broken"}])
    async with serving(script, tool_runtime={"provider": "tests.support.sdk.meeting_search:Meeting"}) as served:
        failed = (await stream(served, tools=[{"type": "web_search"}]))[-1].response
    assert spent(failed)[0] > 9
    assert spent(failed)[1] == 9


async def test_a_failed_answer_of_a_remote_server_has_usage() -> None:
    upstream = UpstreamServer([*whole(text_chunks("a", "b"))[:4], CUT])
    async with upstream, AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving({"provider": "vllm", "base_url": upstream.base_url}))
        failed = (await stream(served, model="fake-model"))[-1].response
    assert failed.status == "failed"
    assert spent(failed) == (5, 2)


# --- left ------------------------------------------------------------------------------------------------------------


def model(served: Served) -> Scripted:
    return cast(Scripted, served.stack.inference)


async def has_stopped(served: Served) -> None:
    """Within a second of a client's leaving, its generation has stopped."""
    await until(served, lambda: model(served).abandoned_chats == 1, within_s=1)


async def stored_response(served: Served, response_id: str) -> Any:
    """A response as soon as it is stored."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await responses(served).retrieve(response_id)
            except NotFoundError:
                continue


@pytest.mark.parametrize("script", [[{"text": "a"}, FOREVER], [{"text": ["a"] * 100_000}]], ids=["silent", "talking"])
async def test_a_client_that_leaves_stops_the_generation_and_what_there_was_is_kept(script: Script) -> None:
    async with serving(scripted(script)) as served:
        events = await create(served, stream=True)
        response_id = ""
        async for event in events:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        await events.close()
        await has_stopped(served)
        stored = await stored_response(served, response_id)
    assert stored.status == "cancelled"
    (message,) = stored.output
    assert message.status == "incomplete"
    assert stored.output_text.startswith("a")
    assert stored.usage.output_tokens >= 1


async def test_a_client_that_leaves_while_it_waits_for_the_whole_stops_the_generation() -> None:
    async with serving(scripted([{"text": "a"}, FOREVER])) as served:
        waiting = asyncio.create_task(create(served))

        await until(served, lambda: len(model(served).requests) == 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await has_stopped(served)


async def test_a_client_that_leaves_before_the_first_token_stops_the_generation() -> None:
    async with serving(scripted([FOREVER, {"text": "a"}])) as served:
        events = await create(served, stream=True)
        assert (await anext(aiter(events))).type == "response.created"
        await events.close()
        await has_stopped(served)


async def test_other_streams_go_on_when_one_client_leaves() -> None:
    async with serving(scripted([{"text": ["a"] * 300}])) as served:
        leaving = await create(served, stream=True)
        staying = asyncio.create_task(stream(served))
        await anext(aiter(leaving))
        await leaving.close()
        assert (await staying)[-1].response.output_text == "a" * 300


async def test_a_stream_ends_with_done_at_every_ending() -> None:
    turns: list[Script] = [[{"text": "a"}], [{"text": "a"}, {"finish": "length"}], [{"text": "a"}, {"fail": "x"}]]
    async with serving(scripted(*turns)) as served:
        for name in ("completed", "incomplete", "failed"):
            assert check_frames(await wire(served))[-1]["type"] == f"response.{name}"


async def test_a_response_that_cannot_be_stored_says_so_in_either_way() -> None:
    """Streamed or not, with the same code and the time after which to try again."""
    async with serving(
        scripted([SLOW, {"text": "a " * 2000}]), kv_store={"provider": "memory", "max_bytes": 4096}
    ) as served:
        with pytest.raises(InternalServerError) as caught:
            await create(served)
        failed = (await stream(served))[-1]
    assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
    assert caught.value.response.headers["retry-after"] == "1"
    assert failed.type == "response.failed"
    assert failed.response.error.code == "storage_unavailable"
    assert failed.response.error.message.endswith("Please try again in 1s.")


async def test_usage_of_what_did_not_complete_counts_the_prompt_and_the_reasoning_of_every_engine() -> None:
    """An upstream that counts no tokens of a prompt, and none of the reasoning that it sent."""
    thought = [delta_chunk(reasoning="a" * 30), delta_chunk(content="b" * 10)]
    answer = whole([*thought, delta_chunk("stop", content=""), usage_chunk(5, 8)])
    async with UpstreamServer(answer, [*sent(*thought), CUT]) as upstream:
        upstream.routes["/tokenize"] = error_answer(404, "no")
        async with serving({"provider": "vllm", "base_url": upstream.base_url}) as served:
            response = await create(served, model="fake-model")
            failed = (await stream(served, model="fake-model"))[-1].response
    assert response.usage.output_tokens_details.reasoning_tokens == 6
    assert failed.status == "failed"
    assert failed.usage.input_tokens > 0
    assert failed.usage.output_tokens >= 2
