"""The WebSocket of the Responses API, through the SDK's `responses.connect()`."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits
from openai.types.responses.responses_client_event import ResponseCreate
from websockets.exceptions import ConnectionClosed, InvalidStatus

from providers.inference.scripted import Scripted
from stack.serving.socket_connection import WebSocketServerConnection
from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import bare, chat_requests, create, messages, responses, stream
from tests.support.sdk.websockets import TERMINAL, talking
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import (
    DONE,
    LAST_HTTP_CHUNK,
    UpstreamServer,
    Wait,
    event,
    head,
    http_chunk,
    text_chunks,
)
from tests.support.waiting import until

SLOW = scripted([{"text": "one "}, {"wait_s": 30}, {"text": "two"}])
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=100, max_events=800, max_bytes_per_lane=2**20, max_bytes=2**23
)
KEYS: Any = [{"key": "sk-one", "tenant": "one"}, {"key": "sk-two", "tenant": "two"}]


def model(served: Served) -> Scripted:
    assert isinstance(served.stack.inference, Scripted)
    return served.stack.inference


async def calm(served: Served, count: int = 1) -> None:
    """Wait until so many generations were left early."""
    await until(lambda: model(served).abandoned_chats >= count, within_s=1)


# --- turns -----------------------------------------------------------------------------------------------------------


async def test_turns_follow_each_other_on_one_connection() -> None:
    async with serving() as served, talking(served) as talk:
        first = await talk.ask(input="one two")
        second = await talk.ask(input="three", previous_response_id=first.id)
        assert (first.output_text, second.output_text) == ("one two", "three")
        assert [each["content"] for each in messages(served)] == ["one two", "one two", "three"]
        assert bare(await responses(served).retrieve(second.id)) == bare(second)


async def test_its_events_are_those_of_an_http_stream() -> None:
    def like(events: list[Any]) -> list[Any]:
        return [(event.type, event.sequence_number, getattr(event, "delta", None)) for event in events]

    async with serving() as served, talking(served) as talk:
        await talk.ask(input="a b c")
        assert like(talk.events) == like(await stream(served, input="a b c"))


async def test_creates_that_come_at_once_are_answered_one_after_the_other() -> None:
    async with serving() as served, talking(served) as talk:
        for word in ("one", "two", "three"):
            await talk.send(input=word)
        texts = [(await talk.until(*TERMINAL)).response.output_text for _ in range(3)]
        assert texts == ["one", "two", "three"]
        ends = [number for number, event in enumerate(talk.events) if event.type in TERMINAL]
        for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            check_stream(talk.events[begin : end + 1])


@pytest.mark.parametrize("value", [True, False, None])
async def test_any_value_of_stream_is_tolerated(value: bool | None) -> None:
    async with serving() as served, talking(served) as talk:
        assert (await talk.ask(stream=value)).output_text == "hi"


async def test_obfuscation_is_had_for_the_asking() -> None:
    async with serving() as served, talking(served) as talk:
        await talk.ask(stream_options={"include_obfuscation": True})
        assert [hasattr(event, "obfuscation") for event in talk.events if event.type.endswith("text.delta")] == [True]


async def test_the_open_responses_dialect_is_spoken_too() -> None:
    script = scripted([{"reasoning": "hm"}, {"text": "yes"}])
    async with serving(script) as served, talking(served, x_responses_dialect="open-responses") as talk:
        await talk.send()
        await talk.until(*TERMINAL)
        names = [event.type for event in talk.events if "reasoning" in event.type and "part" not in event.type]
        assert names == ["response.reasoning.delta", "response.reasoning.done"]


async def test_a_failed_response_ends_its_stream_and_not_the_connection() -> None:
    async with serving(scripted([{"text": "so "}, {"fail": "died"}], [{"text": "again"}])) as served:
        async with talking(served) as talk:
            assert (await talk.ask()).status == "failed"
            assert (await talk.ask()).output_text == "again"
        assert not [event for event in talk.events if event.type == "error"]


# --- what is not stored ----------------------------------------------------------------------------------------------


async def test_what_is_not_stored_can_be_referred_to_on_its_connection_alone() -> None:
    async with serving() as served:
        async with talking(served) as talk:
            response = await talk.ask(store=False, input="one")
            reference: Any = [{"type": "item_reference", "id": response.output[0].id}]
            await talk.ask(store=False, input=[*reference, {"role": "user", "content": "two"}])
            assert [each["content"] for each in messages(served)] == ["one", "two"]
        async with talking(served) as talk:
            assert (await talk.refused(input=reference)).error.param == "input[0].id"


async def test_codex_warms_up_and_then_sends_only_what_is_new() -> None:
    script = scripted([{"call": "exec_command", "arguments": '{"cmd":"ls"}', "id": "call_1"}], [{"text": "done"}])
    tools: Any = [{"type": "function", "name": "exec_command", "parameters": {"type": "object"}, "strict": False}]
    common: Any = {"store": False, "stream": True, "tools": tools, "instructions": "Be brief.", "client_metadata": {}}
    async with (
        serving(script) as served,
        talking(served, OpenAI_Beta="responses_websockets=2026-02-06", session_id="s") as talk,
    ):
        warm = await talk.ask(**common, generate=False, input="the context")
        assert (warm.status, warm.output, warm.usage.total_tokens) == ("completed", [], 0)
        assert not chat_requests(served)
        called = await talk.ask(**common, previous_response_id=warm.id, input="list it")
        assert [item.type for item in called.output] == ["function_call"]
        output = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}
        done = await talk.ask(**common, previous_response_id=called.id, input=[output])
        assert done.output_text == "done"
        assert [each["role"] for each in messages(served)] == ["developer", "user", "user", "assistant", "tool"]
        for response in (warm, called, done):
            with pytest.raises(NotFoundError):
                await responses(served).retrieve(response.id)
        assert await served.stack.kv_store.scan("default/turn/") == []


async def test_a_stored_warm_up_can_be_followed_everywhere() -> None:
    async with serving() as served:
        async with talking(served) as talk:
            warm = await talk.ask(generate=False, input="the context")
        assert bare(await responses(served).retrieve(warm.id)) == bare(warm)
        await create(served, previous_response_id=warm.id, input="go on")
        assert [each["content"] for each in messages(served)] == ["the context", "go on"]


async def test_what_is_not_stored_is_known_to_its_own_connection_alone() -> None:
    async with serving() as served, talking(served) as one, talking(served) as other:
        response = await one.ask(store=False)
        error = await other.refused(store=False, previous_response_id=response.id)
        assert (error.status, error.error.code) == (400, "previous_response_not_found")
        assert error.error.param == "previous_response_id"
        assert (await one.ask(store=False, previous_response_id=response.id)).status == "completed"


async def test_an_unstored_response_can_follow_a_stored_one() -> None:
    async with serving() as served, talking(served) as talk:
        stored = await talk.ask(input="one")
        response = await talk.ask(input="two", store=False, previous_response_id=stored.id)
        await talk.ask(input="three", store=False, previous_response_id=response.id)
        assert [each["content"] for each in messages(served) if each["role"] == "user"] == ["one", "two", "three"]


async def test_a_stored_response_cannot_follow_one_that_is_not() -> None:
    async with serving() as served, talking(served) as talk:
        response = await talk.ask(store=False)
        error = await talk.refused(previous_response_id=response.id)
        assert (error.status, error.error.param) == (400, "store")


async def test_what_is_followed_gives_way_to_what_follows() -> None:
    async with serving() as served, talking(served) as talk:
        first = await talk.ask(store=False)
        await talk.ask(store=False, previous_response_id=first.id)
        error = await talk.refused(store=False, previous_response_id=first.id)
        assert error.error.code == "previous_response_not_found"


@pytest.mark.parametrize(
    "wrong", [{"temperature": 9}, {"model": "nobody"}, {"background": True}, {"generate": "no"}], ids=str
)
async def test_a_continuation_that_is_refused_forgets_what_it_follows(wrong: Any) -> None:
    async with serving() as served, talking(served) as talk:
        response = await talk.ask(store=False)
        assert (await talk.refused(store=False, previous_response_id=response.id, **wrong)).status in (400, 404)
        error = await talk.refused(store=False, previous_response_id=response.id)
        assert error.error.code == "previous_response_not_found"


async def test_a_continuation_that_fails_forgets_what_it_follows() -> None:
    script = scripted([{"text": "a"}], [{"text": "b"}, {"fail": "died"}])
    async with serving(script) as served, talking(served) as talk:
        response = await talk.ask(store=False)
        assert (await talk.ask(store=False, previous_response_id=response.id)).status == "failed"
        error = await talk.refused(store=False, previous_response_id=response.id)
        assert error.error.code == "previous_response_not_found"


async def test_a_fork_from_another_lane_leaves_its_predecessor_in_the_session() -> None:
    async with serving() as served, talking(served) as talk:
        response = await talk.ask(store=False)
        fork: Any = {"store": False, "previous_response_id": response.id, "stream_id": "fork"}
        await talk.refused(**fork, temperature=9)
        assert (await talk.ask(**fork)).status == "completed"
        assert (await talk.ask(store=False, previous_response_id=response.id)).status == "completed"


async def test_what_sessions_hold_is_bounded() -> None:
    async with serving(responses={"session_bytes": 3000}) as served, talking(served) as talk:
        old = await talk.ask(store=False)
        new = await talk.ask(store=False, input="x" * 100)
        assert (await talk.refused(store=False, previous_response_id=old.id)).status == 400
        assert (await talk.ask(store=False, previous_response_id=new.id)).status == "completed"


# --- lanes -----------------------------------------------------------------------------------------------------------


async def test_lanes_run_side_by_side_and_in_order_each() -> None:
    async with (
        serving(scripted([{"text": "one "}, {"wait_s": 0.3}, {"text": "two"}])) as served,
        talking(served) as talk,
    ):
        for lane in ("a", "b", "a", None):
            await talk.send(**({"stream_id": lane} if lane else {}))
        for _ in range(4):
            await talk.until(*TERMINAL)
        created = [getattr(event, "stream_id", None) for event in talk.events if event.type == "response.created"]
        assert created == ["a", "b", None, "a"]
        for lane, count in (("b", 1), (None, 1)):
            events = talk.of_lane(lane)
            assert sum(event.type in TERMINAL for event in events) == count
            check_stream(events)
        both = talk.of_lane("a")
        end = next(number for number, event in enumerate(both) if event.type in TERMINAL) + 1
        check_stream(both[:end])
        check_stream(both[end:])


async def test_the_sdks_own_lanes_work() -> None:
    async with (
        serving() as served,
        responses(served).connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes = [session.lane(name) for name in ("a", "b")]
        for number, lane in enumerate(lanes):
            await lane.send(ResponseCreate(type="response.create", model="scripted", input=f"to {number}"))
        texts = [(await lane.get_final_response()).output_text for lane in lanes]
        assert texts == ["to 0", "to 1"]


async def test_sixteen_run_at_a_time_and_the_others_wait() -> None:
    async with serving(SLOW) as served, talking(served) as talk:
        for number in range(20):
            await talk.send(stream_id=f"lane-{number}")
        for _ in range(16):
            await talk.until("response.output_text.delta")
        assert len(chat_requests(served)) == 16


async def test_there_are_32_lanes_and_the_default_one() -> None:
    async with serving() as served, talking(served) as talk:
        for number in range(32):
            await talk.ask(stream_id=f"lane-{number}")
        error = await talk.refused(stream_id="one-more")
        assert error.error.code == "websocket_stream_limit_reached"
        assert (await talk.ask()).status == "completed"
        assert (await talk.ask(stream_id="lane-0")).status == "completed"


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 257, 7])
async def test_a_lane_needs_a_proper_name(name: Any) -> None:
    async with serving() as served, talking(served) as talk:
        error = await talk.refused(stream_id=name)
        assert (error.error.code, getattr(error, "stream_id", None)) == ("invalid_stream_id", None)


async def test_an_error_names_its_lane() -> None:
    async with serving() as served, talking(served) as talk:
        error = await talk.refused(stream_id="a", temperature=9)
        assert (error.stream_id, error.error.param) == ("a", "temperature")


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_stops_all_that_runs() -> None:
    async with serving(SLOW) as served:
        async with talking(served) as talk:
            for lane in ("a", "b"):
                await talk.send(stream_id=lane)
                await talk.until("response.output_text.delta")
        await calm(served, 2)


async def test_a_connection_is_closed_when_it_is_too_old() -> None:
    async with serving(server={"max_websocket_age_s": 0.2}) as served, talking(served) as talk:
        await talk.ask()
        error = await talk.recv()
        assert (error.type, error.error.code) == ("error", "websocket_connection_limit_reached")
        with pytest.raises(ConnectionClosed):
            await talk.recv()


async def test_a_connection_that_is_too_old_ends_what_runs_and_begins_nothing() -> None:
    script = scripted([{"text": "one "}, {"wait_s": 0.4}, {"text": "two"}])
    async with serving(script, server={"max_websocket_age_s": 0.2}) as served, talking(served) as talk:
        await talk.send(stream_id="a")
        await talk.send(stream_id="a")
        refused = await talk.until("error")
        assert (refused.error.code, refused.stream_id) == ("websocket_connection_limit_reached", "a")
        assert (await talk.until(*TERMINAL)).response.output_text == "one two"
        assert (await talk.recv()).error.code == "websocket_connection_limit_reached"


async def test_a_drain_ends_what_runs_and_closes_with_service_restart() -> None:
    script = scripted([{"text": "one "}, {"wait_s": 0.3}, {"text": "two"}])
    async with serving(script) as served, talking(served) as talk, talking(served) as idle:
        await talk.send()
        await talk.until("response.output_text.delta")
        served.leaving.set()
        with pytest.raises(ConnectionClosed) as closed:
            await idle.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        assert (await talk.refused()).error.code == "overloaded"
        assert (await talk.until(*TERMINAL)).response.output_text == "one two"
        with pytest.raises(ConnectionClosed):
            await talk.recv()


# --- who may come in -------------------------------------------------------------------------------------------------


def stranger(served: Served, key: str) -> AsyncOpenAI:
    return sdk_client(served.url, key)


async def test_a_request_without_a_known_key_is_refused() -> None:
    async with serving(server={"api_keys": KEYS}) as served, stranger(served, "sk-three") as client:
        with pytest.raises(InvalidStatus) as refused:
            await client.responses.connect().enter()
        assert refused.value.response.status_code == 401
        assert b"invalid_api_key" in (refused.value.response.body or b"")


async def test_tenants_share_nothing() -> None:
    async with (
        serving(server={"api_keys": KEYS}) as served,
        stranger(served, "sk-two") as client,
        talking(served) as one,
        talking(served, client) as two,
    ):
        response = await one.ask()
        error = await two.refused(previous_response_id=response.id)
        assert error.error.code == "previous_response_not_found"


# --- conversations ---------------------------------------------------------------------------------------------------


async def test_turns_of_a_conversation_can_be_made_here() -> None:
    async with serving() as served, talking(served) as talk:
        conversation = await served.client.conversations.create()
        await talk.ask(conversation=conversation.id, generate=False, input="one")
        await talk.ask(conversation=conversation.id, input="two")
        await talk.ask(conversation=conversation.id, input="three")
        assert [each["content"] for each in messages(served) if each["role"] == "user"] == ["one", "two", "three"]


# --- the road of tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [False, True], ids=["a client that reads", "a client that pauses"])
async def test_a_servers_words_are_written_as_they_arrive(*, monkeypatch: pytest.MonkeyPatch, is_paused: bool) -> None:
    """Each is written in the callback of the upstream's socket, without the ASGI layers, while the client keeps up."""
    words = [f"{'x' * 20_000 if is_paused else 'w'}{number} " for number in range(300)]
    may_go_on = [asyncio.Event() for _ in words]
    chunks = [http_chunk(event(chunk)) for chunk in text_chunks(*words)]
    pairs = zip(may_go_on, chunks[1:], strict=False)
    answer: list[Any] = [head(), chunks[0], *(act for ready, chunk in pairs for act in (Wait(ready), chunk))]
    answer += [*chunks[1 + len(words) :], http_chunk(DONE), LAST_HTTP_CHUNK]
    sends: list[str] = []
    send = WebSocketServerConnection.send

    async def count_and_send(self: WebSocketServerConnection, message: Any) -> None:
        sends.append(message["type"])
        await send(self, message)

    monkeypatch.setattr(WebSocketServerConnection, "send", count_and_send)
    async with UpstreamServer(answer) as upstream:
        inference = {"provider": "vllm", "base_url": upstream.base_url, "models_cache_s": 0}
        async with serving(inference) as served, talking(served) as talk:
            await talk.send(model="fake-model")
            for ready in may_go_on:
                ready.set()
                if not is_paused:  # the word has arrived before the next one is sent
                    await talk.until("response.output_text.delta")
            if is_paused:
                await asyncio.sleep(0.3)
            last = await talk.until(*TERMINAL)
            check_stream(talk.events)
            assert last.response.output_text == "".join(words)
    if not is_paused:
        assert sends.count("websocket.send") < 30
