"""A scripted model that ends its process where the input says so, as a fault of a native library does."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from providers.inference.scripted import Scripted


class Deadly(Scripted):
    """Kills its process at each input that begins with "poison", and adds the input to the file `deaths` before."""

    class Config(Scripted.Config):
        deaths: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._deaths = Path(config.deaths)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        text = str(request.messages[-1].content)
        if text.startswith("poison"):
            await asyncio.sleep(0.2)  # the request that asked for it has been answered by then
            descriptor = os.open(self._deaths, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"{text}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        async with aclosing(super().chat(request)) as steps:
            async for step in steps:
                yield step
