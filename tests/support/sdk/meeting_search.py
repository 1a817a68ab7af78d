"""A search whose calls wait for each other, so that a test can see that they run side by side."""

import asyncio
from collections.abc import Sequence

from pydantic import Field

from apis.provider import Provider
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime, ToolSpec


class Meeting(ToolRuntime):
    """Each call waits until `size` of them are there; then they are done one by one, the last to come first. A query
    `alone` never meets anyone, `bug` is one, and `long` gives a text of 5,000 characters."""

    class Config(Provider.Config):
        size: int = Field(1, ge=1)

    def __init__(self, config: Config) -> None:
        self._size = config.size
        self._waiting: list[asyncio.Event] = []
        self.running = 0
        self.most_running = 0
        self.queries: list[str] = []

    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec("search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}})]

    async def call(self, call: ToolCall) -> ToolResult:
        query: str = call.arguments["query"]
        self.queries.append(query)
        if query == "bug":
            raise ValueError("a secret of the house")
        if query == "long":
            return ToolResult("x" * 5_000)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._meet(query)
        finally:
            self.running -= 1
        return ToolResult("", [Source(f"https://{query}.example.com/", query, f"About {query}.")])

    async def _meet(self, query: str) -> None:
        mine = asyncio.Event()
        group = self._waiting
        if query != "alone":
            group.append(mine)
        if len(group) == self._size:
            self._waiting = []
            group.pop().set()
        await mine.wait()
        if group:
            group.pop().set()
