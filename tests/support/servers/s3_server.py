"""S3Server: a server that speaks the protocol of S3 (moto), and FaultyProxy: what can go wrong on the way to it."""

import asyncio
import io
import itertools
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import aiohttp
from aiohttp import web

from tests.support.servers.listening import listening_app
from tests.support.servers.ports import free_port

START_S: Final = 30.0
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
Fault = Literal["slow_down", "error", "applied_error", "half", "cut", "applied_cut", "flipped", "forbidden", "slow", ""]


class S3Server:
    """A process of moto on a free loopback port. Every test takes a bucket of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self.url = ""

    def __enter__(self) -> "S3Server":
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/moto-api/", timeout=1).close()
                return self
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.__exit__()
                    raise
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def new_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{next(self._numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=10).close()
        return name


class FaultyProxy:
    """Forwards requests to `target`. `choose_fault` is asked for each one: by its method and its path."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.choose_fault: Callable[[str, str], Fault] = lambda _method, _path: ""
        self.requests: list[tuple[str, str]] = []
        self.url = ""
        self.hold: asyncio.Event | None = None
        """While it is set to an event, requests wait for that before they are forwarded."""
        self.arrived = asyncio.Event()
        """Set once a request waits."""

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator["FaultyProxy"]:
        """Listen on a free port for as long as the context lasts."""
        app = web.Application(client_max_size=2**30)
        async with aiohttp.ClientSession(auto_decompress=False) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session)

            app.router.add_route("*", "/{path:.*}", handle)
            async with listening_app(app) as self.url:
                yield self

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        fault = self.choose_fault(request.method, request.path)
        body = await request.read()
        if self.hold is not None and request.method != "GET":
            self.arrived.set()
            await self.hold.wait()
        if fault == "slow":
            await asyncio.sleep(3600)  # until the client leaves
        if fault == "slow_down":
            text = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            return web.Response(status=503, text=text)
        if fault == "error":
            return web.Response(status=500, text="<Error><Code>InternalError</Code></Error>")
        if fault == "forbidden":
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>")
        if fault == "cut":
            return await _cut(request)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in ("host", "expect")}
        target = f"{self._target}{request.raw_path}"
        async with session.request(request.method, target, data=io.BytesIO(body), headers=headers) as answer:
            answered = await answer.read()
            answer_headers = {key: value for key, value in answer.headers.items() if key.lower() in _KEPT_HEADERS}
            status = answer.status
        if fault == "applied_error":
            return web.Response(status=500, text="<Error><Code>InternalError</Code></Error>")
        if fault == "applied_cut":
            return await _cut(request)
        if fault == "flipped" and answered:
            answered = answered[:-1] + bytes([answered[-1] ^ 1])
        if request.method == "HEAD":
            return web.Response(
                status=status, headers={**answer_headers, "content-length": answer.headers["content-length"]}
            )
        if fault == "half":
            response = web.StreamResponse(
                status=status, headers={**answer_headers, "content-length": str(len(answered))}
            )
            await response.prepare(request)
            await response.write(answered[: len(answered) // 2])
            return await _cut(request)
        return web.Response(status=status, body=answered, headers=answer_headers)


_KEPT_HEADERS: Final = ("content-type", "etag", "last-modified", "content-range", "accept-ranges")


async def _cut(request: web.Request) -> Any:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
