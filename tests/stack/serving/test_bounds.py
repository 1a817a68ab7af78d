"""Bounds on what clients can make one process hold: pipelined requests, connections, bodies, streams, WebSockets."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from apis.errors import Overloaded, RateLimited
from apis.fair_share import Place
from providers.common.fair_turns import turn_of
from providers.common.held_bytes import PLACE_BYTES
from stack.http.shares import RequestShares
from stack.server_config import HttpServerConfig
from stack.serving import open_connections
from stack.serving.connection import HttpServerConnection
from stack.serving.open_connections import OpenConnections, TrackedPeer
from tests.stack.http.raw import JSON, KEYS, ask, bearer, check_error, connection, parse, request, send
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until


@asynccontextmanager
async def opened(served: Served) -> AsyncGenerator[ClientConnection]:
    url = served.url.replace("http", "ws", 1) + "/v1/responses"
    async with asyncio.timeout(30), connect(url, proxy=None) as websocket:
        yield websocket


MIB = 1024 * 1024
HELLO: dict[str, Any] = {"model": "scripted", "input": "hi"}


# --- pipelined requests ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def pipelining(
    gate: asyncio.Event,
) -> AsyncGenerator[tuple[HttpServerConnection, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose app echoes the path of each request once the gate is open."""

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        await gate.wait()
        body = scope["path"].encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", interface="asgi3", access_log=False)
    config.load()
    loop = asyncio.get_running_loop()
    protocols: list[HttpServerConnection] = []

    def create() -> HttpServerConnection:
        protocols.append(HttpServerConnection(config, ServerState(), {}, loop))
        return protocols[-1]

    server = await loop.create_server(create, "127.0.0.1", 0)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            await asyncio.sleep(0.01)
            yield protocols[0], reader, writer
        finally:
            writer.close()
            server.close()


async def test_pipelined_requests_wait_unparsed_and_are_answered_in_order() -> None:
    """However many requests are pipelined, a few are parsed; all are answered, in order."""
    gate, count = asyncio.Event(), 10_000
    async with pipelining(gate) as (protocol, reader, writer):
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(count)))
        await until(lambda: protocol.pipeline)
        await asyncio.sleep(0.05)
        waiting = len(protocol.pipeline)
        print(f"{waiting} of {count} requests are parsed")
        assert waiting < 300
        gate.set()
        for number in range(count):
            await reader.readuntil(b"\r\n\r\n")
            path = b"/%d" % number
            assert await reader.readexactly(len(path)) == path


async def test_a_pipeline_is_forgotten_with_its_connection() -> None:
    """Requests that wait when the client leaves are freed at once."""
    gate = asyncio.Event()
    async with pipelining(gate) as (protocol, _, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        await until(lambda: protocol.pipeline)
        writer.transport.abort()
        while protocol.pipeline:  # as above
            gate.set()
            await asyncio.sleep(0.01)


async def test_garbage_after_a_request_does_not_spoil_its_response() -> None:
    gate = asyncio.Event()
    async with pipelining(gate) as (_, reader, writer):
        writer.write(b"GET /first HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n")
        await asyncio.sleep(0.05)
        gate.set()
        raw = await reader.read()
    assert raw.count(b"HTTP/1.1") == 1
    assert raw.endswith(b"/first")


# --- connections -----------------------------------------------------------------------------------------------------


class Silent:
    """A connection of which the registry needs nothing but this."""

    def __init__(self, *, is_silent: bool = True) -> None:
        self.is_silent = is_silent
        self.timeout_keep_alive: float = 5
        self.is_closing_now = False
        self.was_closed_at_once: bool | None = None
        self.transport = self
        self.peer: TrackedPeer | None = None

    def is_closing(self) -> bool:
        return self.is_closing_now

    def body_writer(self) -> Callable[[bytes], bool]:
        raise AssertionError("nothing is sent on a silent connection")

    def refuse_silent(self, *, at_once: bool) -> None:
        self.is_closing_now, self.was_closed_at_once = True, at_once
        if at_once and self.peer is not None:
            self.peer.close()


def enter(registry: OpenConnections, address: str, now: float, *, is_silent: bool = True) -> Silent:
    silent = Silent(is_silent=is_silent)
    silent.peer = registry.open(cast(HttpServerConnection, silent), address, turn_of(address), now)
    return silent


async def test_silent_connections_of_one_address_close_each_other() -> None:
    """An address has so many connections without authentication; others are not touched."""
    registry = OpenConnections(4096, 200, 75)
    neighbour = enter(registry, "10.0.0.2", 0)
    connection = enter(registry, "10.0.0.1", 0)
    assert connection.peer is not None
    connection.peer.admit(turn_of("a"))
    flood = [enter(registry, "10.0.0.1", 10 * number) for number in range(5000)]
    assert sum(not each.is_closing_now for each in flood) == 200
    assert flood[-1].is_closing_now is False
    assert (neighbour.is_closing_now, connection.is_closing_now) == (False, False)
    assert connection.timeout_keep_alive == 75


async def test_requests_that_run_and_new_connections_are_not_closed() -> None:
    registry = OpenConnections(4096, 200, 75)
    flood = [enter(registry, "10.0.0.1", number / 1000) for number in range(900)]
    flood += [enter(registry, "10.0.0.3", number, is_silent=False) for number in range(900)]
    assert not any(each.is_closing_now for each in flood)


async def test_a_burst_from_one_address_is_served_while_the_server_has_room() -> None:
    """By default, 5,000 connections may be open before the first of them sends its request."""
    config = HttpServerConfig()
    registry = OpenConnections(config.max_connections, config.max_silent_per_address, 75)
    burst = [enter(registry, "127.0.0.1", number / 500) for number in range(5000)]
    assert not any(each.is_closing_now for each in burst)
    assert not registry.is_crowded


async def test_a_refused_connection_makes_room_at_once() -> None:
    """Its client has a moment to read the refusal, in which it does not count."""
    registry = OpenConnections(4, 2, 75)
    refused = [enter(registry, "10.0.0.1", 10 * number) for number in range(20)]
    assert [each.was_closed_at_once for each in refused] == [False] * 18 + [None] * 2
    assert not registry.is_crowded


async def test_a_full_server_closes_the_oldest_anonymous_connection_or_the_new_one() -> None:
    """From however many addresses they come."""
    registry = OpenConnections(100, 200, 75)
    limit = 100 + open_connections.PROBE_RESERVE
    silent = [enter(registry, f"10.0.{number}.1", 0.0) for number in range(limit + 50)]
    assert [each.is_closing_now for each in silent] == [True] * 50 + [False] * limit
    for each in silent[50:]:
        assert each.peer is not None
        each.peer.admit(turn_of("a"))
    assert registry.is_crowded
    late = enter(registry, "10.1.0.1", 0.0, is_silent=False)
    assert late.is_closing_now


async def test_a_crowded_server_answers_probes_and_refuses_others_in_the_form_of_the_api() -> None:
    """`/healthz` and `/readyz` have a reserve; all else gets a 503 that SDKs understand."""
    async with serving(server={"max_connections": 2}) as served, AsyncExitStack() as open_ends:
        for _ in range(2):
            await open_ends.enter_async_context(opened(served))
        for path in ("/healthz", "/readyz"):
            assert (await ask(served.url, method="GET", path=path)).status == 200
        refused = await ask(served.url, HELLO)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.json["error"]["code"] == "overloaded"


async def test_a_connection_without_authentication_idles_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a 401, and after a probe, too."""
    monkeypatch.setattr(HttpServerConnection, "anonymous_idle_s", 0.1)
    async with serving(server={"api_keys": ["sk-one"]}) as served:
        for path, closes in (("/v1/models", True), ("/healthz", True), ("/v1/models", False)):
            key = [] if closes else [("authorization", "Bearer sk-one")]
            head = request(served.url, method="GET", path=path, headers=key).replace(b"connection: close\r\n", b"")
            async with connection(served.url) as (reader, writer):
                writer.write(head)
                await reader.readuntil(b"}")
                if closes:
                    await reader.read()
                else:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.3):
                            await reader.read()


@pytest.mark.parametrize("sends_rest", [False, True], ids=["half a body", "a whole body"])
async def test_a_connection_idles_after_a_response_that_was_complete_before_its_request(
    *, sends_rest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpServerConnection, "anonymous_idle_s", 0.2)
    gate = asyncio.Event()
    gate.set()
    async with pipelining(gate) as (_, reader, writer):
        writer.write(b"POST /first HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + bytes(70_000))
        await reader.readuntil(b"/first")
        if sends_rest:
            writer.write(bytes(30_000) + b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"/second")
        async with asyncio.timeout(2):
            assert await reader.read() == b""


@pytest.mark.parametrize("sent", ["", "POST /v1/resp"], ids=["silent", "half a head"])
async def test_a_silent_connection_that_makes_room_gets_a_503(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `Retry-After`, and it is not reset when its client goes on."""
    monkeypatch.setattr(open_connections, "_MIN_AGE_S", 0.0)
    limits = {"max_silent_per_address": 1, "api_keys": KEYS}
    async with serving(server=limits) as served, connection(served.url) as (reader, writer):
        writer.write(sent.encode())
        await asyncio.sleep(0.05)  # else its bytes could come after the refusal
        assert (await ask(served.url, HELLO, headers=bearer("sk-one"))).status == 200
        writer.write(request(served.url, HELLO, headers=bearer("sk-one"))[len(sent) :])
        answer = parse(await reader.read())
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        assert answer.json["error"]["code"] == "overloaded"


async def test_a_burst_of_connections_that_write_late_is_served() -> None:
    """All connections are open before the first request is sent."""
    async with serving(server={"api_keys": KEYS}) as served, AsyncExitStack() as open_ends:
        burst = [await open_ends.enter_async_context(connection(served.url)) for _ in range(300)]
        for _, writer in burst:
            writer.write(request(served.url, method="GET", path="/v1/models", headers=bearer("sk-one")))
        assert {parse(await reader.read()).status for reader, _ in burst} == {200}


# --- bodies, streams, WebSockets -------------------------------------------------------------------------------------


async def test_bodies_in_progress_share_a_budget() -> None:
    """Bodies that are not whole count, a small one always fits, and what has ended is free again."""
    limits = {"max_body_bytes": 2 * MIB, "max_bodies_bytes": 4 * MIB}
    async with serving(server=limits) as served:
        head = request(served.url, headers=[("content-length", str(2 * MIB))])
        async with AsyncExitStack() as open_ends:
            for _ in range(2):
                _, writer = await open_ends.enter_async_context(connection(served.url))
                writer.write(head + b" " * (2 * MIB - 1000))
            for _ in range(200):
                reader, writer = await open_ends.enter_async_context(connection(served.url))
                writer.write(head + b" " * MIB)
                try:
                    async with asyncio.timeout(0.1):
                        first = await reader.readuntil(b"\r\n\r\n")
                except TimeoutError:
                    continue
                answer = parse(first + await reader.readuntil(b"}}"))
                break
            else:
                pytest.fail("no body was refused")
            assert check_error(answer, 503)["code"] == "overloaded"
            assert answer.headers["retry-after"] == "1"
            assert (await ask(served.url, HELLO)).status == 200
        large = {**HELLO, "input": "x" * MIB}
        async with asyncio.timeout(5):
            while (await ask(served.url, large)).status != 200:
                pass


def upload(url: str, size: int, key: str, *, is_whole: bool = True) -> bytes:
    """A request with a file of so many bytes."""
    head = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--x\r\n'
    head += b'content-disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    body = head + b"x" * size + b"\r\n--x--\r\n"
    kind = "multipart/form-data; boundary=x"
    sent = request(url, body, path="/v1/files", headers=bearer(key), kind=kind)
    return sent if is_whole else sent[:-5]


async def test_uploads_in_progress_share_the_disk() -> None:
    """One tenant's uploads leave room for another's from the first one on, and what has ended is free again."""
    limits = {"max_uploads_bytes": 6 * MIB, "api_keys": KEYS}
    async with serving(server=limits, more={"files": {"provider": "kv"}}) as served:
        async with AsyncExitStack() as open_ends:
            _, writer = await open_ends.enter_async_context(connection(served.url))
            writer.write(upload(served.url, int(1.9 * MIB), "sk-one", is_whole=False))
            shares = served.app.state.services.shares
            await until(lambda: shares._uploads.used * PLACE_BYTES >= 1.8 * MIB)
            refused = await send(served.url, upload(served.url, 2 * MIB, "sk-one"))
            assert check_error(refused, 503)["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            assert (await send(served.url, upload(served.url, 2 * MIB, "sk-two"))).status == 200
        async with asyncio.timeout(5):
            while (await send(served.url, upload(served.url, 2 * MIB, "sk-one"))).status != 200:
                pass
        assert shares._uploads.used == 0


async def test_one_file_has_room_however_small_the_share_of_its_tenant_is() -> None:
    """The only upload of a tenant may be of the largest size, and leaves the rest to others; a file for which
    there is never room is a 413."""
    limits = {"max_uploads_bytes": 6 * MIB, "api_keys": KEYS}
    files = {"provider": "kv", "max_file_bytes": 4 * MIB}
    async with serving(server=limits, more={"files": files}) as served:
        assert (await send(served.url, upload(served.url, 4 * MIB, "sk-one"))).status == 200
        async with connection(served.url) as (_, writer):
            writer.write(upload(served.url, int(3.9 * MIB), "sk-one", is_whole=False))
            shares = served.app.state.services.shares
            await until(lambda: shares._uploads.used * PLACE_BYTES >= 3.8 * MIB)
            check_error(await send(served.url, upload(served.url, 2 * MIB, "sk-one")), 503)
            assert (await send(served.url, upload(served.url, MIB, "sk-two"))).status == 200
    async with serving(server={**limits, "max_uploads_bytes": 3 * MIB}, more={"files": files}) as served:
        refused = check_error(await send(served.url, upload(served.url, 4 * MIB, "sk-one")), 413)
        assert "server.max_uploads_bytes" in refused["message"]
        assert (await send(served.url, upload(served.url, int(2.9 * MIB), "sk-one"))).status == 200


async def test_an_upload_without_room_on_the_disk_is_a_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be tried again, and leaves a line in the log instead of a traceback."""
    async with serving(server={"api_keys": KEYS}, more={"files": {"provider": "kv"}}) as served:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        refused = await send(served.url, upload(served.url, 2 * MIB, "sk-one"))
        assert check_error(refused, 503)["code"] == "overloaded"
        assert refused.headers["retry-after"] == "5"
    assert not [record for record in caplog.records if record.exc_info]


def test_one_tenant_takes_half_of_a_share_where_there_are_two() -> None:
    """Places of bodies, streams and WebSockets."""
    shares = RequestShares(HttpServerConfig(max_bodies_bytes=128 * MIB, max_streams=4, max_websockets=2), 1 << 30)
    one: list[Place] = [shares.open_stream("a")]
    other = shares.open_stream("b")
    one.append(shares.open_stream("a"))
    with pytest.raises(RateLimited, match="max_streams"):
        shares.open_stream("a")
    one[0].release()
    one.append(shares.open_stream("a"))
    other.release()
    shares.open_websocket("a")
    shares.open_websocket("b")
    with pytest.raises(RateLimited, match="max_websockets"):
        shares.open_websocket("b")
    shares.cover_body([], 100, "b")
    places: list[Place] = []
    shares.cover_body(places, 32 * MIB, "a")
    assert len(places) * PLACE_BYTES == 32 * MIB
    shares.cover_body([], 32 * MIB, "b")
    shares.cover_body([], 32 * MIB, "a")
    with pytest.raises(Overloaded, match="max_bodies_bytes"):
        shares.cover_body([], MIB, "a")


async def test_streams_and_websockets_beyond_the_limit_are_a_429() -> None:
    """Each is refused before any work, and its place is free when it has ended."""
    endless = scripted([{"text": "once "}, {"wait_s": 30}])
    async with serving(endless, server={"max_streams": 1, "max_websockets": 1}) as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, {**HELLO, "stream": True}))
            await reader.readuntil(b"output_text.delta")
            error = check_error(await ask(served.url, {**HELLO, "stream": True}, kind=JSON), 429)
            assert error["code"] == "rate_limit_exceeded"
        async with opened(served):
            with pytest.raises(InvalidStatus, match="429"):
                async with opened(served):
                    pass
        await until(lambda: not served.app.state.services.shares._streams.used)
