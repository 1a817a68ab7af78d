"""A Responses WebSocket through the SDK. Every stream that ends on it is held against the laws."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from tests.support.laws.stream_laws import check_stream
from tests.support.servers.serving import Served

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class Talk:
    """One connection. `events` are all that came, in order."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.events: list[Any] = []

    async def send(self, **fields: Any) -> None:
        await self.connection.send({"type": "response.create", "model": "scripted", "input": "hi", **fields})

    async def recv(self) -> Any:
        async with asyncio.timeout(10):
            event = await self.connection.recv()
        self.events.append(event)
        return event

    async def until(self, *types: str) -> Any:
        """The next event of one of these types."""
        while (event := await self.recv()).type not in types:
            pass
        return event

    async def ask(self, **fields: Any) -> Any:
        """The whole response to a create, its stream lawful."""
        begun = len(self.events)
        await self.send(**fields)
        last = await self.until(*TERMINAL, "error")
        assert last.type != "error", last
        check_stream(self.events[begun:])
        return last.response

    async def refused(self, **fields: Any) -> Any:
        """The error event that a create is answered with."""
        await self.send(**fields)
        event = await self.recv()
        assert event.type == "error", event
        return event

    def of_lane(self, lane: str | None) -> list[Any]:
        """The events of one lane, without the lane's name."""
        return [event for event in self.events if getattr(event, "stream_id", None) == lane]


@asynccontextmanager
async def talking(served: Served, client: AsyncOpenAI | None = None, **headers: str) -> AsyncGenerator[Talk]:
    """A connection to the stack, with these extra headers."""
    responses: Any = (client or served.client).responses
    async with responses.connect(
        extra_headers={name.replace("_", "-"): value for name, value in headers.items()}
    ) as it:
        yield Talk(it)
