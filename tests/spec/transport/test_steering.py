"""`response.steer` on the WebSocket of the Responses API, through the SDK's connection."""

import asyncio
from typing import Any

import pytest
from openai import NotFoundError

from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import bare, chat_requests, messages, responses
from tests.support.sdk.websockets import TERMINAL, Talk, talking
from tests.support.servers.serving import scripted, serving

SEARCH: dict[str, Any] = {"call": "web_search", "arguments": '{"query": "cats"}'}
SEARCHES: list[dict[str, Any]] = [{"type": "web_search"}]
LOOK: list[dict[str, Any]] = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
RUNTIME: dict[str, Any] = {"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0}
TURNS = scripted([{"text": "a"}, {"wait_s": 0.6}, SEARCH], [{"text": "as you wish"}], [{"text": "more"}])


async def steer(talk: Talk, response_id: str, value: Any = "dogs") -> None:
    await talk.connection.response.steer(previous_response_id=response_id, input=value)


async def begun(talk: Talk, **fields: Any) -> Any:
    """A response whose model has said something."""
    await talk.send(**fields)
    created = await talk.until("response.created")
    await talk.until("response.output_text.delta")
    return created.response


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_ends_between_two_turns_and_another_one_follows_it_by_itself(store: bool) -> None:
    async with serving(TURNS, tool_runtime=RUNTIME) as served, talking(served) as talk:
        fields: dict[str, Any] = {"tools": SEARCHES, "store": store, "instructions": "Be brief.", "stream_id": "a"}
        first = await begun(talk, **fields)
        await steer(talk, first.id)
        await steer(talk, first.id, [{"type": "message", "role": "user", "content": "and birds"}])
        accepted = [await talk.until("response.steer.accepted") for _ in range(2)]
        assert {event.steer.previous_response_id for event in accepted} == {first.id}
        assert len({event.steer.id for event in accepted}) == 2
        steered = (await talk.until(*TERMINAL)).response
        assert (steered.status, steered.incomplete_details.reason) == ("incomplete", "steered")
        assert [item.type for item in steered.output] == ["message", "web_search_call"]
        begin = len(talk.events)
        successor = (await talk.until(*TERMINAL)).response
        check_stream([event.model_copy(update={"stream_id": None}) for event in talk.events[begin:]])
        assert (successor.output_text, successor.previous_response_id) == ("as you wish", first.id)
        assert (successor.tools, successor.instructions) == (steered.tools, "Be brief.")
        assert {event.stream_id for event in talk.events} == {"a"}
        numbers = [event.sequence_number for event in talk.events[:begin]]
        assert numbers == [*range(begin)]
        read = [each["content"] for each in messages(served) if each["role"] == "user"]
        assert read == ["hi", "dogs", "and birds"]
        third = await create_after(talk, successor.id, fields)
        assert [each["content"] for each in messages(served) if each["role"] == "user"] == [*read, "hi"]
        if store:
            assert bare(await responses(served).retrieve(successor.id)) == bare(successor)
            items = await responses(served).input_items.list(successor.id, order="asc")
            assert [item.content[0].text for item in items.data] == ["dogs", "and birds"]
        assert third.status == "completed"
        assert await served.stack.kv_store.scan("default/mailbox/") == []


async def create_after(talk: Talk, response_id: str, fields: dict[str, Any]) -> Any:
    await talk.send(previous_response_id=response_id, **fields)
    return (await talk.until(*TERMINAL)).response


async def test_input_that_comes_in_the_last_turn_leaves_it_whole() -> None:
    model = scripted([{"text": "a "}, {"wait_s": 0.6}, {"text": "b"}], [{"text": "c"}])
    async with serving(model) as served, talking(served) as talk:
        first = await begun(talk)
        await steer(talk, first.id)
        await talk.until("response.steer.accepted")
        completed = (await talk.until(*TERMINAL)).response
        assert (completed.status, completed.output_text) == ("completed", "a b")
        successor = (await talk.until(*TERMINAL)).response
        assert (successor.output_text, successor.previous_response_id) == ("c", first.id)


async def test_input_waits_for_what_the_client_owes() -> None:
    model = scripted(
        [{"text": "a"}, {"wait_s": 0.6}, {"call": "look", "arguments": "{}"}], [{"text": "b"}], [{"text": "c"}]
    )
    for store in (True, False):
        async with serving(model) as served, talking(served) as talk:
            first = await begun(talk, tools=LOOK, store=store)
            await steer(talk, first.id)
            await steer(talk, first.id, "and birds")
            accepted = [await talk.until("response.steer.accepted") for _ in range(2)]
            ended = (await talk.until(*TERMINAL)).response
            pending = [await talk.recv() for _ in range(2)]
            assert [(event.type, event.steer.id) for event in pending] == [
                ("response.steer.pending", event.steer.id) for event in accepted
            ]
            assert pending[0].reason == "waiting_for_required_input"
            call_id = ended.output[-1].call_id
            stub = {"type": "function_call_output", "call_id": call_id, "name": "look"}
            assert [item.model_dump() for item in pending[0].required_input] == [stub]
            assert [event.sequence_number for event in talk.events] == [*range(len(talk.events))]
            await steer(talk, first.id)
            failed = await talk.recv()
            assert (failed.type, failed.error.code) == ("response.steer.failed", "response_already_completed")
            output = {"type": "function_call_output", "call_id": call_id, "output": "cats"}
            await talk.send(input=[output], previous_response_id=first.id, tools=LOOK, store=store)
            assert (await talk.until(*TERMINAL)).response.output_text == "b"
            read = [(each["role"], each["content"]) for each in messages(served) if each["role"] in ("user", "tool")]
            assert read == [("user", "hi"), ("tool", "cats"), ("user", "dogs"), ("user", "and birds")]
            assert await served.stack.kv_store.scan("default/mailbox/") == []


async def test_the_output_of_an_async_function_is_read_by_the_response_that_follows() -> None:
    model = scripted(
        [{"call": "look", "arguments": "{}"}], [{"text": "a "}, {"wait_s": 0.6}, {"text": "b"}], [{"text": "c"}]
    )
    async with serving(model) as served, talking(served) as talk:
        await talk.send(tools=[{**LOOK[0], "async": True}])
        first = (await talk.until("response.created")).response
        call = (await talk.until("response.output_item.done")).item
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "cats"}
        await talk.until("response.output_text.delta")
        await steer(talk, first.id, [output])
        await talk.until("response.steer.accepted")
        assert (await talk.until(*TERMINAL)).response.output_text == "a b"
        assert (await talk.until(*TERMINAL)).response.output_text == "c"
        assert "cats" in str(messages(served)[-1])


COMPACTION: dict[str, Any] = {"context_management": [{"type": "compaction", "compact_threshold": 100_000}]}
REFUSED: dict[str, tuple[Any, str]] = {
    "a system message": ([{"role": "system", "content": "x"}], "invalid_input"),
    "nothing": ([], "invalid_input"),
    "a number": (5, "invalid_input"),
    "another item": ([{"type": "item_reference", "id": "msg_1"}], "invalid_input"),
    "a wrong image": ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "invalid_input"),
}


async def test_input_that_is_refused_comes_back_and_the_response_goes_on() -> None:
    model = scripted([{"text": "a "}, {"wait_s": 1}, {"text": "b"}])
    async with serving(model) as served, talking(served) as talk:
        first = await begun(talk)
        for name, (value, code) in REFUSED.items():
            await talk.connection.send({"type": "response.steer", "previous_response_id": first.id, "input": value})
            failed = await talk.until("response.steer.failed")
            assert (failed.error.code, failed.error.type) == (code, "invalid_request_error"), name
            fields = failed.steer.model_dump(warnings=False, exclude_unset=True)
            assert fields == {"input": value, "previous_response_id": first.id}, name
        await talk.connection.send({"type": "response.steer", "input": "x", "model": "scripted"})
        assert (await talk.until("response.steer.failed")).error.code == "invalid_input"
        await steer(talk, "resp_unknown")
        assert (await talk.until("response.steer.failed")).error.code == "response_not_found"
        assert (await talk.until(*TERMINAL)).response.output_text == "a b"
        assert len(chat_requests(served)) == 1


async def test_at_most_sixteen_inputs_wait() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 1}], [{"text": "b"}])) as served, talking(served) as talk:
        first = await begun(talk)
        for number in range(17):
            await steer(talk, first.id, str(number))
        answers = [await talk.recv() for _ in range(17)]
        assert [event.type for event in answers] == ["response.steer.accepted"] * 16 + ["response.steer.failed"]
        assert answers[-1].error.code == "too_many_pending_steers"
        assert (await talk.until(*TERMINAL)).response.status == "completed"
        assert (await talk.until(*TERMINAL)).response.output_text == "b"
        read = [each["content"] for each in messages(served) if each["role"] == "user"]
        assert read == ["hi", *map(str, range(16))]


async def test_some_responses_take_no_input() -> None:
    model = scripted([{"text": "a "}, {"wait_s": 0.6}, {"text": "b"}])
    async with serving(model) as served:
        conversation = await served.client.conversations.create()
        for fields in ({"conversation": conversation.id}, COMPACTION):
            async with talking(served) as talk:
                first = await begun(talk, **fields)
                await steer(talk, first.id)
                failed = await talk.until("response.steer.failed")
                assert failed.error.code == "steering_not_supported"
                assert (await talk.until(*TERMINAL)).response.status == "completed"


async def test_input_comes_back_when_the_response_fails() -> None:
    model = scripted([{"text": "a"}, {"wait_s": 0.6}, {"fail": "no more"}])
    async with serving(model) as served, talking(served) as talk:
        first = await begun(talk)
        await steer(talk, first.id)
        accepted = await talk.until("response.steer.accepted")
        assert (await talk.until(*TERMINAL)).response.status == "failed"
        failed = await talk.recv()
        assert (failed.type, failed.steer.id) == ("response.steer.failed", accepted.steer.id)
        assert (failed.error.code, failed.steer.input) == ("response_not_active", "dogs")
        assert [event.sequence_number for event in talk.events] == [*range(len(talk.events))]
        assert await served.stack.kv_store.scan("default/mailbox/") == []


async def test_any_response_of_the_tenant_can_be_steered_from_a_connection() -> None:
    keys: Any = [{"key": "sk-one", "tenant": "one"}, {"key": "sk-two", "tenant": "two"}]
    model = scripted([{"text": "a"}, {"wait_s": 0.5}, SEARCH], [{"text": "b"}])
    async with (
        serving(model, server={"api_keys": keys}, tool_runtime=RUNTIME) as served,
        sdk_client(served.url, "sk-one") as one,
        sdk_client(served.url, "sk-two") as two,
        talking(served, one) as talk,
        talking(served, two) as stranger,
    ):
        kinds: tuple[dict[str, Any], ...] = ({"background": True}, {"stream": True})
        for fields in kinds:
            response_id, _connection = await begin(one, tools=SEARCHES, **fields)
            await steer(stranger, response_id)
            failed = await stranger.recv()
            assert (failed.type, failed.error.code) == ("response.steer.failed", "response_not_found")
            await steer(talk, response_id)
            accepted = await talk.recv()
            assert (accepted.type, accepted.sequence_number) == ("response.steer.accepted", 0)
            ended = await until_ended(one, response_id)
            assert ended.incomplete_details.reason == "steered"
            successor = await until_ended(one, f"resp_{accepted.steer.id[6:50]}")
            assert (successor.output_text, successor.previous_response_id) == ("b", response_id)
            assert successor.background is True


async def begin(client: Any, **fields: Any) -> tuple[str, Any]:
    """The id of a response, as soon as there is one; and the connection that it may need."""
    created = await client.responses.create(model="scripted", input="hi", **fields)
    return (created.id if fields.get("background") else (await anext(aiter(created))).response.id), created


async def until_ended(client: Any, response_id: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            try:
                response = await client.responses.retrieve(response_id)
            except NotFoundError:
                response = None
            if response is not None and response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.02)
