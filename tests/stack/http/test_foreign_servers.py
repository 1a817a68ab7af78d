"""The app in another ASGI server than ours, which drives its lifespan."""

import asyncio
from typing import Any

import httpx

from stack.config import StackConfig
from stack.http.app import create_app
from tests.support.servers.serving import MEMORY, SCRIPTED
from tests.support.waiting import until


async def test_another_server_starts_asks_and_ends_the_app() -> None:
    sections = {"inference": SCRIPTED, "kv_store": MEMORY, "responses": {"provider": "loop"}}
    app = create_app(StackConfig.model_validate(sections))
    sent: list[str] = []
    messages: asyncio.Queue[Any] = asyncio.Queue()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    lifespan = asyncio.ensure_future(app({"type": "lifespan", "asgi": {}, "state": {}}, messages.get, send))
    await messages.put({"type": "lifespan.startup"})
    async with asyncio.timeout(10):
        await until(lambda: sent)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.post("/v1/responses", json={"model": "scripted", "input": "Hi"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "completed"
        await messages.put({"type": "lifespan.shutdown"})
        await lifespan
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
