"""Background responses while their store does not answer: short outages are waited out, long ones get nothing stuck."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.requests import responses
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until_text

TURN: list[dict[str, Any]] = [{"text": "a"}, {"wait_s": 0.5}, {"text": ["b"] * 50}, {"wait_s": 0.5}, {"text": "c"}]


def redis(server: RedisServer) -> dict[str, Any]:
    return {"provider": "redis", "url": server.url, "timeout_s": 0.3}


async def whole(served: Served, response_id: str) -> list[Any]:
    async with asyncio.timeout(20):
        return [event async for event in await responses(served).retrieve(response_id, stream=True)]


async def test_a_short_outage_is_waited_out(tmp_path: Path) -> None:
    limits = {"background": {"lease_s": 5, "poll_s": 0.1}}
    with RedisServer(tmp_path) as server:
        async with serving(scripted(TURN), kv_store=redis(server), responses=limits) as served:
            queued = await responses(served).create(model="scripted", input="hi", background=True)
            reading = asyncio.create_task(whole(served, queued.id))
            await until_text(responses(served), queued.id)
            server.pause()
            with pytest.raises(APIStatusError) as caught:
                await responses(served).create(model="scripted", input="hi", background=True)
            assert caught.value.status_code == 503
            server.resume()
            events = await reading
            check_stream(events)
            assert events[-1].response.output_text == f"a{'b' * 50}c"


async def test_after_an_outage_longer_than_the_lease_nothing_is_stuck(tmp_path: Path) -> None:
    limits = {"background": {"lease_s": 1, "poll_s": 0.1}}
    with RedisServer(tmp_path) as server:
        async with serving(scripted(TURN), kv_store=redis(server), responses=limits) as served:
            queued = await responses(served).create(model="scripted", input="hi", background=True)
            await until_text(responses(served), queued.id)
            server.pause()
            await asyncio.to_thread(server.kill)
            for _ in range(4):  # each is refused after the store's time-out
                with pytest.raises(APIStatusError):
                    await responses(served).retrieve(queued.id)
                await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)
            events = await whole(served, queued.id)
            check_stream(events)
            assert events[-1].type in ("response.failed", "response.completed")
