"""Eviction: a memory store that is full deletes the oldest stored responses, where the run config asks for it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError

from apis.errors import StoreUnavailable
from providers.kv_store.memory import Memory
from tests.support.sdk.conversations import conversations, texts
from tests.support.sdk.requests import chat_requests, create, responses
from tests.support.servers.held_model import Held
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until, until_ended

RUNNING = ("queued", "in_progress")
MAX_BYTES = 150_000
"""A store for some 50 responses to the input `hi`."""


@asynccontextmanager
async def evicting(*, is_on: bool = True) -> AsyncGenerator[Served]:
    store = {"provider": "memory", "max_bytes": MAX_BYTES, **({"evict_responses": True} if is_on else {})}
    async with serving({"provider": "tests.support.servers.held_model:Held"}, kv_store=store) as served:
        yield served


class SweepCounter(Memory):
    """A store that counts its sweeps."""

    sweeps = 0

    async def sweep(self) -> int:
        self.sweeps += 1
        return await super().sweep()


def last_messages(served: Served) -> list[str]:
    return [str(message.content) for message in chat_requests(served)[-1].messages]


async def test_a_full_store_refuses_responses_without_the_setting() -> None:
    """Stored responses stay, and a response that cannot be stored is a 503."""
    async with evicting(is_on=False) as served:
        first = await create(served)
        with pytest.raises(APIStatusError, match="The store is full") as caught:
            await asyncio.gather(*(create(served) for _ in range(100)))
        assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
        assert (await responses(served).retrieve(first.id)).output_text == first.output_text


async def test_a_full_store_evicts_the_oldest_responses_first() -> None:
    """Each request is answered, the newest responses can be read, and no part of an evicted one is left."""
    async with evicting() as served:
        ids = [(await create(served)).id for _ in range(200)]
        page = await served.client.get("/responses?limit=100", cast_to=dict[str, Any])
        listed = [each["id"] for each in page["data"]]
        assert listed == ids[: -len(listed) - 1 : -1]
        assert 35 < len(listed) < 60
        for each in ids[-len(listed) :]:
            assert (await responses(served).retrieve(each)).output_text == "hi"
        with pytest.raises(NotFoundError, match=f"Response with id '{ids[0]}' not found"):
            await responses(served).retrieve(ids[0])
        with pytest.raises(BadRequestError, match=f"Previous response with id '{ids[0]}' not found") as caught:
            await create(served, previous_response_id=ids[0])
        assert caught.value.code == "previous_response_not_found"
        rows = await served.stack.kv_store.scan("default/turn/")
        assert len(rows) == len(listed)


async def test_a_store_that_stays_full_keeps_its_number_of_responses() -> None:
    """Nothing that an eviction leaves takes the room of responses for long."""
    async with evicting() as served:
        counts: list[int] = []
        for _ in range(4):
            for _ in range(100):
                await create(served)
            counts.append(len(await served.stack.kv_store.scan("default/response/")))
        assert min(counts[1:]) == max(counts[1:]) > 35, counts


async def test_runs_and_conversations_are_not_evicted() -> None:
    """A background response goes on, the one before it is kept for it, and a conversation keeps its items."""
    async with evicting() as served:
        conversation = await conversations(served).create(items=[{"role": "user", "content": "first"}])
        await create(served, input="turn", conversation=conversation.id)
        first = await create(served, input="first")
        running = await create(served, input="hold", previous_response_id=first.id, background=True)
        await until(lambda: cast(Held, served.stack.inference).held_count == 1)
        for _ in range(200):
            await create(served)
        assert (await responses(served).retrieve(running.id)).status == "in_progress"
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(first.id)
        cast(Held, served.stack.inference).released.set()
        assert (await until_ended(responses(served), running.id)).output_text == "hold"
        await create(served, input="on", previous_response_id=running.id)
        assert last_messages(served) == ["first", "first", "hold", "hold", "on"]
        assert await texts(served, conversation.id) == ["first", "turn", "turn"]
        await create(served, input="on", conversation=conversation.id)
        assert last_messages(served) == ["first", "turn", "turn", "on"]


async def test_a_chain_is_whole_while_its_newest_response_is_stored() -> None:
    """Responses that others follow are evicted, and their items stay for those."""
    async with evicting() as served:
        first = newest = await create(served, input="first")
        for _ in range(5):
            for _ in range(20):
                await create(served)
            newest = await create(served, input="on", previous_response_id=newest.id)
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(first.id)
        assert last_messages(served) == ["first", "first", *["on"] * 9]


async def test_a_continuation_that_runs_keeps_its_history() -> None:
    """The response before it is evicted while it is generated; it is stored whole, and continued."""
    async with evicting() as served:
        first = await create(served, input="first")
        running = asyncio.create_task(create(served, input="hold", previous_response_id=first.id))
        await until(lambda: cast(Held, served.stack.inference).held_count == 1)
        for _ in range(70):
            await create(served)
        with pytest.raises(NotFoundError):
            await responses(served).retrieve(first.id)
        cast(Held, served.stack.inference).released.set()
        await create(served, input="on", previous_response_id=(await running).id)
        assert last_messages(served) == ["first", "first", "hold", "hold", "on"]


async def test_a_write_that_fits_into_no_empty_store_evicts_nothing() -> None:
    """To make room for it would lose all responses for nothing."""
    async with evicting() as served:
        first = await create(served)
        with pytest.raises(APIStatusError, match="The store is full"):
            await create(served, input="x" * MAX_BYTES)
        assert (await responses(served).retrieve(first.id)).status == "completed"


async def test_what_expires_next_is_known_without_a_look_at_each_row() -> None:
    """A store that is always full looks through all its rows only after one of them has expired."""
    store = SweepCounter(Memory.Config(max_bytes=10_000))
    now = 0.0
    store.now = lambda: now
    await store.put("a/short", b"x" * 5000, ttl_s=10)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="full"):
            await store.put("a/long", b"x" * 5000)
    assert store.sweeps == 0
    now = 11.0
    await store.put("a/long", b"x" * 5000)
    assert store.sweeps == 1
    await store.close()
