"""Bounds on the work that one client causes with small pieces: frames, chunks, trailers, unfinished messages."""

import asyncio
import json
import logging
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from websockets.asyncio.client import ClientConnection, connect

from apis.errors import UpstreamTimeout
from providers.common.held_bytes import PLACE_BYTES
from stack.http.answers import error_response
from stack.serving.connection import HttpServerConnection
from stack.serving.response_transport import ResponseTransport
from stack.serving.socket_connection import WebSocketServerConnection
from tests.stack.http.raw import HELLO, KEYS, ask, bearer, check_error, connection, parse, request
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

MIB = 1024 * 1024
MASK = bytes(4)
CREATE: dict[str, Any] = {"type": "response.create", "model": "scripted", "input": "hi"}


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """One frame of a client, whose mask changes nothing."""
    size = len(payload)
    length = struct.pack("!B", 0x80 | size) if size < 126 else struct.pack("!BQ", 0xFF, size)
    return struct.pack("!B", (0x80 if fin else 0) | opcode) + length + MASK + payload


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncGenerator[Served]:
    async with serving(server={"max_body_bytes": 65536}) as running:
        yield running


@asynccontextmanager
async def upgraded(served: Served, key: str = "") -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A WebSocket by hand, open."""
    lines = ["GET /v1/responses HTTP/1.1", f"host: {urlsplit(served.url).netloc}", "connection: Upgrade"]
    lines += ["upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="]
    lines += [f"authorization: Bearer {key}"] if key else []
    async with connection(served.url) as (reader, writer):
        writer.write("\r\n".join([*lines, "", ""]).encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        yield reader, writer


@asynccontextmanager
async def opened(served: Served) -> AsyncGenerator[ClientConnection]:
    url = served.url.replace("http", "ws", 1) + "/v1/responses"
    async with asyncio.timeout(30), connect(url, proxy=None, max_size=None) as websocket:
        yield websocket


async def close_code(reader: asyncio.StreamReader) -> int:
    """The code of the close frame, after any other frames."""
    while True:
        first, length = await reader.readexactly(2)
        if length == 126:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
        payload = await reader.readexactly(length)
        if first == 0x88:
            return struct.unpack("!H", payload[:2])[0]


@asynccontextmanager
async def largest_step(read_count: Callable[[], int]) -> AsyncGenerator[list[int]]:
    """While the block runs, the most that the count grew by in one iteration of the event loop is in the list."""
    largest = [0]

    async def watch() -> None:
        before = read_count()
        while True:
            await asyncio.sleep(0)
            now = read_count()
            largest[0], before = max(largest[0], now - before), now

    watching = asyncio.create_task(watch())
    try:
        yield largest
    finally:
        watching.cancel()


# --- frames of WebSockets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [0x9, 0xA], ids=["pings", "pongs"])
@pytest.mark.parametrize("payload", [b"", b"x" * 125], ids=["empty", "full"])
async def test_a_flood_of_control_frames_closes_its_connection(opcode: int, payload: bytes) -> None:
    """More than a hundred in a second are a breach of policy; the bytes after them are not parsed."""
    async with serving() as served, upgraded(served) as (reader, writer):
        writer.write(frame(opcode, payload) * 20_000)
        assert await close_code(reader) == 1008
    async with serving() as served, upgraded(served) as (reader, writer):
        writer.write(frame(opcode, payload) * 50 + frame(0x1, json.dumps(CREATE).encode()))
        received = b""
        while b"response.completed" not in received:
            received += await reader.read(65536)


async def test_few_frames_are_parsed_in_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come at once, on however many connections of one tenant."""
    monkeypatch.setattr(WebSocketServerConnection, "max_control_frames", 1_000_000)
    count, handle = 0, WebSocketServerConnection.handle_pong

    def count_and_handle(self: WebSocketServerConnection, event: Any) -> None:
        nonlocal count
        count += 1
        handle(self, event)

    monkeypatch.setattr(WebSocketServerConnection, "handle_pong", count_and_handle)
    async with (
        serving() as served,
        upgraded(served) as (_, one),
        upgraded(served) as (_, other),
        largest_step(lambda: count) as largest,
    ):
        for writer in (one, other):
            writer.write(frame(0xA) * 5000)
        await until(lambda: count >= 10_000)
    assert 0 < largest[0] <= 400


@pytest.mark.parametrize("text", [b"{", b""], ids=["broken", "empty"])
async def test_few_messages_are_answered_in_one_iteration(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that cost their sender nothing are each answered, a few at a time; another tenant is served."""
    count, send = 0, WebSocketServerConnection.send

    async def count_and_send(self: WebSocketServerConnection, message: Any) -> None:
        nonlocal count
        count += 1
        await send(self, message)

    monkeypatch.setattr(WebSocketServerConnection, "send", count_and_send)
    async with (
        serving(server={"api_keys": KEYS}) as served,
        upgraded(served, "sk-one") as (reader, writer),
        largest_step(lambda: count) as largest,
    ):
        writer.write(frame(0x1, text) * 1000)
        assert (await ask(served.url, HELLO, headers=bearer("sk-two"))).status == 200
        at_answer = count
        for _ in range(1000):
            await reader.readuntil(b"}}")
    assert at_answer < 900
    assert 0 < largest[0] <= 8


async def test_unfinished_messages_are_counted_as_they_come() -> None:
    """In the same share as the bodies of HTTP requests, whether in one frame or in fragments."""
    limits = {"max_body_bytes": 2 * MIB, "max_bodies_bytes": 4 * MIB}
    async with serving(server=limits) as served:
        shares = served.app.state.services.shares
        async with AsyncExitStack() as open_ends:
            _, one = await open_ends.enter_async_context(upgraded(served))
            one.write(frame(0x1, b" " * (2 * MIB - 1000))[:-1])
            _, other = await open_ends.enter_async_context(upgraded(served))
            other.write(frame(0x1, b" " * MIB, fin=False) + frame(0x0, b" " * (MIB - 1000), fin=False))
            await until(lambda: shares.bytes.used >= 4 * MIB // PLACE_BYTES)
            reader, third = await open_ends.enter_async_context(upgraded(served))
            third.write(frame(0x1, b" " * MIB)[:-1])
            assert await close_code(reader) == 1013
            large = await ask(served.url, {**HELLO, "input": "x" * MIB})
            assert check_error(large, 503)["code"] == "overloaded"
            one.write(b" ")  # the message is whole, and no JSON
            await until(lambda: shares.bytes.used <= 2 * MIB // PLACE_BYTES)
        await until(lambda: not shares.bytes.used)
        async with opened(served) as websocket:
            await websocket.send(json.dumps({**CREATE, "input": "x" * MIB}))
            while b'"response.completed"' not in await websocket.recv(decode=False):
                pass


@pytest.mark.parametrize("begin", [b"\x81", frame(0x1, b"{")[:-1], frame(0x1, b"", fin=False)])
async def test_an_unfinished_message_has_a_limit_of_time(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be slower than 1 KiB/s, like the body of a request; pings do not make it faster."""
    monkeypatch.setattr(HttpServerConnection, "body_s", 0.1)
    async with serving() as served, upgraded(served) as (reader, writer):
        writer.write(begin)
        assert await close_code(reader) == 1008
        async with opened(served) as idle:  # without a message there is no limit
            await asyncio.sleep(0.25)
            await (await idle.ping())


@pytest.mark.parametrize(
    "frames",
    [frame(0x1, b"\xff"), frame(0x1, b'"\xc3', fin=False) + frame(0x0, b"x"), frame(0x8, b"\x03\xe8\xff")],
    ids=["one frame", "fragments", "the reason of a close"],
)
async def test_text_that_is_no_utf8_leaves_no_line_in_the_log(frames: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A client cannot fill the log with tracebacks."""
    caplog.set_level(logging.INFO)
    async with serving() as served, upgraded(served) as (reader, writer):
        writer.write(frames)
        assert await close_code(reader) == 1007
    assert not [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info]


async def test_a_close_after_many_messages_is_answered() -> None:
    """Messages that wait unparsed when either side closes do not keep the connection open."""
    async with serving() as served, opened(served) as websocket:
        for _ in range(10):
            await websocket.send("x" * 5000)
        await websocket.close()
        assert websocket.close_code == 1000


# --- chunks and trailers of HTTP --------------------------------------------------------------------------------------


def chunked(url: str, *, key: str = "", body: bytes = b"") -> bytes:
    """The head of a request, the chunk of its body, and the size of the last chunk, after which trailers come."""
    headers = [("transfer-encoding", "chunked"), *(bearer(key) if key else [])]
    return request(url, headers=headers) + b"%x\r\n%b\r\n0\r\n" % (len(body), body)


async def test_few_chunks_of_one_byte_are_parsed_in_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on several connections of one address."""
    count, on_body = 0, HttpServerConnection.on_body

    def count_and_take(self: HttpServerConnection, body: bytes) -> None:
        nonlocal count
        count += 1
        on_body(self, body)

    monkeypatch.setattr(HttpServerConnection, "on_body", count_and_take)
    async with serving() as served, AsyncExitStack() as open_ends:
        head = request(served.url, headers=[("transfer-encoding", "chunked")])
        async with asyncio.timeout(30), largest_step(lambda: count) as largest:
            for _ in range(4):
                _, writer = await open_ends.enter_async_context(connection(served.url))
                writer.write(head + b"1\r\n \r\n" * 5000)
            await until(lambda: count >= 20_000)
    assert 0 < largest[0] <= 2500


async def test_trailers_are_no_headers() -> None:
    """Headers after the body have no effect on how the request is checked."""
    body = json.dumps(HELLO).encode()
    async with serving(server={"api_keys": KEYS}) as served:
        for key, status in (("", 401), ("sk-one", 200)):
            async with connection(served.url) as (reader, writer):
                writer.write(chunked(served.url, key=key, body=body))
                writer.write(b"authorization: Bearer sk-two\r\nhost: x\r\nexpect: 100-continue\r\n\r\n")
                answer = parse(await reader.read())
                assert answer.status == status


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "trailers",
    [b"a:b\r\n" * 300, b"a: " + b"b" * 70_000, b"a" * 70_000, b"1;" + b"a" * 70_000],
    ids=["fields", "one value", "one name", "an extension of a chunk"],
)
async def test_trailers_count_with_the_head(trailers: bytes, server: Served) -> None:
    """256 fields and 64 KiB together; the client learns it where the response has not begun."""
    async with connection(server.url) as (reader, writer):
        head = chunked(server.url, body=b" ")
        writer.write(head.removesuffix(b"0\r\n") + trailers if trailers.startswith(b"1;") else head + trailers)
        assert parse(await reader.read()).status == 431


@pytest.mark.asyncio(loop_scope="module")
async def test_trailers_without_end_close_a_connection_that_was_answered(server: Served) -> None:
    """A request that was refused before its body was read."""
    async with connection(server.url) as (reader, writer):
        writer.write(chunked(server.url, key="x", body=b" " * 70_000).replace(b"connection: close\r\n", b""))
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):  # noqa: PT012  # whichever write notices it
            while True:
                writer.write(b"a:b\r\n" * 1000)
                await writer.drain()
                await asyncio.sleep(0)
                if reader.at_eof():
                    raise ConnectionResetError


async def test_a_refusal_reaches_a_client_that_goes_on_sending() -> None:
    """Its system would reset a connection that was closed at once, and drop the answer."""
    async with serving(server={"max_body_bytes": MIB, "max_bodies_bytes": MIB}) as served:
        for _ in range(5):
            async with connection(served.url) as (reader, writer):
                writer.write(request(served.url, headers=[("content-length", str(64 * MIB))]) + bytes(4 * MIB))
                assert check_error(parse(await reader.read()), 413)


async def test_large_bodies_of_one_tenant_delay_no_other() -> None:
    """They are parsed one at a time, in turns with those of other tenants."""
    items = [{"type": "message", "role": "user", "content": "x" * 100} for _ in range(2000)]
    large = {"model": "scripted", "input": items, "store": "no"}
    async with serving(server={"api_keys": KEYS}) as served:
        loud = [asyncio.create_task(ask(served.url, large, headers=bearer("sk-one"))) for _ in range(24)]
        await asyncio.wait(loud, return_when=asyncio.FIRST_COMPLETED)
        quiet = await ask(served.url, {**large, "input": items[:600]}, headers=bearer("sk-two"))
        assert sum(each.done() for each in loud) <= 18  # in turns after a few; else after all
        for answer in (quiet, *await asyncio.gather(*loud)):
            assert check_error(answer, 400)["param"] == "store"


# --- the ends of connections and upstreams ----------------------------------------------------------------------------


def test_bytes_held_for_a_client_that_has_left_are_dropped() -> None:
    """They leave no error in the log."""
    errors = list[object]()

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        future = loop.create_future()

        class Server(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                future.set_result(transport)

        server = await loop.create_server(Server, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        transport = await future
        response = ResponseTransport(transport, loop, transport.close)
        response.write(b"head")
        response.write(b"a part of the body")
        transport.abort()
        await asyncio.sleep(0.01)
        assert response.held_data == b""
        response.write(b"more")
        response.flush()
        writer.close()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(leave())
    assert errors == []


def test_an_upstream_that_is_silent_is_worth_another_try_in_some_seconds() -> None:
    """504 says when, as 502 and 503 do."""
    response = error_response(UpstreamTimeout("The inference server sent no token in time."))
    assert (response.status_code, response.headers["retry-after"]) == (504, "1")


# --- large answers ----------------------------------------------------------------------------------------------------


async def test_large_answers_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours: a page of large items, a large response, and the last events of a large stream."""
    sizes, send = list[int](), RequestResponseCycle.send

    async def record_and_send(self: RequestResponseCycle, message: Any) -> None:
        sizes.append(len(message.get("body", b"")))
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", record_and_send)
    text = "x" * (3 * MIB)
    async with serving() as served:
        item = {"type": "message", "role": "user", "content": text}
        conversation = await ask(served.url, {"items": [item]}, path="/v1/conversations")
        path = f"/v1/conversations/{conversation.json['id']}/items"
        page = await ask(served.url, method="GET", path=path, kind=None)
        assert page.json["data"][0]["content"][0]["text"] == text
        response = await ask(served.url, {**HELLO, "input": text})
        assert response.json["output"][0]["content"][0]["text"] == text
        stream = await ask(served.url, {**HELLO, "input": text, "stream": True})
        assert stream.body.endswith(b"data: [DONE]\n\n")
        assert stream.body.count(text.encode()) >= 4
    assert sum(size > 256 * 1024 for size in sizes) <= 1  # the one delta
