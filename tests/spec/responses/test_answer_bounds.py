"""The bounds of one response through the SDK: what an upstream may send, and for how long."""

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
from openai import APIStatusError

from providers.responses.run.agent_loop import AgentLoop
from providers.responses.store import history
from stack.http.routes import responses as response_routes
from tests.providers.inference.remote import LIMITS, ROLE, sent
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import create, responses, stream
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    HANG,
    Act,
    Answer,
    Chunk,
    Repeat,
    UpstreamServer,
    call_chunk,
    delta_chunk,
    error_answer,
    event,
    http_chunk,
    text_chunks,
    usage_chunk,
)
from tests.support.servers.upstream_server import stream as whole
from tests.support.waiting import until, until_ended

MIB = 1024 * 1024
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
FOREVER: dict[str, Any] = {"first_token_timeout_s": 60, "token_gap_timeout_s": 60}


def endless(chunk: Chunk, pause_s: float = 0.0, times: int = 100) -> list[Act]:
    chunks = [ROLE, call_chunk(0, "", call_id="c", name="f")] if "tool_calls" in str(chunk) else [ROLE]
    return [*sent(*chunks), Repeat(http_chunk(event(chunk) * times), pause_s)]


def section(upstream: UpstreamServer, **fields: Any) -> dict[str, Any]:
    return {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, **fields}


async def ask(served: Served, **fields: Any) -> Any:
    return await create(served, **{"model": "fake-model", "tools": [FUNCTION], **fields})


async def events_of(served: Served, **fields: Any) -> Sequence[Any]:
    return await stream(served, **{"model": "fake-model", "tools": [FUNCTION], **fields})


async def ended(served: Served, **fields: Any) -> Any:
    """A background response at its end."""
    response = await ask(served, background=True, **fields)
    return await until_ended(responses(served), response.id, within_s=60)


async def chat(served: Served, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    client: Any = served.client
    return await client.chat.completions.create(model="fake-model", messages=messages, **fields)


# --- size ------------------------------------------------------------------------------------------------------------


async def test_the_answers_of_a_tenant_have_a_bound_together() -> None:
    """Neighbours: its next answers end with an error and keep their text, other tenants' answers are whole, and what
    has ended holds nothing."""
    chunks = [ROLE, *[delta_chunk(content="z" * 1000)] * 900]
    long, open_answer = whole([*chunks, *text_chunks(".")[1:]]), [*sent(*chunks), HANG]
    keys = [{"key": "key-of-loud", "tenant": "loud"}, {"key": "key-of-quiet", "tenant": "quiet"}]
    limits = {"max_body_bytes": MIB, "max_bodies_bytes": 2 * MIB, "api_keys": keys}
    async with (
        UpstreamServer(open_answer, *[long] * 4) as upstream,
        asyncio.timeout(20),
        serving(section(upstream, **FOREVER), server=limits) as served,
        sdk_client(served.url, "key-of-loud") as loud_client,
        sdk_client(served.url, "key-of-quiet") as quiet_client,
    ):
        loud: Any = loud_client
        quiet: Any = quiet_client
        served.streams.check = False
        share = served.app.state.services.shares.bytes
        request: Any = {"model": "fake-model", "input": "hi"}
        async with await loud.responses.create(**request, stream=True) as open_stream:
            received = 0
            async for event_ in open_stream:
                received += len(event_.delta) if event_.type == "response.output_text.delta" else 0
                if received == 900_000:
                    break
            with pytest.raises(APIStatusError, match="max_bodies_bytes") as caught:
                await loud.responses.create(**request)
            assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
            last: Any = [each async for each in await loud.responses.create(**request, stream=True)][-1]
            background = await loud.responses.create(**request, background=True)
            background = await until_ended(loud.responses, background.id, within_s=60)
            answer = await quiet.responses.create(**request)
        for failed in (last.response, background):
            assert failed.status == "failed"
            assert "max_bodies_bytes" in failed.error.message
            assert 50_000 < len(failed.output[0].content[0].text) < 900_000
        assert (answer.status, len(answer.output_text)) == ("completed", 900_001)
        await until(lambda: not share.used)


@pytest.mark.parametrize("chunk", [delta_chunk(content="z" * 1000), call_chunk(0, "z" * 1000)], ids=["text", "call"])
async def test_an_answer_without_an_end_fails_at_its_bound(chunk: Chunk) -> None:
    """Whole, streamed, in the background and as a chat."""
    async with (
        UpstreamServer(endless(chunk, 0.001, 2)) as upstream,
        asyncio.timeout(10),
        serving(section(upstream, max_answer_bytes=100_000)) as served,
    ):
        for asking in (ask(served), chat(served)):
            with pytest.raises(APIStatusError, match="max_answer_bytes") as caught:
                await asking
            assert caught.value.status_code == 502
        last = (await events_of(served))[-1]
        background = await ended(served)
    assert last.type == "response.failed"
    for response in (last.response, background):
        assert (response.status, response.error.code) == ("failed", "server_error")
        assert "max_answer_bytes" in response.error.message
        assert response.output[0].status == "incomplete"


@pytest.mark.parametrize("chunk", [delta_chunk(content="word "), call_chunk(0, "word ")], ids=["text", "call"])
async def test_max_output_tokens_is_held_by_the_server(chunk: Chunk) -> None:
    """A response that goes on is incomplete, a chat ends with `length`, and the upstream's request is closed."""
    async with UpstreamServer(endless(chunk, 0.001)) as upstream, serving(section(upstream)) as served:
        last = (await events_of(served, max_output_tokens=20))[-1]
        background = await ended(served, max_output_tokens=20)
        completion = await chat(served, max_completion_tokens=20)
        await asyncio.wait_for(upstream.left.wait(), 5)
        for response in (await ask(served, max_output_tokens=20), last.response, background):
            assert response.status == "incomplete"
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.output[-1].status == "incomplete"
            assert response.usage.output_tokens <= 50
    assert completion.choices[0].finish_reason == "length"
    assert last.type == "response.incomplete"


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        [HANG],
        [*sent(ROLE), HANG],
        endless(call_chunk(0, "")),
        endless(delta_chunk(content="")),
        [*sent(ROLE, delta_chunk(content="a")), HANG],
    ],
    ids=["headers", "token", "arguments", "text", "gap"],
)
async def test_the_limit_of_a_response_holds_wherever_it_waits(answer: Answer) -> None:
    """The limit was compared only when something came."""
    limits = {"response_timeout_s": 0.3, "background": {"timeout_s": 0.3, "poll_s": 0.05}}
    async with UpstreamServer(answer) as upstream, serving(section(upstream, **FOREVER), responses=limits) as served:
        began = time.monotonic()
        async with asyncio.timeout(6):
            with pytest.raises(APIStatusError, match="response_timeout_s") as caught:
                await ask(served)
            if answer == [HANG]:  # a stream waits for up to a second for the status of the upstream
                with pytest.raises(APIStatusError, match="response_timeout_s") as streamed:
                    await events_of(served)
                assert streamed.value.status_code == 504
            else:
                last = (await events_of(served))[-1]
                assert (last.type, last.response.status) == ("response.failed", "failed")
                assert "response_timeout_s" in last.response.error.message
                assert (await responses(served).retrieve(last.response.id)).status == "failed"
            background = await ended(served)
        assert time.monotonic() - began < 4
        assert caught.value.status_code == 504
        assert "background.timeout_s" in background.error.message


async def test_a_chat_ends_at_the_limits_of_its_tokens() -> None:
    """Chat completions have the limits of the first token and of the gap, also while data never pauses."""
    async with (
        UpstreamServer(endless(delta_chunk(content=""))) as upstream,
        serving(section(upstream, first_token_timeout_s=0.2)) as served,
        asyncio.timeout(4),
    ):
        with pytest.raises(APIStatusError, match="first_token_timeout_s") as caught:
            await chat(served)
        assert caught.value.status_code == 504
        assert caught.value.response.headers["retry-after"] == "1"


# --- upstreams that fail ---------------------------------------------------------------------------------------------


async def test_a_dead_upstream_is_an_http_error_for_a_stream_too() -> None:
    """No event is sent before a server has accepted the request or all attempts have failed."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{one.getsockname()[1]}/v1"
    dead = {"provider": "vllm", "base_url": url, "health_interval_s": 0, "max_retries": 2, "retry_delay_s": 0.1}
    async with serving(dead) as served:
        for _ in range(3):
            with pytest.raises(APIStatusError) as caught:
                await events_of(served)
            assert caught.value.status_code == 502
            assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_second_attempt_that_is_accepted_streams() -> None:
    """The stream begins as soon as a server has accepted the request."""
    begun = [*sent(ROLE), HANG]
    async with (
        UpstreamServer(error_answer(503), begun) as upstream,
        serving(section(upstream, retry_delay_s=0.1)) as served,
        asyncio.timeout(5),
        await ask(served, stream=True) as events,
    ):
        assert (await anext(aiter(events))).type == "response.created"


async def test_a_prompt_that_is_too_long_fails_with_the_code_that_agents_compact_on() -> None:
    """The code of the failed response is that of the HTTP error, and it is stored."""
    too_long = error_answer(400, "This model's maximum context length is 4096 tokens.")
    async with UpstreamServer(too_long) as upstream, serving(section(upstream)) as served:
        response = await ended(served)
        assert (response.status, response.error.code) == ("failed", "context_length_exceeded")
        with pytest.raises(APIStatusError) as caught:
            await events_of(served)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("count", [10**30, -5, 5.0, "5", True])
async def test_no_count_of_an_upstream_poisons_what_is_stored(count: Any) -> None:
    """A response with such a count was stored and could not be read again."""
    chunks = [*text_chunks("a")[:-1], usage_chunk(count, count, prompt_tokens_details={"cached_tokens": count})]
    async with UpstreamServer(whole(chunks)) as upstream, serving(section(upstream)) as served:
        response = await ask(served)
        assert response.output_text == "a"
        assert 0 <= response.usage.input_tokens < 2**53
        assert (await responses(served).retrieve(response.id)).usage == response.usage
        assert (await ended(served)).status == "completed"
        assert (await chat(served)).usage.prompt_tokens == response.usage.input_tokens


async def test_an_unknown_model_of_a_single_server_is_not_found() -> None:
    """The server would have answered as that model."""
    async with (
        UpstreamServer(whole(text_chunks("a"))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        for asking in (ask(served, model="gpt-5"), ask(served, model="gpt-5", stream=True)):
            with pytest.raises(APIStatusError) as caught:
                await asking
            assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")
        assert (await ask(served)).output_text == "a"


async def test_the_end_of_a_large_answer_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours: each of its steps is a turn of its own, and so is each step of reading it again."""
    turns, steps = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def watch(module: Any, name: str) -> None:
        work = getattr(module, name)

        def do(*arguments: Any, **named: Any) -> Any:
            steps.append(turns)
            return work(*arguments, **named)

        monkeypatch.setattr(module, name, do)

    monkeypatch.setattr("providers.common.fair_turns._LONG_S", -1.0)  # however fast the machine is
    watch(AgentLoop, "close_open_items")
    watch(history, "items_to_json")
    watch(history, "_serialize_without_output")
    watch(history, "_build_stored_response")
    watch(response_routes, "response_to_json")
    chunks = [ROLE, *[delta_chunk(content="z" * 1000)] * 2000]
    async with (
        UpstreamServer([*sent(*chunks), HANG], whole([*chunks, *text_chunks(".")[1:]])) as upstream,
        asyncio.timeout(20),
        serving(section(upstream, first_token_timeout_s=5, token_gap_timeout_s=0.3)) as served,
    ):
        counting = asyncio.create_task(count_turns())
        failed = (await events_of(served))[-1].response
        assert len(steps) == 3
        whole_answer = await ask(served)
        for response in (failed, whole_answer):
            assert (await responses(served).retrieve(response.id)).output_text == response.output_text
        counting.cancel()
    assert len(set(steps)) == len(steps) == 3 + 3 + 2 * 2
