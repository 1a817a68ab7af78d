"""Responses that are turns of a conversation: what they follow and add, one at a time, however they end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import ConflictError, InternalServerError, NotFoundError

from apis.storage.kv_store import Delete
from tests.support.counting_store import CountingSQLite
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.conversations import conversations, keys_of, locked, texts, user
from tests.support.sdk.requests import create, messages, refusal, responses, stream
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until, until_empty

Json = dict[str, Any]
SLOW = scripted([{"text": "one "}, {"wait_s": 30}, {"text": "two"}], [{"text": "later"}])


def said(served: Served) -> list[Any]:
    return [(message["role"], message.get("content")) for message in messages(served)]


async def until_text(events: Any) -> None:
    async for event in events:
        if event.type == "response.output_text.delta":
            return


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_follows_the_conversation_and_is_added_to_it(streamed: bool) -> None:
    async with serving(scripted([{"text": "A1"}], [{"text": "A2"}])) as served:
        conversation = await conversations(served).create(items=[user("Q0")])
        for number in (1, 2):
            fields: Json = {
                "input": f"Q{number}",
                "conversation": {"id": conversation.id} if number == 1 else conversation.id,
            }
            response = (await stream(served, **fields))[-1].response if streamed else await create(served, **fields)
            assert response.conversation.id == conversation.id
            assert (await responses(served).retrieve(response.id)).model_dump() == response.model_dump()
        assert said(served) == [("user", "Q0"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]
        assert await texts(served, conversation.id) == ["Q0", "Q1", "A1", "Q2", "A2"]
        assert (await conversations(served).items.list(conversation.id, limit=1)).data[0].id == response.output[0].id
        assert (await responses(served).input_items.list(response.id)).data[0].content[0].text == "Q2"


async def test_a_turn_reads_only_the_items_that_came_since_the_last_one(tmp_path: Path) -> None:
    """Also those that another process has added."""
    store = {"provider": "tests.support.counting_store:CountingSQLite", "path": str(tmp_path / "store.db")}
    async with serving(kv_store=store) as served, serving(kv_store=store) as other:
        conversation = await conversations(served).create()
        rows: list[int] = []
        for number in range(12):
            before = CountingSQLite.rows["default"]
            await create(served, input=f"Q{number}", conversation=conversation.id)
            rows.append(CountingSQLite.rows["default"] - before)
        assert rows[-1] == rows[1]
        await conversations(other).items.create(conversation.id, items=[user("from elsewhere")])
        await create(served, input="last", conversation=conversation.id)
        assert [text for _, text in said(served)][-3:] == ["Q11", "from elsewhere", "last"]
        assert len(said(served)) == 2 * 12 + 2


async def test_a_turn_does_not_follow_an_item_that_another_process_has_deleted(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(kv_store=store) as served, serving(kv_store=store) as other:
        conversation = await conversations(served).create(items=[user("first"), user("second")])
        await create(served, input="third", conversation=conversation.id)
        items = (await conversations(other).items.list(conversation.id, order="asc")).data
        await conversations(other).items.delete(items[0].id, conversation_id=conversation.id)
        await create(served, input="fourth", conversation=conversation.id)
        assert [text for role, text in said(served) if role == "user"] == ["second", "third", "fourth"]


async def test_calls_and_their_outputs_go_on_in_the_conversation() -> None:
    async with serving(scripted([{"reasoning": "hm"}, call("get", "{}")], [{"text": "Done."}])) as served:
        conversation = await conversations(served).create()
        await create(served, input="Q", conversation=conversation.id)
        error = await refusal(served, input="and?", conversation=conversation.id)
        assert "No tool output found" in error["message"]
        output: Json = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
        response = await create(served, input=[output], conversation=conversation.id)
        assert response.output_text == "Done."
        kinds = [item.type async for item in conversations(served).items.list(conversation.id, order="asc")]
        assert kinds == ["message", "reasoning", "function_call", "function_call_output", "message"]


async def test_a_conversation_can_be_answered_without_input() -> None:
    async with serving() as served:
        conversation = await conversations(served).create(items=[user("hello")])
        response = await responses(served).create(model="scripted", conversation=conversation.id)
        assert response.output_text == "hello"
        assert await texts(served, conversation.id) == ["hello", "hello"]


async def test_a_background_response_is_added_when_it_ends() -> None:
    async with serving(scripted([{"text": "A1"}, {"wait_s": 0.2}, {"text": "!"}], [{"text": "A2"}])) as served:
        conversation = await conversations(served).create()
        events = await stream(served, input="Q1", conversation=conversation.id, background=True)
        assert {event.response.conversation.id for event in (events[0], events[-1])} == {conversation.id}
        await create(served, input="Q2", conversation=conversation.id)
        assert await texts(served, conversation.id) == ["Q1", "A1!", "Q2", "A2"]
        assert not await locked(served)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_background_response_without_readers_is_added_when_it_ends(streamed: bool) -> None:
    async with serving(scripted([{"text": "A1"}, {"wait_s": 0.2}, {"text": "!"}], [{"text": "A2"}])) as served:
        conversation = await conversations(served).create()
        if streamed:
            async with await create(
                served, input="Q1", conversation=conversation.id, background=True, stream=True
            ) as events:
                response_id = (await anext(aiter(events))).response.id
        else:
            response_id = (await create(served, input="Q1", conversation=conversation.id, background=True)).id
        assert await locked(served)
        response = [event async for event in await responses(served).retrieve(response_id, stream=True)][-1].response
        assert (response.status, response.output_text) == ("completed", "A1!")
        await create(served, input="Q2", conversation=conversation.id)
        assert await texts(served, conversation.id) == ["Q1", "A1!", "Q2", "A2"]
        assert not await locked(served)


async def test_a_queued_background_response_is_added_by_the_worker_that_makes_it(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "responses.db")}
    busy: Json = {"background": {"max_running": 1}}
    async with serving(SLOW, kv_store=store, responses=busy) as served:
        conversation = await conversations(served).create()
        running = await create(served, input="Q0", background=True)
        waiting = await create(served, input="Q1", conversation=conversation.id, background=True)
        assert (await responses(served).retrieve(waiting.id)).status == "queued"
        async with serving(scripted([{"text": "A1"}]), kv_store=store) as other:
            events = await responses(other).retrieve(waiting.id, stream=True)
            assert [event async for event in events][-1].response.status == "completed"
            assert await texts(other, conversation.id) == ["Q1", "A1"]
        await responses(served).cancel(running.id)


async def test_a_response_that_is_not_stored_adds_nothing() -> None:
    async with serving(scripted([{"text": "A"}])) as served:
        conversation = await conversations(served).create(items=[user("Q0")])
        await create(served, input="Q1", conversation=conversation.id, store=False)
        assert said(served) == [("user", "Q0"), ("user", "Q1")]
        assert await texts(served, conversation.id) == ["Q0"]


async def test_a_response_that_fails_adds_nothing_and_can_be_asked_for_again() -> None:
    async with serving(scripted([{"text": "a"}, {"fail": "The model is gone."}], [{"text": "b"}])) as served:
        conversation = await conversations(served).create()
        with pytest.raises(InternalServerError, match="gone"):
            await create(served, input="Q", conversation=conversation.id)
        assert await texts(served, conversation.id) == []
        await create(served, input="Q", conversation=conversation.id)
        assert await texts(served, conversation.id) == ["Q", "b"]


async def test_a_failed_stream_leaves_the_conversation_free_as_soon_as_it_says_so() -> None:
    async with serving(scripted([{"text": "a"}, {"fail": "The model is gone."}], [{"text": "b"}])) as served:
        conversation = await conversations(served).create()
        async for event in await create(served, input="Q", conversation=conversation.id, stream=True):
            if event.type == "response.failed":
                await create(served, input="Q", conversation=conversation.id)
        assert await texts(served, conversation.id) == ["Q", "b"]


@pytest.mark.parametrize("background", [False, True])
async def test_an_unknown_model_leaves_the_conversation_free(background: bool) -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        if background:
            events = await stream(served, model="none", conversation=conversation.id, background=True)
            assert events[-1].type == "response.failed"
        else:
            await refusal(served, 404, model="none", conversation=conversation.id)
        assert not await locked(served)
        await create(served, conversation=conversation.id)


async def test_what_ended_incomplete_is_added() -> None:
    async with serving(scripted([{"text": "A"}, {"finish": "length"}])) as served:
        conversation = await conversations(served).create()
        response = await create(served, input="Q", conversation=conversation.id)
        assert response.status == "incomplete"
        assert await texts(served, conversation.id) == ["Q", "A"]


async def test_tokens_are_counted_with_the_conversation_and_without_its_turn() -> None:
    async with serving(SLOW) as served:
        conversation = await conversations(served).create(items=[user("one two three")])
        bare_count = (await responses(served).input_tokens.count(model="scripted", input="x")).input_tokens
        async with await create(served, conversation=conversation.id, stream=True) as events:
            await until_text(events)
            count = await responses(served).input_tokens.count(
                model="scripted", input="x", conversation=conversation.id
            )
        assert count.input_tokens > bare_count


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "responses.db")}
    async with serving(scripted([{"text": "A1"}]), kv_store=store) as served:
        conversation = await conversations(served).create(metadata={"a": "b"})
        await create(served, input="Q1", conversation=conversation.id)
    async with serving(kv_store=store) as served:
        assert await conversations(served).retrieve(conversation.id) == conversation
        await create(served, input="Q2", conversation=conversation.id)
        assert said(served) == [("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]


async def test_deleting_a_response_leaves_its_items_in_the_conversation() -> None:
    async with serving(scripted([{"text": "A1"}])) as served:
        conversation = await conversations(served).create()
        response = await create(served, input="Q1", conversation=conversation.id)
        await responses(served).delete(response.id)
        assert await texts(served, conversation.id) == ["Q1", "A1"]


async def test_a_turn_of_a_conversation_is_not_followed_by_its_response() -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        response = await create(served, conversation=conversation.id)
        error = await refusal(served, previous_response_id=response.id)
        assert (error["param"], error["code"]) == ("previous_response_id", "invalid_value")
        assert conversation.id in error["message"]


@pytest.mark.parametrize("background", [False, True])
async def test_a_conversation_that_is_being_answered_is_locked(background: bool) -> None:
    async with serving(SLOW) as served:
        conversation = await conversations(served).create(items=[user("Q0", id="msg_0")])
        running = await create(served, conversation=conversation.id, stream=True, background=background)
        await until_text(running)
        items = conversations(served).items
        for ask in (
            create(served, conversation=conversation.id),
            create(served, conversation=conversation.id, stream=True),
            create(served, conversation=conversation.id, background=True),
            items.create(conversation.id, items=[user("x")]),
            items.delete("msg_0", conversation_id=conversation.id),
        ):
            with pytest.raises(ConflictError) as caught:
                await ask
            assert (caught.value.code, caught.value.param) == ("conversation_locked", "conversation")
            assert caught.value.response.headers["retry-after"] == "1"
        assert (await conversations(served).update(conversation.id, metadata={"a": "b"})).metadata == {"a": "b"}
        assert await texts(served, conversation.id) == ["Q0"]
        await running.close()


async def test_the_sdk_waits_for_the_turn_by_itself() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}], [{"text": "c"}])) as served:
        conversation = await conversations(served).create()
        patient = served.client.with_options(max_retries=2)
        running = await create(served, input="Q1", conversation=conversation.id, stream=True)
        await until_text(running)
        asking = asyncio.create_task(
            patient.responses.create(model="scripted", input="Q2", conversation=conversation.id)
        )
        async for _ in running:
            pass
        assert (await asking).output_text == "c"
        assert await texts(served, conversation.id) == ["Q1", "ab", "Q2", "c"]


async def test_of_many_at_once_each_is_whole_or_refused() -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        asked_for = [create(served, input=f"Q{n}", conversation=conversation.id) for n in range(20)]
        outcomes = await asyncio.gather(*asked_for, return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, BaseException)]
        assert {type(each) for each in refused} <= {ConflictError}
        item_texts = await texts(served, conversation.id)
        assert len(item_texts) == 2 * (20 - len(refused)) > 0
        assert item_texts[::2] == item_texts[1::2]  # the scripted model echoes: each answer is next to its question


async def test_items_added_at_once_are_all_there_and_each_request_together() -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        batches = [[user(f"{n}a"), user(f"{n}b")] for n in range(20)]
        await asyncio.gather(*(conversations(served).items.create(conversation.id, items=batch) for batch in batches))
        item_texts = await texts(served, conversation.id, limit=100)
        assert sorted(item_texts[::2]) == sorted(f"{n}a" for n in range(20))
        assert [each[:-1] for each in item_texts[::2]] == [each[:-1] for each in item_texts[1::2]]


async def test_a_client_that_leaves_leaves_the_conversation_free_and_as_it_was() -> None:
    async with serving(SLOW) as served:
        conversation = await conversations(served).create()
        async with await create(served, conversation=conversation.id, stream=True) as events:
            await until_text(events)
        await until_empty(lambda: locked(served))
        assert await texts(served, conversation.id) == []
        assert (await create(served, input="Q", conversation=conversation.id)).output_text == "later"


async def test_a_cancelled_background_response_leaves_the_conversation_free_and_as_it_was() -> None:
    async with serving(SLOW) as served:
        conversation = await conversations(served).create()
        queued = await create(served, input="Q", conversation=conversation.id, background=True)
        await until_text(await responses(served).retrieve(queued.id, stream=True))
        cancelled = await responses(served).cancel(queued.id)
        assert (cancelled.status, cancelled.conversation.id) == ("cancelled", conversation.id)
        assert await texts(served, conversation.id) == []
        assert (await create(served, input="Q", conversation=conversation.id)).output_text == "later"


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_whose_conversation_is_deleted_fails_and_says_why(background: bool) -> None:
    """It was a 500 without a param, which SDKs repeat."""
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}])) as served:
        conversation = await conversations(served).create(items=[user("x")])
        running = await create(served, input="Q", conversation=conversation.id, stream=True, background=background)
        await until_text(running)
        await conversations(served).delete(conversation.id)
        last = [event async for event in running][-1]
        assert last.type == "response.failed"
        assert (last.response.error.code, "was deleted" in last.response.error.message) == ("invalid_prompt", True)
        assert await keys_of(served) == []
        assert (await responses(served).retrieve(last.response.id)).status == "failed"


async def test_without_a_stream_a_conversation_deleted_during_its_turn_is_not_found() -> None:
    """The error names the conversation and is not repeated by SDKs."""
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}])) as served:
        conversation = await conversations(served).create(items=[user("x")])
        running = asyncio.create_task(create(served, input="Q", conversation=conversation.id))
        await until(lambda: locked(served))
        await conversations(served).delete(conversation.id)
        with pytest.raises(NotFoundError) as caught:
            await running
        assert (caught.value.param, caught.value.code) == ("conversation", "conversation_deleted")


async def test_a_response_that_lost_its_turn_adds_nothing() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}], [{"text": "c"}])) as served:
        conversation = await conversations(served).create()
        running = await create(served, input="Q1", conversation=conversation.id, stream=True)
        await until_text(running)
        # as after a pause that was longer than the turn's lease
        await served.stack.kv_store.write([Delete(f"default/conversation_floor/{conversation.id}")])
        await create(served, input="Q2", conversation=conversation.id)
        assert [event async for event in running][-1].type == "response.failed"
        assert await texts(served, conversation.id) == ["Q2", "c"]


async def test_over_a_websocket_turns_are_added_and_other_lanes_wait_for_theirs() -> None:
    script = scripted([{"text": "A1"}], [{"text": "a"}, {"wait_s": 0.2}, {"text": "b"}], [{"text": "A3"}])
    async with serving(script) as served, talking(served) as talk:
        conversation = await conversations(served).create(items=[user("Q0")])
        warm = await talk.ask(input="Q1", conversation=conversation.id, generate=False)
        assert (
            (await talk.ask(input="Q2", conversation=conversation.id)).conversation.id
            == conversation.id
            == warm.conversation.id
        )
        await talk.send(input="Q3", conversation=conversation.id, stream_id="a")
        await talk.until("response.output_text.delta")
        await talk.send(input="Q4", conversation=conversation.id, stream_id="b")
        refused = await talk.until("error")
        assert (refused.error.code, refused.stream_id, refused.status) == ("conversation_locked", "b", 409)
        await talk.until("response.completed")
        await talk.ask(input="Q5", conversation=conversation.id, stream_id="b")
        assert await texts(served, conversation.id) == ["Q0", "Q1", "Q2", "A1", "Q3", "ab", "Q5", "A3"]
        assert not await locked(served)


async def test_a_websocket_that_closes_leaves_the_conversation_free_and_as_it_was() -> None:
    async with serving(SLOW) as served:
        conversation = await conversations(served).create()
        async with talking(served) as talk:
            await talk.send(input="Q", conversation=conversation.id)
            await talk.until("response.output_text.delta")
        await until_empty(lambda: locked(served))
        assert await texts(served, conversation.id) == []
