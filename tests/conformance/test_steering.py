"""Background responses that are steered on the worker that makes them, and on another one, over each shared store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from apis.errors import SteeringRefused
from apis.responses import SteerResponse
from apis.steering import Steer
from tests.support.sdk.requests import responses
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, Wait, stream, text_chunks

SEARCH = {"call": "web_search", "arguments": '{"query": "cats"}'}
TOOLS = [{"type": "web_search"}]
SLOW: dict[str, Any] = {"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0}
FAST = {"background": {"poll_s": 0.05}}


async def steer(served: Served, response_id: str, text: str, *, tenant: str = "default") -> Steer:
    request = SteerResponse(previous_response_id=response_id, input=text)
    return await served.stack.responses.steer(request, tenant=tenant)


async def ended(served: Served, response_id: str) -> Any:
    """The response at its end."""
    async with asyncio.timeout(10), await responses(served).retrieve(response_id, stream=True) as events:
        async for _ in events:
            pass
    return await responses(served).retrieve(response_id)


async def begun(served: Served, response_id: str) -> None:
    """Wait until the model has said something."""
    async with asyncio.timeout(10), await responses(served).retrieve(response_id, stream=True) as events:
        async for event in events:
            if event.type.endswith((".delta", "output_item.added")):
                return


async def test_any_worker_steers_a_response_between_two_turns(shared_store: dict[str, Any]) -> None:
    model = scripted([{"text": "a"}, {"wait_s": 2.5}, SEARCH], [{"text": "never"}])
    async with (
        serving(model, kv_store=shared_store, responses=FAST, tool_runtime=SLOW) as maker,
        serving(scripted([{"text": "as you wish"}]), kv_store=shared_store, responses=FAST, tool_runtime=SLOW) as other,
    ):
        first = await responses(maker).create(
            model="scripted", input="hi", background=True, tools=TOOLS, metadata={"a": "b"}, instructions="Be brief."
        )
        await begun(other, first.id)
        accepted = [await steer(other, first.id, text) for text in ("dogs", "and birds")]
        assert len({each.id for each in accepted}) == 2
        assert {each.successor_id for each in accepted} == {accepted[0].successor_id}
        steered = await ended(other, first.id)
        assert (steered.status, steered.incomplete_details.reason) == ("incomplete", "steered")
        assert [item.type for item in steered.output] == ["message", "web_search_call"]
        assert steered.output[1].status == "completed"
        successor = await ended(other, accepted[0].successor_id)
        assert (successor.status, successor.previous_response_id) == ("completed", first.id)
        assert (successor.metadata, successor.instructions, successor.tools) == (
            *(first.metadata, first.instructions, first.tools),
        )
        items = await responses(other).input_items.list(successor.id, order="asc")
        assert [item.content[0].text for item in items.data] == ["dogs", "and birds"]
        assert await other.stack.kv_store.scan("default/mailbox/") == []


async def test_input_waits_for_the_outputs_that_the_client_owes(shared_store: dict[str, Any]) -> None:
    model = scripted(
        [{"text": "a"}, {"wait_s": 0.8}, {"call": "look", "arguments": "{}"}], [{"text": "b"}], [{"text": "c"}]
    )
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    ]
    async with serving(model, kv_store=shared_store, responses=FAST) as served:
        first = await responses(served).create(model="scripted", input="hi", background=True, tools=tools)
        await begun(served, first.id)
        accepted = await steer(served, first.id, "dogs")
        stopped = await ended(served, first.id)
        assert stopped.status == "completed"
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(accepted.successor_id)
        output = {"type": "function_call_output", "call_id": stopped.output[-1].call_id, "output": "cats"}
        for background, is_read in ((True, True), (False, False)):
            following = await responses(served).create(
                model="scripted", input=[output], previous_response_id=first.id, background=background, tools=tools
            )
            await served.stack.responses.get(following.id, tenant="default")
            items = await responses(served).input_items.list(following.id, order="asc")
            assert [item.type for item in items.data] == ["message"] * is_read + ["function_call_output"]
            if background:
                assert (await ended(served, following.id)).status == "completed"
        assert await served.stack.kv_store.scan("default/mailbox/") == []


@pytest.mark.parametrize("damage", [b"junk", b'[{"a":1}]', b'{"successor_id":"x","posted":[{"id":"y","input":[5]}]}'])
async def test_a_damaged_mailbox_is_skipped(damage: bytes) -> None:
    model = scripted([{"text": "a"}, {"wait_s": 0.8}, SEARCH], [{"text": "b"}], [{"text": "c"}])
    async with serving(model, responses=FAST, tool_runtime=SLOW) as served:
        first = await responses(served).create(model="scripted", input="hi", background=True, tools=TOOLS)
        await begun(served, first.id)
        lost = await steer(served, first.id, "dogs")
        await served.stack.kv_store.put(f"default/mailbox/{first.id}", damage)
        assert (await ended(served, first.id)).incomplete_details.reason == "steered"
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(lost.successor_id)
        assert await served.stack.kv_store.scan("default/mailbox/") == []
        following = await responses(served).create(model="scripted", input="hi", previous_response_id=first.id)
        assert following.output_text == "b"


async def test_a_waiting_response_can_be_steered_and_one_that_has_ended_cannot() -> None:
    limits = {"background": {"max_running": 1, "poll_s": 0.05}}
    model = scripted([{"text": "a"}, {"wait_s": 0.8}], [SEARCH], [{"text": "b"}])
    async with serving(model, responses=limits, tool_runtime=SLOW) as served:
        running = await responses(served).create(model="scripted", input="hi", background=True)
        await begun(served, running.id)
        waiting = await responses(served).create(model="scripted", input="one", background=True, tools=TOOLS)
        assert waiting.status == "queued"
        accepted = await steer(served, waiting.id, "two")
        assert (await ended(served, waiting.id)).incomplete_details.reason == "steered"
        assert (await ended(served, accepted.successor_id)).output_text == "b"
        for response_id, code in ((running.id, "response_already_completed"), (waiting.id, "response_not_active")):
            with pytest.raises(SteeringRefused) as refused:
                await steer(served, response_id, "three")
            assert refused.value.code == code
        for response_id, tenant in ((running.id, "another"), ("resp_1", "default")):
            with pytest.raises(SteeringRefused) as refused:
                await steer(served, response_id, "three", tenant=tenant)
            assert refused.value.code == "response_not_found"


async def test_a_cancelled_response_takes_its_input_along() -> None:
    model = scripted([{"text": "a"}, {"wait_s": 30}])
    async with serving(model, responses=FAST) as served:
        first = await responses(served).create(model="scripted", input="hi", background=True)
        await begun(served, first.id)
        accepted = await steer(served, first.id, "dogs")
        assert (await responses(served).cancel(first.id)).status == "cancelled"
        assert await served.stack.kv_store.scan("default/mailbox/") == []
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(accepted.successor_id)


async def test_a_response_that_another_worker_streams_over_http_can_be_steered(tmp_path: Path) -> None:
    store, may_end = {"provider": "sqlite", "path": str(tmp_path / "store.db")}, asyncio.Event()
    first, *rest = stream(text_chunks("a"))
    async with UpstreamServer(
        [first, rest[0], rest[1], Wait(may_end), *rest[2:]], stream(text_chunks("b"))
    ) as upstream:
        model = {"provider": "vllm", "base_url": upstream.base_url}
        async with (
            serving(model, kv_store=store, responses=FAST) as maker,
            serving(model, kv_store=store, responses=FAST) as other,
            asyncio.timeout(20),
        ):
            while len(await other.stack.kv_store.scan("/worker/")) < 2:  # noqa: ASYNC110 - a store sets no event
                await asyncio.sleep(0.02)
            async with await responses(maker).create(model="fake-model", input="hi", stream=True) as events:
                created = await anext(aiter(events))
                accepted = await steer(other, created.response.id, "dogs")
                may_end.set()
                *_, last = [event async for event in events]
            assert (last.type, last.response.output_text) == ("response.completed", "a")
            successor = await ended(other, accepted.successor_id)
            assert (successor.output_text, successor.previous_response_id) == ("b", created.response.id)
            assert await other.stack.kv_store.scan("/steer_offer/") == []
