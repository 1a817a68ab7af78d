"""The faults that users of Claude's clients report of self-hosted endpoints, each as a test."""

import asyncio
from typing import Any

import anthropic
import pytest
from httpx import AsyncClient

from apis.errors import ContextLengthExceeded
from apis.inference import Model
from tests.stack.http.raw import ask
from tests.support.laws.message_laws import check_message_frames
from tests.support.sdk.messages import ADD, HI, create, fail_with, messages_client, replay, stream
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import (
    DONE,
    LAST_HTTP_CHUNK,
    Act,
    UpstreamServer,
    Wait,
    event,
    head,
    http_chunk,
    text_chunks,
)

CALL: Any = {"call": "add", "arguments": ['{"a":', ' 1, "b": "', 'x"}']}


def model_of(served: Served) -> Any:
    return served.stack.inference


@pytest.mark.parametrize("send", [create, stream])
@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
async def test_a_turn_with_calls_ends_with_tool_use(send: Any, reason: str) -> None:
    """Fault 1: with `end_turn` the client stops silently."""
    async with (
        serving(scripted([CALL, {"finish": reason, "usage": {"output_tokens": 100}}])) as served,
        messages_client(served) as client,
    ):
        answer = await send(client, tools=[ADD])
    assert answer.stop_reason == ("max_tokens" if reason == "length" else "tool_use")


async def test_a_prompt_begins_as_the_one_before_it() -> None:
    """Fault 2: a value that changes in every request spoils the prompt cache."""
    prompts: list[Any] = []
    async with serving() as served, messages_client(served) as client:
        for number in range(2):
            header = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
            await create(client, system=[header, {"type": "text", "text": "be kind"}])
            prompts.append(model_of(served).requests[-1].messages)
    assert prompts[0] == prompts[1]


async def test_fields_of_other_betas_are_ignored() -> None:
    """Fault 3: a 400 for a field that the server does not know."""
    tool = {**ADD, "defer_loading": True, "eager_input_streaming": True, "cache_control": {"scope": "global"}}
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}, "citations": None}
    body: Any = {
        "model": "scripted",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [block]}],
        "tools": [tool],
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "speed": "fast",
        "inference_geo": "us",
        "max_token": 3,
        "output_config": {"effort": "high", "new": 1},
    }
    headers = [("anthropic-beta", "one-2026-01-01,two-2026-02-02")]
    async with serving() as served:
        answer = await ask(served.url, body, path="/v1/messages?beta=true", headers=headers)
    assert (answer.status, answer.json["content"][0]["text"]) == (200, "hi")


async def test_thinking_of_others_is_accepted_and_dropped() -> None:
    """Fault 4: an error for a signature of another server, an empty one, or an answer without thinking."""
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "foreign", "signature": "EqQBCgIYAhIM"},
        {"type": "thinking", "thinking": "none", "signature": ""},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy"},
        {"type": "text", "text": "hello"},
    ]
    messages: Any = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": "go on"}]
    async with serving() as served, messages_client(served) as client:
        await create(client, messages, thinking={"type": "enabled", "budget_tokens": 1024})
        read = model_of(served).requests[-1].messages[1]
    assert (read.content, read.reasoning) == ("hello", None)


async def test_every_piece_of_arguments_arrives() -> None:
    """Fault 5: arguments are cut or empty."""
    turns: Any = [
        [{"calls": [CALL, {**CALL, "arguments": '{"a": 2}'}]}],
        [{"call": "add", "arguments": ""}],
        [{"call": "add", "arguments": f'{{"a": {2**70}}}'}],
    ]
    for send in (create, stream):
        async with serving(scripted(*turns, [{"text": "ok"}])) as served, messages_client(served) as client:
            two, none, large = [await send(client, tools=[ADD]) for _ in range(3)]
            result: Any = [{"type": "tool_result", "tool_use_id": large.content[0].id, "content": "3"}]
            await send(client, [*HI, replay(large), {"role": "user", "content": result}], tools=[ADD])
        assert [block.input for block in two.content] == [{"a": 1, "b": "x"}, {"a": 2}]
        assert (none.content[0].input, large.content[0].input) == ({}, {"a": 2**70})


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ([{"text": "a b"}], "end_turn"),
        ([{"text": "a"}, {"finish": "length", "usage": {"output_tokens": 100}}], "max_tokens"),
        ([{"text": "a"}, {"finish": "length", "usage": {"output_tokens": 5}}], "model_context_window_exceeded"),
        ([{"refusal": "no"}], "refusal"),
        ([{"text": "a"}, {"finish": "content_filter"}], "refusal"),
        ([{"reasoning": "hm"}, CALL], "tool_use"),
        ([{"text": ["a", "b"]}, {"reasoning": "hm"}, {"text": "c"}], "end_turn"),
    ],
)
async def test_every_message_has_its_end(turn: Any, reason: str) -> None:
    """Fault 6: stop_reason null, no message_stop, broken frames."""
    body: Any = {"model": "scripted", "max_tokens": 100, "messages": HI, "tools": [ADD]}
    async with serving(scripted(turn)) as served:
        streamed = await ask(served.url, {**body, "stream": True}, path="/v1/messages?beta=true")
        whole = await ask(served.url, body, path="/v1/messages")
    events = check_message_frames(streamed.body)
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == whole.json["stop_reason"] == reason


@pytest.mark.parametrize("send", [create, stream])
async def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(send: Any) -> None:
    """Fault 7: a context overflow is a 500 or a hang."""
    async with serving() as served, messages_client(served) as client:
        fail_with(served, ContextLengthExceeded("The prompt has 60 tokens."))
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
            await send(client)


async def test_the_answer_is_bounded_by_the_room_that_is_left() -> None:
    """Fault 7: 32,000 tokens of output do not fit a small window with any prompt."""
    async with serving() as served, messages_client(served) as client:

        async def models() -> list[Model]:
            return [Model("scripted", "test", context_tokens=50)]

        model_of(served).models = models
        await stream(client, max_tokens=32_000)
        assert model_of(served).requests[-1].max_completion_tokens == 48
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 59 tokens > 50 maximum"):
            await create(client, [{"role": "user", "content": ("word " * 59).strip()}])


async def test_a_silent_stream_has_pings() -> None:
    """Fault 8: a client or a proxy gives up while the model reads."""
    body: Any = {"model": "scripted", "max_tokens": 9, "messages": HI, "stream": True}
    async with (
        serving(scripted([{"wait_s": 60}, {"text": "hi"}]), server={"keep_alive_s": 0.1}) as served,
        AsyncClient(timeout=20) as client,
        client.stream("POST", f"{served.url}/v1/messages", json=body) as answer,
    ):
        received, ping = "", 'event: ping\ndata: {"type":"ping"}\n\n'
        async for text in answer.aiter_text():
            received += text
            if received.count(ping) == 2:
                break
    check_message_frames(received.encode(), whole=False)


@pytest.mark.parametrize("send", [create, stream])
async def test_usage_counts_the_cache_and_all_rounds(send: Any) -> None:
    """Fault 9: usage of 0, and cache reads that are never shown."""
    usage = {"input_tokens": 90, "cached_tokens": 60, "output_tokens": 9, "reasoning_tokens": 4}
    turn: Any = [{"text": "hi"}, {"finish": "stop", "usage": usage}]
    async with serving(scripted(turn)) as served, messages_client(served) as client:
        counted = (await send(client)).usage
    assert (counted.input_tokens, counted.cache_read_input_tokens, counted.output_tokens) == (30, 60, 9)
    assert counted.output_tokens_details.thinking_tokens == 4


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
async def test_background_models_and_every_effort_are_served(effort: str) -> None:
    """Fault 10: calls to a small model that is not there, and efforts that a template refuses."""
    router: Any = {
        "provider": "router",
        "providers": {"one": scripted([{"text": "hi"}])},
        "aliases": {"claude-haiku-4-5": "scripted", "claude-opus-4-8": "scripted"},
    }
    async with serving(router) as served, messages_client(served) as client:
        answers = await asyncio.gather(
            create(client, model="claude-haiku-4-5", output_config={"effort": effort}),
            stream(client, model="claude-opus-4-8", output_config={"effort": effort}),
            stream(client, model="claude-opus-4-8", thinking={"type": "between_tools"}),
        )
    assert [answer.model for answer in answers] == ["claude-haiku-4-5", "claude-opus-4-8", "claude-opus-4-8"]


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    """Faults 4 and 5: each block of an answer is one that the next request may have."""
    turns: Any = [[{"reasoning": "hm"}, {"text": "I add."}, CALL], [{"text": "done"}]]
    result: Any = [{"type": "tool_result", "tool_use_id": "call_1", "content": "3"}]
    async with serving(scripted(*turns)) as served, messages_client(served) as client:
        first = await stream(client, tools=[ADD])
        last = await stream(client, [*HI, replay(first), {"role": "user", "content": result}], tools=[ADD])
        read = model_of(served).requests[-1].messages[1]
    assert (read.reasoning, read.content, read.tool_calls[0].id) == ("hm", "I add.", "call_1")
    assert last.content[0].text == "done"


async def test_hidden_thinking_that_arrives_bit_by_bit_does_not_end_the_stream() -> None:
    """Fault 6: what is not shown makes frames without a byte, and a chunk without a byte ends a body."""
    arrivals = [asyncio.Event() for _ in range(4)]
    chunks = [http_chunk(event(chunk)) for chunk in text_chunks("Hi ", "there.", reasoning=("I ", "think ", "so. "))]
    acts: list[Act] = [head()]
    for number, chunk in enumerate(chunks):
        acts += [chunk, Wait(arrivals[number])] if number < len(arrivals) else [chunk]
    acts += [http_chunk(DONE), LAST_HTTP_CHUNK]

    async def arrive() -> None:
        for arrival in arrivals:
            await asyncio.sleep(0.05)  # so that the server is given each by itself
            arrival.set()

    async with UpstreamServer(acts) as upstream:
        section = {"provider": "vllm", "base_url": upstream.base_url}
        async with serving(section) as served, messages_client(served) as client:
            arriving = asyncio.create_task(arrive())
            answer = await stream(client, model="fake-model", thinking={"type": "disabled"})
            await arriving
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hi there.")]
    assert answer.stop_reason == "end_turn"
