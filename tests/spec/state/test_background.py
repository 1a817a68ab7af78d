"""Background responses through the SDK: polled, streamed, resumed, cancelled, deleted."""

import asyncio
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, RateLimitError

from providers.inference.scripted import Scripted
from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.requests import bare, create, responses, stream
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until, until_ended

SLOW = scripted([{"text": ["one ", "two "]}, {"wait_s": 30}, {"text": "three"}])
SOON = {"background": {"poll_s": 0.05, "lease_s": 1}}


async def begin(served: Served, **fields: Any) -> Any:
    return await create(served, background=True, **fields)


async def replay(served: Served, response_id: str, **fields: Any) -> list[Any]:
    async with asyncio.timeout(10):
        return [event async for event in await responses(served).retrieve(response_id, stream=True, **fields)]


async def until_text(served: Served, response_id: str, word: str) -> list[Any]:
    """The events up to the one whose delta is `word`."""
    events: list[Any] = []
    async with asyncio.timeout(10), await responses(served).retrieve(response_id, stream=True) as response:
        async for event in response:
            events.append(event)
            if getattr(event, "delta", None) == word:
                break
    return events


async def test_a_background_response_is_queued_and_then_completed() -> None:
    async with serving() as served:
        queued = await begin(served, input="hello there", metadata={"a": "b"})
        assert (queued.status, queued.background, queued.output, queued.metadata) == ("queued", True, [], {"a": "b"})
        response = await until_ended(responses(served), queued.id)
        assert (response.status, response.background, response.output_text) == ("completed", True, "hello there")
        assert response.usage.output_tokens == 2
        assert response.created_at == queued.created_at


async def test_a_background_stream_is_lawful_and_begins_with_queued() -> None:
    async with serving() as served:
        events = await stream(served, background=True, input="a b c")
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert events[-1].response.output_text == "a b c"
    check_stream(events)


async def test_the_stream_can_be_read_again_from_any_event() -> None:
    async with serving() as served:
        events = [bare(event) for event in await stream(served, background=True, input="a b c")]
        identity = events[0]["response"]["id"]
        assert [bare(event) for event in await replay(served, identity)] == events
        for after in range(len(events)):
            assert [bare(event) for event in await replay(served, identity, starting_after=after)] == events[
                after + 1 :
            ]
        assert bare(await responses(served).retrieve(identity)) == events[-1]["response"]


async def test_a_stream_can_be_joined_while_it_runs_by_many() -> None:
    async with serving(scripted([{"text": ["a"] * 20}, {"wait_s": 0.2}, {"text": ["b"] * 20}])) as served:
        queued = await begin(served)
        received_events = await asyncio.gather(*(replay(served, queued.id) for _ in range(5)))
    assert all(each == received_events[0] for each in received_events)
    check_stream(received_events[0])


async def test_a_client_that_leaves_its_background_stream_stops_nothing() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}])) as served:
        async with await create(served, background=True, stream=True) as response:
            async for event in response:
                if event.type == "response.output_text.delta":
                    break
        rest = await replay(served, (await begin(served)).id)
        identity = (await served.stack.kv_store.scan("default/event/"))[0][0].split("/")[2]
        assert (await until_ended(responses(served), identity)).output_text == "ab"
        assert rest[-1].response.output_text == "ab"


async def test_the_sdks_own_accumulator_resumes_it() -> None:
    async with serving() as served:
        queued = await begin(served, input="x y z")
        async with served.client.responses.stream(response_id=queued.id, starting_after=2) as accumulating:
            final = await accumulating.get_final_response()
        assert final.output_text == "x y z"


async def test_a_running_response_is_shown_as_in_progress_with_its_input() -> None:
    async with serving(SLOW) as served:
        queued = await begin(served, input="what")
        await until_text(served, queued.id, "two ")
        response = await responses(served).retrieve(queued.id)
        assert (response.status, response.output) == ("in_progress", [])
        [item] = (await responses(served).input_items.list(queued.id)).data
        assert item.content[0].text == "what"
        await responses(served).cancel(queued.id)
        [same] = (await responses(served).input_items.list(queued.id)).data
        assert same == item


async def test_a_cancelled_response_stops_its_model_and_stays_cancelled() -> None:
    async with serving(SLOW) as served:
        model = served.stack.inference
        assert isinstance(model, Scripted)
        queued = await begin(served)
        reading = asyncio.create_task(replay(served, queued.id))
        await until_text(served, queued.id, "two ")
        response = await responses(served).cancel(queued.id)
        assert (response.status, response.output_text, response.output[0].status) == (
            "cancelled",
            "one two ",
            "incomplete",
        )
        assert response.usage.output_tokens == 2
        await until(lambda: model.abandoned_chats, within_s=2)
        events = await reading
        check_stream(events, whole=False)
        assert events[-1].type == "response.output_item.done"
        assert bare(await responses(served).cancel(queued.id)) == bare(response)
        assert bare(await responses(served).retrieve(queued.id)) == bare(response)


async def test_the_output_of_a_cancelled_response_is_counted_by_its_text_where_tokens_came_together() -> None:
    text = "One. " * 80
    async with serving(scripted([{"text": [text]}, {"wait_s": 30}])) as served:
        queued = await begin(served)
        await until_text(served, queued.id, text)
        response = await responses(served).cancel(queued.id)
    assert response.status == "cancelled"
    assert response.usage.output_tokens == 100


async def test_what_was_cancelled_can_be_built_on() -> None:
    async with serving(SLOW) as served:
        queued = await begin(served)
        await until_text(served, queued.id, "two ")
        await responses(served).cancel(queued.id)
        following = await begin(served, previous_response_id=queued.id)
        await until_text(served, following.id, "two ")
        model = served.stack.inference
        assert isinstance(model, Scripted)
        assert [message.content for message in model.requests[-1].messages] == ["hi", "one two ", "hi"]
        await responses(served).cancel(following.id)


async def test_a_response_at_its_end_is_returned_by_cancel_unchanged() -> None:
    async with serving() as served:
        response = await until_ended(responses(served), (await begin(served)).id)
        assert bare(await responses(served).cancel(response.id)) == bare(response)


async def test_a_running_response_can_be_deleted() -> None:
    async with serving(SLOW) as served:
        queued = await begin(served)
        reading = asyncio.create_task(replay(served, queued.id))
        await until_text(served, queued.id, "two ")
        await responses(served).delete(queued.id)
        check_stream(await reading, whole=False)
        for ask in (responses(served).retrieve, responses(served).delete, responses(served).cancel):
            with pytest.raises(NotFoundError):
                await ask(queued.id)
        remaining_keys = [key for key, _ in await served.stack.kv_store.scan("") if queued.id[5:] in key]
        assert remaining_keys == [f"default/line/{queued.id[5:]}"]  # for a day, so that nothing is added after it


async def test_a_failure_is_sent_in_the_stream_and_stored() -> None:
    async with serving(scripted([{"text": "a"}, {"fail": "The model is gone."}])) as served:
        queued = await begin(served)
        events = await replay(served, queued.id)
        check_stream(events)
        response = await responses(served).retrieve(queued.id)
        assert (response.status, response.error.message) == ("failed", "The model is gone.")
        assert bare(events[-1].response) == bare(response)


async def test_an_unknown_model_fails_the_response() -> None:
    async with serving() as served:
        response = await until_ended(responses(served), (await begin(served, model="none")).id)
        assert (response.status, response.error.code) == ("failed", "invalid_prompt")


@pytest.mark.parametrize("after", [99, 2_000_000])
async def test_an_event_after_the_end_cannot_be_asked_for(after: int) -> None:
    async with serving() as served:
        response = await until_ended(responses(served), (await begin(served)).id)
        with pytest.raises(BadRequestError) as caught:
            await replay(served, response.id, starting_after=after)
    assert caught.value.param == "starting_after"


@pytest.mark.parametrize("after", ["x", "-1", "1.0", ""])
async def test_starting_after_is_a_number(after: str) -> None:
    async with serving() as served:
        response = await until_ended(responses(served), (await begin(served)).id)
        with pytest.raises(BadRequestError) as caught:
            await replay(served, response.id, extra_query={"starting_after": after})
    assert caught.value.param == "starting_after"


async def test_a_stream_after_the_last_event_is_empty() -> None:
    async with serving() as served:
        events = await stream(served, background=True)
        assert await replay(served, events[0].response.id, starting_after=len(events) - 1) == []


async def test_too_many_that_wait_are_refused() -> None:
    limits = {"background": {"max_running": 1, "max_waiting": 2}}
    async with serving(SLOW, responses=limits) as served:
        first = await begin(served)
        await until_text(served, first.id, "two ")
        waiting = [await begin(served) for _ in range(2)]
        with pytest.raises(RateLimitError) as caught:
            await begin(served)
        assert caught.value.response.headers["retry-after"] == "5"
        for each in (*waiting, first):
            assert (await responses(served).cancel(each.id)).status == "cancelled"
        assert (await responses(served).retrieve(waiting[0].id)).output == []


async def test_no_more_begin_or_wait_than_may_when_all_come_at_once() -> None:
    limits = {"background": {"max_running": 2, "max_waiting": 3}}
    async with serving(SLOW, responses=limits) as served:
        outcomes = await asyncio.gather(*(begin(served) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(each, RateLimitError) for each in outcomes) == 15
        queued = [each for each in outcomes if not isinstance(each, BaseException)]
        alert_now = [await responses(served).retrieve(each.id) for each in queued]
        assert sorted(each.status for each in alert_now) == ["in_progress"] * 2 + ["queued"] * 3
        for each in queued:
            await responses(served).cancel(each.id)
        assert (await begin(served)).status == "queued"


async def test_what_is_not_for_storing_cannot_wait() -> None:
    limits = {"background": {"max_running": 1}}
    secret = {"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:9", "authorization": "s3cret"}
    async with serving(SLOW, tool_servers={"provider": "mcp"}, responses=limits) as served:
        first = await begin(served)
        with pytest.raises(RateLimitError) as caught:
            await begin(served, tools=[secret])
        assert "not for storing" in caught.value.message
        await responses(served).cancel(first.id)


async def test_who_pays_for_haste_is_served_first() -> None:
    turns = [*SLOW["turns"], [{"text": "a"}], [{"text": "a"}], [{"text": "a"}]]
    async with serving(scripted(*turns), responses={"background": {"max_running": 1}}) as served:
        first = await begin(served)
        await until_text(served, first.id, "two ")
        queued = [await begin(served, service_tier=tier, input=tier) for tier in ("flex", "default", "priority")]
        assert [each.service_tier for each in queued] == ["flex", "default", "priority"]
        await responses(served).cancel(first.id)
        for each in queued:
            await until_ended(responses(served), each.id)
        model = served.stack.inference
        assert isinstance(model, Scripted)
        assert [request.messages[0].content for request in model.requests] == ["hi", "priority", "default", "flex"]


async def test_one_that_waits_for_too_long_fails() -> None:
    limits = {"background": {"max_running": 1, "queue_timeout_s": 0.3, "lease_s": 0.5, "poll_s": 0.05}}
    async with serving(SLOW, responses=limits) as served:
        first = await begin(served)
        await until_text(served, first.id, "two ")
        late = await begin(served)
        events = await replay(served, late.id)
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "rate_limit_exceeded"
        await responses(served).cancel(first.id)


async def test_a_failed_one_that_never_began_has_no_lawless_stream() -> None:
    limits = {"background": {"max_running": 1, "queue_timeout_s": 0.3, "lease_s": 0.5, "poll_s": 0.05}}
    async with serving(SLOW, responses=limits) as served:
        first = await begin(served)
        await until_text(served, first.id, "two ")
        check_stream(await replay(served, (await begin(served)).id))
        await responses(served).cancel(first.id)
