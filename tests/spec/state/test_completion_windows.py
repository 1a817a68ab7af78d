"""Background responses with a completion window through the SDK: below all other work, and with a deadline."""

import asyncio
from typing import Any

import pytest
from openai import BadRequestError, RateLimitError

from providers.inference.scripted import Scripted
from providers.responses.background.ranks import DEFERRED_PREFIX
from tests.support.sdk.batch_files import batch_line, create_batch, wait_for_end
from tests.support.sdk.requests import create, responses
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until, until_status

SOON = {"background": {"poll_s": 0.05, "lease_s": 1}}
SLOW = scripted([{"text": ["one ", "two "]}, {"wait_s": 30}, {"text": "three"}])
ONE_PLACE: dict[str, Any] = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "max_running": 1}}


async def begin(served: Served, window: str = "2h", **fields: Any) -> Any:
    return await create(served, background=True, background_options={"completion_window": window}, **fields)


async def test_a_response_with_a_window_runs_when_there_is_room_and_echoes_its_window() -> None:
    async with serving(responses=SOON) as served:
        queued = await begin(served, "8h", input="hello there")
        assert (queued.status, queued.background_options) == ("queued", {"completion_window": "8h"})
        ended = await until_status(responses(served), queued.id, "completed", "failed")
        assert (ended.status, ended.output_text) == ("completed", "hello there")
        assert (ended.service_tier, ended.background_options) == ("default", {"completion_window": "8h"})
        soonest = await begin(served, "soonest")
        assert soonest.background_options == {"completion_window": "soonest"}


async def test_a_window_does_not_fit_a_stream_or_what_cannot_be_stored() -> None:
    secret = {"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:9", "authorization": "s3cret"}
    async with serving(tool_servers={"provider": "mcp"}) as served:
        refused: list[dict[str, Any]] = [{"stream": True}, {"tools": [secret]}]
        for fields in refused:
            with pytest.raises(BadRequestError) as caught:
                await begin(served, **fields)
            assert caught.value.param == "background_options.completion_window"


async def test_a_response_with_a_window_waits_for_the_place_of_a_batchs_line() -> None:
    """A batch and windows have one queue: the one place goes to one after the other."""
    steps = [{"text": "a"}, {"wait_s": 1}, {"text": "b"}]
    async with serving(scripted(steps), responses=SOON, more=ONE_PLACE) as served:
        batch = await create_batch(served.client, [batch_line("a")])
        await until(lambda: model_of(served).requests)
        first, second = await begin(served, "8h", input="late"), await begin(served, "2h", input="soon")
        plain = await create(served, background=True, input="plain")
        assert (await until_status(responses(served), plain.id, "completed")).output_text == "ab"
        for queued in (first, second):
            assert (await responses(served).retrieve(queued.id)).status in ("queued", "in_progress")
        assert (await wait_for_end(served.client, batch)).status == "completed"
        await until_status(responses(served), first.id, "completed")
        order = [request.messages[-1].content for request in model_of(served).requests]
        assert order == ["a", "plain", "soon", "late"]


def model_of(served: Served) -> Scripted:
    model = served.stack.inference
    assert isinstance(model, Scripted)
    return model


async def test_a_response_that_has_not_begun_at_its_deadline_fails_as_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("apis.wire.completion_window._UNIT_S", {"h": 1})
    monkeypatch.setattr("apis.wire.completion_window.MIN_WINDOW_S", 1)
    async with serving(SLOW, responses=SOON, more=ONE_PLACE) as served:
        running = await begin(served, "9h")
        await until_status(responses(served), running.id, "in_progress")
        conversation = await served.client.conversations.create()
        waiting = await begin(served, "1h", conversation=conversation.id)
        failed = await until_status(responses(served), waiting.id, "failed")
        assert failed.error.code == "completion_window_expired"
        assert "background_options.completion_window" in failed.error.message
        assert failed.output == []
        async with asyncio.timeout(10):
            events = [event async for event in await responses(served).retrieve(waiting.id, stream=True)]
        assert [event.type for event in events] == ["response.created", "response.queued", "response.failed"]
        await served.client.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "user", "content": "free again"}]
        )
        assert (await responses(served).retrieve(running.id)).status == "in_progress"
        await responses(served).cancel(running.id)


async def test_responses_with_a_window_have_places_of_their_own_and_are_in_the_overview() -> None:
    limits = {"background": {"max_waiting": 1, "max_running": 1, "max_deferred": 2, "poll_s": 0.05}}
    async with serving(SLOW, responses=limits, more=ONE_PLACE) as served:
        running = await begin(served)
        await until_status(responses(served), running.id, "in_progress")
        later, sooner = await begin(served, "8h"), await begin(served)
        with pytest.raises(RateLimitError, match="max_deferred"):
            await begin(served)
        plain = await create(served, background=True)
        await until_status(responses(served), plain.id, "in_progress")
        background = (await served.client.get("/stack/overview", cast_to=dict[str, Any]))["background"]
        assert (background["waiting"], background["deferred"], background["max_deferred"]) == (0, 2, 2)
        rows = {run["id"]: run for run in background["runs"]}
        assert rows[sooner.id]["queue_place"] < rows[later.id]["queue_place"]
        assert rows[later.id]["expires_at"] - rows[later.id]["created_at"] == pytest.approx(8 * 3600)
        assert rows[running.id]["expires_at"] is None
        for each in (running, plain, later, sooner):
            assert (await responses(served).cancel(each.id)).status == "cancelled"
        assert await served.stack.kv_store.scan(DEFERRED_PREFIX) == []
        assert await served.stack.kv_store.scan("/deferred_place/") == []


async def test_the_engines_priority_of_batches_is_that_of_responses_with_a_window() -> None:
    more = {**ONE_PLACE, "batches": {"provider": "leased", "engine_priority": 9}}
    async with serving(responses=SOON, more=more) as served:
        requests: list[dict[str, Any]] = [{}, {"extra_body": {"priority": 3}}]
        for fields in requests:
            await until_status(responses(served), (await begin(served, **fields)).id, "completed")
        assert [request.priority for request in model_of(served).requests] == [9, 3]
