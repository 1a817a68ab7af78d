"""A scripted model that embeds too, and holds the answers to some inputs until a test releases them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from tests.support.sdk.file_search_stack import Filing


class Held(Filing):
    """Holds the answer to each chat whose last message has the word "hold"; it repeats its input, as Scripted does."""

    def __init__(self, config: Filing.Config) -> None:
        super().__init__(config)
        self.released = asyncio.Event()
        self.held_count = 0

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if "hold" in str(request.messages[-1].content):
            self.held_count += 1
            await self.released.wait()
        async with aclosing(super().chat(request)) as steps:
            async for step in steps:
                yield step
