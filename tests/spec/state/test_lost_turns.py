"""A worker that is lost in the middle of a turn: the turn is run again where its events have had no reader."""

import asyncio
from typing import Any

import pytest
from openai.types.responses import Response

from apis.storage.kv_store import Delete
from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import bare, chat_requests, create, responses
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until_ended

LOST: Script = [{"reasoning": "hm"}, {"text": ["one ", "two "]}, {"wait_s": 30}, {"text": "three"}]
WHOLE: Script = [{"text": ["four ", "five"]}]
BACKGROUND = {"background": {"poll_s": 0.05, "lease_s": 1}}
SEARCH = {"provider": "tests.support.servers.stepping_provider:Search"}


async def wait_for_event(served: Served, response_id: str, text: bytes) -> None:
    """Wait until an event with this text is in the log, without a request that reads it."""
    async with asyncio.timeout(10):
        while not any(  # noqa: ASYNC110 - a store sets no event
            text in entry.value for _, entry in await served.stack.kv_store.scan(f"default/event/{response_id}/")
        ):
            await asyncio.sleep(0.01)


async def lose_worker(served: Served, response_id: str) -> None:
    """Take the lease from the worker, as it expires when a worker is killed; the same process then finds the run."""
    async with asyncio.timeout(10):
        while not (leases := await served.stack.kv_store.scan("/lease/")):  # noqa: ASYNC110 - a store sets no event
            await asyncio.sleep(0.01)
    (key,) = [key for key, _ in leases if response_id in key]
    await served.stack.kv_store.write([Delete(key)])


async def replay(served: Served, response: Response) -> list[Any]:
    """Return all events of the log, which keep the laws of the stream and end with the response."""
    events = [event async for event in await responses(served).retrieve(response.id, stream=True)]
    check_stream(events)
    assert bare(events[-1].response) == bare(response)
    return events


async def test_a_turn_that_no_client_has_read_is_run_again() -> None:
    """A plain text answer survives a killed worker, and its log shows one turn."""
    async with serving(scripted(LOST, WHOLE), responses=BACKGROUND) as served:
        begun = await create(served, background=True)
        await wait_for_event(served, begun.id, b"two ")
        await lose_worker(served, begun.id)
        response = await until_ended(responses(served), begun.id)
        events = await replay(served, response)
    assert (response.status, response.output_text) == ("completed", "four five")
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["four ", "five"]
    assert len(response.output) == 1


async def test_only_the_turn_that_was_lost_is_run_again() -> None:
    """The turns before it, and their calls, stand."""
    first: Script = [call("web_search", '{"query": "whales"}')]
    turns = scripted(first, LOST, WHOLE)
    async with serving(turns, responses=BACKGROUND, tool_runtime=SEARCH) as served:
        begun = await create(served, background=True, tools=[{"type": "web_search"}])
        await wait_for_event(served, begun.id, b"two ")
        await lose_worker(served, begun.id)
        response = await until_ended(responses(served), begun.id)
        await replay(served, response)
        prompts = [request.messages for request in chat_requests(served)]
    assert [item.type for item in response.output] == ["web_search_call", "message"]
    assert response.output_text == "four five"
    assert prompts[1] == prompts[2]


async def follow(served: Served, response_id: str) -> None:
    async with await responses(served).retrieve(response_id, stream=True) as events:
        async for event in events:
            if getattr(event, "delta", "") == "two ":
                return


async def follow_late(served: Served, response_id: str) -> None:
    async with await responses(served).retrieve(response_id, stream=True, starting_after=2) as events:
        await anext(aiter(events))


async def list_events(served: Served, response_id: str) -> None:
    await served.client.get(f"/responses/{response_id}/events", cast_to=object)


@pytest.mark.parametrize("read", [follow, follow_late, list_events], ids=lambda read: read.__name__)
async def test_a_turn_that_a_client_has_read_is_never_taken_back(read: Any) -> None:
    """The response fails, with what its readers have seen."""
    async with serving(scripted(LOST, WHOLE), responses=BACKGROUND) as served:
        begun = await create(served, background=True)
        await wait_for_event(served, begun.id, b"two ")
        await read(served, begun.id)
        await lose_worker(served, begun.id)
        response = await until_ended(responses(served), begun.id)
        events = await replay(served, response)
    assert (response.status, response.output_text) == ("failed", "one two ")
    assert "stopped before it was done" in response.error.message
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["one ", "two "]


async def test_a_response_that_is_streamed_from_its_beginning_is_never_taken_back() -> None:
    """Its reader is stored with it."""
    async with serving(scripted(LOST, WHOLE), responses=BACKGROUND) as served:
        events: list[Any] = []
        async for event in await create(served, background=True, stream=True):
            events.append(event)
            if getattr(event, "delta", "") == "two ":
                await lose_worker(served, events[0].response.id)
        check_stream(events)
    assert events[-1].response.status == "failed"


async def test_a_reader_that_comes_as_a_turn_is_taken_back_sees_one_turn() -> None:
    """The first in the store decides, the reader or the worker that runs the turn again, at any of their steps."""
    outcomes: set[str] = set()
    for number in (0, 3, 6, 12):
        async with serving(scripted(LOST, WHOLE), responses=BACKGROUND) as served:
            begun = await create(served, background=True)
            await wait_for_event(served, begun.id, b"two ")
            await lose_worker(served, begun.id)
            async with asyncio.timeout(10):
                while not await served.stack.kv_store.scan("/lease/"):  # noqa: ASYNC110 - the first turn of the event loop counts
                    await asyncio.sleep(0)
                for _ in range(number):
                    await asyncio.sleep(0)
            events = [event async for event in await responses(served).retrieve(begun.id, stream=True)]
            check_stream(events)
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert (text, events[-1].response.status) in (("one two ", "failed"), ("four five", "completed"))
            outcomes.add(text)
    assert outcomes
