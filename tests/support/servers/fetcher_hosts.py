"""Real servers on loopback for what fetches: a site that may be fetched from, and a canary that never may."""

import asyncio
import gzip
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import pytest
from aiohttp import web

from apis.documents.fetcher import FetchRequest, FetchResponse
from apis.errors import FetchFailed
from providers.common.net.checked_hosts import HostResolver
from providers.fetcher.safe import GuardedFetcher

SITE: Final = "127.0.0.2"
"""The one loopback address that the tests open; the canary has all the others."""


class Canary:
    """Listens on every address of the machine, and counts who comes."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> "Canary":
        first = await asyncio.start_server(self._count, "0.0.0.0", 0, family=socket.AF_INET)
        self.port = first.sockets[0].getsockname()[1]
        second = await asyncio.start_server(self._count, "::", self.port, family=socket.AF_INET6)
        self._servers = [first, second]
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\nSECRET")
        writer.close()


class Site:
    """A web server on `SITE` whose pages a test sets; it records the requests."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.pages: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        self.requests: list[tuple[str, str, Mapping[str, str], bytes]] = []
        self.reached = asyncio.Event()
        self.dropped = asyncio.Event()
        self.sent_bytes = 0
        self.port = 0
        self.url = ""
        self._context = context
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, SITE, 0, ssl_context=self._context).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"{'https' if self._context else 'http'}://{SITE}:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def page(self, path: str, body: bytes | str, media_type: str = "text/html", **headers: str) -> str:
        """Serve `body` at `path`; returns its URL."""
        data = body.encode() if isinstance(body, str) else body

        async def answer(request: web.Request) -> web.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.Response(body=data, headers={"Content-Type": media_type, **named})

        self.pages[path] = answer
        return self.url + path

    def redirect(self, path: str, location: str, status: int = 302) -> str:
        """Lead from `path` to `location`; returns the URL of `path`."""

        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": location})

        self.pages[path] = answer
        return self.url + path

    def endless(self, path: str, piece: bytes, pause_s: float, headers: Mapping[str, str]) -> str:
        """Send `piece` for ever, `pause_s` apart; returns the URL."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers=dict(headers))
            try:
                await response.prepare(request)
                while True:
                    await response.write(piece)
                    self.sent_bytes += len(piece)
                    self.reached.set()
                    await asyncio.sleep(pause_s)
            finally:
                self.dropped.set()

        self.pages[path] = answer
        return self.url + path

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs, request.headers, await request.read()))
        page = self.pages.get(request.path)
        return await page(request) if page else web.Response(status=404, text="nothing here")


@asynccontextmanager
async def raw_server(*pieces: bytes, pause_s: float = 0.0) -> AsyncGenerator[tuple[str, int]]:
    """A server on `SITE` that sends these bytes on each connection, then waits for its close; yields URL and port."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(send, SITE, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://{SITE}:{port}", port
    finally:
        server.close()


@asynccontextmanager
async def fetching(
    ports: Sequence[int], resolve: HostResolver | None = None, **fields: Any
) -> AsyncGenerator[GuardedFetcher]:
    """A started GuardedFetcher that may go to these ports, and to `SITE`."""
    config = {"allowed_ports": list(ports), "allowed_private_networks": [f"{SITE}/32"], **fields}
    safe = GuardedFetcher(GuardedFetcher.Config.model_validate(config), resolve)
    await safe.start()
    try:
        yield safe
    finally:
        await safe.close()


def answers(*rounds: Sequence[str]) -> tuple[HostResolver, list[str]]:
    """Return a resolver with these answers, one round after the other and then the last again, and the hosts that it
    resolved."""
    resolved_hosts: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        resolved_hosts.append(host)
        return rounds[min(len(resolved_hosts), len(rounds)) - 1]

    return resolve, resolved_hosts


def gzip_bomb(inflated_bytes: int) -> bytes:
    return gzip.compress(b"\0" * inflated_bytes)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


async def certificate(folder: Path, name: str, *addresses: str) -> tuple[Path, Path]:
    """A self-signed certificate for `name` and the addresses, and its key."""
    names = ",".join([f"DNS:{name}", *(f"IP:{address}" for address in addresses)])
    cert, key = folder / "cert.pem", folder / "key.pem"
    openssl = await asyncio.create_subprocess_exec(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(cert),
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-addext",
        f"subjectAltName={names}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(20):
        assert await openssl.wait() == 0
    return cert, key


async def fetch(safe: GuardedFetcher, url: str, **fields: Any) -> FetchResponse:
    """One request, in bounded time."""
    async with asyncio.timeout(20):
        return await safe.fetch(FetchRequest(url, **fields))


async def failure_of(safe: GuardedFetcher, url: str, **fields: Any) -> str:
    """How a request fails: in words that can be shown."""
    with pytest.raises(FetchFailed) as failure:
        await fetch(safe, url, **fields)
    assert failure.value.__cause__ is None
    assert failure.value.message.isprintable()
    assert len(failure.value.message) < 500
    return failure.value.message
