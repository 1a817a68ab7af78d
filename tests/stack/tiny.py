"""The smallest providers and the smallest app: for tests of the wiring and of the serving of a stack."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from threading import Event
from typing import Literal

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.errors import ConfigError, InvalidRequest, StoreUnavailable, UpstreamError
from apis.inference import Inference, Model
from apis.responses import Responses
from apis.storage.kv_store import Entry, KVStore, Op
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime, ToolSpec
from stack.config import StackConfig

journal: list[str] = []
"""The acts of the providers below, in order."""


class Silent(Inference):
    """Serves one model, which never says anything."""

    class Config(Inference.Config):
        model: str = "silent"
        start: Literal["well", "config_error", "unavailable"] = "well"
        close: Literal["well", "hang"] = "well"
        answer: Literal["well", "nobody"] = "well"
        chat: Literal["well", "refuse"] = "well"
        api_key: SecretStr | None = None
        url: str | None = None
        urls: str | list[str] = ""
        seconds: float | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    async def start(self) -> None:
        journal.append(f"start {self.config.model}")
        if self.config.start == "config_error":
            raise ConfigError("there is no such model. Name another.")
        if self.config.start == "unavailable":
            raise StoreUnavailable("Nobody answers there.")

    async def close(self) -> None:
        journal.append(f"close {self.config.model}")
        if self.config.close == "hang":
            Event().wait()

    async def models(self) -> Sequence[Model]:
        if self.config.answer == "nobody":
            raise UpstreamError("Nobody serves here.")
        return [Model(self.config.model, "tests")]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if self.config.chat == "refuse":
            raise InvalidRequest("It has no chat template.")
        for batch in ():
            yield batch

    async def count_tokens(self, request: ChatRequest) -> int:
        return 0


class Several(Silent):
    """An inference made of inferences."""

    class Config(Silent.Config):
        model: str = "several"
        providers: dict[str, dict[str, object]]

    def __init__(self, config: Config, providers: Mapping[str, Inference]) -> None:
        super().__init__(config)
        self.providers = providers


class Bare(KVStore):
    """A store that forgets at once."""

    def __init__(self, config: KVStore.Config) -> None:
        pass

    async def start(self) -> None:
        journal.append("start store")

    async def close(self) -> None:
        journal.append("close store")

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        return [None for _ in keys]

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        return [1 for _ in ops]

    async def scan(
        self,
        prefix: str,
        *,
        after: str = "",
        before: str = "",
        limit: int = 1000,
        reverse: bool = False,
        max_bytes: int | None = None,
    ) -> list[tuple[str, Entry]]:
        return []

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        return 0, ""

    async def sweep(self) -> int:
        return 0


class Idle(ToolRuntime):
    """Has no tools."""

    def __init__(self, config: ToolRuntime.Config, store: KVStore) -> None:
        self.store = store

    async def start(self) -> None:
        journal.append("start tools")

    async def close(self) -> None:
        journal.append("close tools")

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    async def call(self, call: ToolCall) -> ToolResult:
        raise NotImplementedError


class Quiet(Responses):
    """Makes no responses; shows what it was built of."""

    def __init__(
        self, config: Responses.Config, inference: Inference, store: KVStore, tools: ToolRuntime | None
    ) -> None:
        self.inference = inference
        self.store = store
        self.tools = tools

    async def start(self) -> None:
        journal.append("start responses")

    async def close(self) -> None:
        journal.append("close responses")


Quiet.__abstractmethods__ = frozenset()


class Circular(Silent):
    """An inference that needs the responses which need it."""

    def __init__(self, config: Silent.Config, responses: Responses) -> None:
        super().__init__(config)


class Greedy(Silent):
    """Asks for what is not an API."""

    def __init__(self, config: Silent.Config, size: int) -> None:
        super().__init__(config)


class Handy(Silent):
    """Cannot do without tools; what has a default is its own business."""

    def __init__(self, config: Silent.Config, tools: ToolRuntime, size: int = 1) -> None:
        super().__init__(config)


class Careless(Silent):
    """Forgets its config."""

    def __init__(self) -> None:
        super().__init__(self.Config())


def create_app(config: StackConfig) -> Starlette:
    """An app whose /stream begins at once and ends when the request's body does. Its inference section says how its
    start and its end go."""
    inference = Silent(Silent.Config.model_validate(config.inference.fields))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        try:
            await inference.start()
            yield
        finally:
            await inference.close()

    async def readyz(request: Request) -> Response:
        return PlainTextResponse("", 503 if request.app.state.draining else 200)

    async def stream(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"begun"
            async for _ in request.stream():
                pass
            yield b"ended"

        return StreamingResponse(chunks())

    async def flood(_request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65536

        return StreamingResponse(chunks())

    async def pid(_request: Request) -> Response:
        return PlainTextResponse(str(os.getpid()))

    endpoints = {"/readyz": readyz, "/stream": stream, "/flood": flood, "/pid": pid}
    routes = [Route(path, endpoint, methods=["GET", "POST"]) for path, endpoint in endpoints.items()]
    return Starlette(routes=routes, lifespan=lifespan)
