"""Local servers that speak the wire formats of Brave, Tavily and SearXNG, with every failure of `fake_exa`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from apis.errors import ToolFailed
from apis.tool_runtime import ToolCall, ToolRuntime
from tests.support.servers.fake_exa import FAILURES, HOSTILE, KEY
from tests.support.servers.listening import listening_app


@dataclass(frozen=True)
class Dialect:
    """How a service is asked, and the form of its answers. `key` is the header with the key, None where none is."""

    path: str
    method: str
    key: Mapping[str, str] | None
    answer: Callable[[list[Any]], Any]
    page: Callable[[int], dict[str, Any]]


class FakeSearch:
    """Answers each query by its text: a name of `FAILURES`, `hang` or `drip`, or else with `results`."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.results: list[Any] = [dialect.page(number) for number in range(1, 4)]
        self.requests: list[web.Request] = []
        self.bodies: list[dict[str, Any]] = []
        self.reached = asyncio.Event()
        self.dropped = asyncio.Event()
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["FakeSearch"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._search)
        async with listening_app(app) as self.url:
            yield self

    async def _search(self, request: web.Request) -> web.StreamResponse:
        assert (request.path, request.method) == (self.dialect.path, self.dialect.method)
        self.requests.append(request)
        if request.method == "POST":
            self.bodies.append(await request.json())
        query = request.query["q"] if request.method == "GET" else self.bodies[-1]["query"]
        if query in ("hang", "drip"):
            return await self._never_ending(request, query)
        if query in FAILURES:
            return FAILURES[query]()
        for name, value in (self.dialect.key or {}).items():
            if request.headers.get(name) != value:
                return web.json_response({"detail": HOSTILE}, status=401)
        return web.json_response(self.dialect.answer(self.results))

    async def _never_ending(self, request: web.Request, query: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            if query == "drip":
                await response.prepare(request)
            self.reached.set()
            while query == "drip":
                await response.write(b" ")
                await asyncio.sleep(0.02)
            await asyncio.Event().wait()
        finally:
            self.dropped.set()
        raise AssertionError("unreachable")


@asynccontextmanager
async def started(runtime: ToolRuntime) -> AsyncGenerator[ToolRuntime]:
    """A runtime between its start and its close."""
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.close()


def settings(server: FakeSearch, **fields: Any) -> dict[str, Any]:
    """The config of a provider that asks this server."""
    return {"api_key": KEY, "base_url": server.url, **fields}


def search(query: Any = "who", **options: Any) -> ToolCall:
    return ToolCall(id="call_1", name="search", arguments={"query": query}, options=options)


async def failure_of(runtime: ToolRuntime, call: ToolCall) -> ToolFailed:
    """How a call fails: in words, in bounded time."""
    async with asyncio.timeout(10):
        with pytest.raises(ToolFailed) as failure:
            await runtime.call(call)
    assert failure.value.__cause__ is None
    return failure.value
