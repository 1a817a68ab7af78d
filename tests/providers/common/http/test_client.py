"""The HTTP client of model servers: what may come over a connection, and when a connection serves again."""

import asyncio
import math
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from providers.common.fair_turns import CURRENT_TURN, TURN_WORK, turn_of
from providers.common.net.http.client import HttpClient, HttpConnectTimeout, headers_to_bytes
from providers.common.net.http.connection import (
    HIGH_WATER_BYTES,
    MAX_NON_BODY_BYTES,
    WRITE_CHUNK_BYTES,
    HttpConnection,
    HttpError,
)
from providers.common.net.http.route import parse_url
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    LAST_HTTP_CHUNK,
    Repeat,
    UpstreamServer,
    head,
    http_chunk,
    plain_answer,
)
from tests.support.waiting import until

CHUNKED = head() + http_chunk(b"ab") + http_chunk(b"cd") + LAST_HTTP_CHUNK
LENGTH = b"HTTP/1.1 200 OK\r\nX: 1\r\ncontent-length: 4\r\n\r\nabcd"


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.aborted = False
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def open_response() -> tuple[HttpConnection, Wire]:
    """An answer that is waited for."""
    answer, wire = HttpConnection(lambda _: None), Wire()
    answer.connection_made(wire)
    await answer.send_request(b"GET / HTTP/1.1\r\n\r\n", b"")
    return answer, wire


async def until_aborted(wire: Wire) -> None:
    """Much data is parsed in turns."""
    await until(lambda: wire.aborted)


async def read(answer: HttpConnection) -> bytes:
    async with asyncio.timeout(5):
        return await answer.read_body(1 << 30, math.inf)


@pytest.mark.parametrize("sent", [CHUNKED, LENGTH, b"HTTP/1.1 100 Continue\r\nx: 1\r\n\r\n" + LENGTH])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_an_answer_may_come_in_any_pieces(sent: bytes, step: int) -> None:
    answer, _ = await open_response()
    reading = asyncio.create_task(read(answer))
    for start in range(0, len(sent), step):
        answer.data_received(sent[start : start + step])
        await asyncio.sleep(0)
    assert await reading == b"abcd"
    assert (answer.status, answer.is_complete, answer.is_reusable) == (200, True, True)


async def test_a_wait_ends_only_with_a_piece_of_the_body_or_its_end() -> None:
    answer, _ = await open_response()
    answer.data_received(head())
    waiting = answer.wait_for_data(math.inf)
    for part in (b"2", b"\r", b"\n"):
        answer.data_received(part)
        assert not waiting.done()
    answer.data_received(b"a")
    await waiting
    assert answer.read_available() == b"a"
    assert not answer.is_ready


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (LENGTH + b"x", b"abcd"),
        (LENGTH + LENGTH, b"abcd"),
        (CHUNKED + CHUNKED, b"abcd"),
        (LENGTH.replace(b"X: 1", b"connection: close"), b"abcd"),
        (LENGTH.replace(b"1.1", b"1.0"), b"abcd"),
    ],
)
async def test_a_server_that_sends_excess_bytes_or_wants_to_close_gets_no_further_request(
    sent: bytes, body: bytes
) -> None:
    answer, _ = await open_response()
    answer.data_received(sent)
    assert await read(answer) == body
    assert not answer.is_reusable


async def test_a_server_that_sends_without_a_request_gets_no_further_request() -> None:
    answer, wire = await open_response()
    answer.data_received(LENGTH)
    answer.reset()
    answer.data_received(LENGTH)
    assert wire.aborted


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * MAX_NON_BODY_BYTES,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_NON_BODY_BYTES,
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_invalid_or_endless_http_is_a_failure(sent: bytes) -> None:
    answer, wire = await open_response()
    answer.data_received(sent)
    await until_aborted(wire)
    with pytest.raises(HttpError):
        answer.raise_if_failed()


async def test_trailers_have_a_bound() -> None:
    answer, wire = await open_response()
    answer.data_received(head() + http_chunk(b"ab") + b"0\r\n")
    assert answer.read_available() == b"ab"
    for _ in range(MAX_NON_BODY_BYTES // 1000 + 1):
        answer.data_received(b"x: " + b"y" * 995 + b"\r\n")
    await until_aborted(wire)
    with pytest.raises(HttpError):
        answer.read_available()


async def test_data_before_a_break_is_read_before_the_error() -> None:
    answer, _ = await open_response()
    answer.data_received(head() + http_chunk(b"ab"))
    answer.connection_lost(ConnectionResetError())
    assert answer.read_available() == b"ab"
    with pytest.raises(HttpError):
        answer.read_available()


async def test_a_server_that_sends_faster_than_is_read_has_to_wait() -> None:
    answer, wire = await open_response()
    answer.data_received(head())
    sent = 0
    while wire.reading:
        answer.data_received(http_chunk(b"x" * 1000))
        sent += 1000
    assert sent <= HIGH_WATER_BYTES
    for _ in range(100):
        await asyncio.sleep(0)
    assert not wire.reading
    received = 0
    while received < sent:
        if not answer.is_ready:
            await answer.wait_for_data(math.inf)
        received += len(answer.read_available())
    assert received == sent
    assert wire.reading


async def test_much_data_is_read_in_turns_between_which_other_tenants_are_served() -> None:
    """Neighbours: however much one tenant's model server sends at once, a piece of it is parsed in one iteration of
    the event loop, and another tenant's answer is read meanwhile."""
    CURRENT_TURN.set(turn_of("loud"))
    loud, loud_wire = await open_response()
    CURRENT_TURN.set(turn_of("quiet"))
    quiet, _ = await open_response()
    pieces = list[int]()
    loud.data_received(head())
    waiter = loud.push_data(lambda data: pieces.append(len(data)), math.inf)
    loud.data_received(http_chunk(b"x" * 200_000))
    assert (pieces, loud_wire.reading) == ([], False)
    quiet.data_received(head() + http_chunk(b"small"))
    assert quiet.read_available() == b"small"
    iterations = 0
    async with asyncio.timeout(5):
        while sum(pieces) < 200_000:
            await asyncio.sleep(0)
            iterations += 1
    assert max(pieces) <= TURN_WORK
    assert iterations >= 200_000 / TURN_WORK
    loud.data_received(LAST_HTTP_CHUNK)
    async with asyncio.timeout(5):
        await waiter
    assert (loud.is_complete, loud_wire.reading) == (True, True)


async def test_data_beyond_a_turn_is_read_where_it_is_little() -> None:
    """Neighbours: reading does not pause for what the next iteration parses, and a reader that is late gets it."""
    answer, wire = await open_response()
    answer.data_received(head())
    sent = 0
    while sent <= TURN_WORK:
        answer.data_received(http_chunk(b"x" * 1000))
        sent += 1000
    await asyncio.sleep(0)
    assert wire.reading
    received = len(answer.read_available())
    assert received < sent
    async with asyncio.timeout(5):
        while received < sent:
            await answer.wait_for_data(math.inf)
            received += len(answer.read_available())
    assert wire.reading


async def test_the_pieces_of_a_tenant_alone_are_larger() -> None:
    answer, _ = await open_response()
    answer.data_received(head())
    pieces = list[int]()
    answer.push_data(lambda data: pieces.append(len(data)), math.inf)
    answer.data_received(http_chunk(b"x" * 200_000))
    await until(lambda: sum(pieces) >= 200_000)
    assert TURN_WORK < max(pieces) <= 4 * TURN_WORK


async def test_a_wait_has_a_limit_that_can_move() -> None:
    answer, _ = await open_response()
    answer.data_received(head())
    now = asyncio.get_running_loop().time
    first = answer.wait_for_data(now() + 0.05)
    answer.data_received(http_chunk(b"a"))
    await first
    answer.read_available()
    until = now() + 0.15
    with pytest.raises(TimeoutError):
        await answer.wait_for_data(until)
    assert now() >= until


async def test_a_large_body_goes_out_as_the_server_takes_it() -> None:
    answer, wire = HttpConnection(lambda _: None), Wire()
    answer.connection_made(wire)
    answer.pause_writing()
    body = bytes(range(256)) * 1024
    sending = asyncio.create_task(answer.send_request(b"head ", body))
    await asyncio.sleep(0)
    assert wire.sent == b"head "
    answer.resume_writing()
    await sending
    assert wire.sent == b"head " + body
    answer.data_received(LENGTH)
    assert answer.is_reusable


async def test_an_answer_before_the_whole_question_ends_the_sending() -> None:
    answer, wire = HttpConnection(lambda _: None), Wire()
    answer.connection_made(wire)
    answer.pause_writing()
    sending = asyncio.create_task(answer.send_request(b"head", b"x" * 2 * WRITE_CHUNK_BYTES))
    await asyncio.sleep(0)
    answer.data_received(LENGTH)
    answer.resume_writing()
    await sending
    assert wire.sent == b"head"
    assert await read(answer) == b"abcd"
    assert not answer.is_reusable


# --- against servers -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def client(idle_s: float = 4) -> AsyncGenerator[HttpClient]:
    http = HttpClient(idle_s=idle_s)
    try:
        yield http
    finally:
        await http.close()


async def get(http: HttpClient, url: str) -> tuple[int, bytes]:
    async with asyncio.timeout(5):
        answer = await http.send("GET", url, b"", None, 5)
        try:
            return answer.status, await read(answer)
        finally:
            http.release(answer)


@pytest.mark.parametrize(("idle_s", "connections"), [(4, 1), (0, 3)])
async def test_connections_serve_again_where_they_may(idle_s: float, connections: int) -> None:
    async with UpstreamServer() as server, client(idle_s) as http:
        for _ in range(3):
            assert (await get(http, f"{server.base_url}/models"))[0] == 200
        assert server.connections == connections
        assert ("connection" in server.received[0].headers) is (idle_s == 0)


async def get_and_close(http: HttpClient, url: str) -> None:
    """Ask, and wait until the connection, which was kept, is closed."""
    async with asyncio.timeout(5):
        answer = await http.send("GET", url, b"", None, 5)
        await read(answer)
        assert answer.is_reusable
        http.release(answer)
        await until(lambda: answer.is_closing)


async def test_idle_connections_are_closed() -> None:
    async with UpstreamServer() as server, client(0.05) as http:
        await get_and_close(http, f"{server.base_url}/models")
        await get(http, f"{server.base_url}/models")
        assert server.connections == 2


async def test_an_idle_connection_that_the_server_closed_is_not_used() -> None:
    async with UpstreamServer() as server, client() as http:
        server.routes["/v1/x"] = [*plain_answer(b"ok"), CUT]
        await get_and_close(http, f"{server.base_url}/x")
        assert await get(http, f"{server.base_url}/x") == (200, b"ok")
        assert server.connections == 2


async def test_leaving_in_the_middle_closes_the_connection() -> None:
    async with UpstreamServer() as server, client() as http:
        server.routes["/v1/x"] = [head(), Repeat(http_chunk(b"x"), 0.01)]
        answer = await http.send("GET", f"{server.base_url}/x", b"", None, 5)
        http.release(answer)
        async with asyncio.timeout(5):
            await server.left.wait()


async def test_closing_the_client_ends_who_still_reads() -> None:
    async with UpstreamServer() as server, client() as http:
        server.routes["/v1/x"] = [head(), HANG]
        answer = await http.send("GET", f"{server.base_url}/x", b"", None, 5)
        reading = asyncio.create_task(read(answer))
        await asyncio.sleep(0)
        await http.close()
        with pytest.raises(HttpError):
            await reading
        with pytest.raises(HttpError):
            await http.send("GET", f"{server.base_url}/x", b"", None, 5)


async def test_a_closed_port_is_a_failure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with client() as http:
            with pytest.raises(HttpError):
                await http.send("GET", f"http://127.0.0.1:{unused.getsockname()[1]}/", b"", None, 5)


@pytest.mark.parametrize("host", ["a" * 64 + ".test", "nowhere.invalid", ".."])
async def test_a_host_that_is_none_is_a_failure(host: str) -> None:
    async with client() as http:
        with pytest.raises(HttpError):
            await http.send("GET", f"http://{host}:1/", b"", None, 5)


async def test_an_address_needs_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up wakes a thread: of 1,000 streams that begin at once, most waited for one of five threads."""
    look_ups: list[object] = []
    loop = asyncio.get_running_loop()
    look_up = loop.getaddrinfo

    async def observe(host: Any, *args: Any, **kwargs: Any) -> Any:
        look_ups.append(host)
        return await look_up(host, *args, **kwargs)

    monkeypatch.setattr(loop, "getaddrinfo", observe)
    async with UpstreamServer() as server, client() as http:
        url = f"{server.base_url}/models"
        assert (await get(http, url))[0] == 200
        assert look_ups == []
        assert (await get(http, url.replace("127.0.0.1", "localhost")))[0] == 200
        assert look_ups == ["localhost"]


def certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    file = folder / "certificate.pem"
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return file


async def test_a_server_over_tls_must_show_that_it_is_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(LENGTH)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}/"
        async with client() as http:
            with pytest.raises(HttpError):
                await get(http, url)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        async with client() as http:
            assert await get(http, url) == (200, b"abcd")
            assert await get(http, url) == (200, b"abcd")


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "host", "target"),
    [
        ("http://a", (False, "a", 80), b"a", b"/"),
        ("https://a:8/v1/x?y=1&z=\u00e4 b", (True, "a", 8), b"a:8", b"/v1/x?y=1&z=%C3%A4%20b"),
        ("http://[::1]:9/\u00e4 b/%20", (False, "::1", 9), b"[::1]:9", b"/%C3%A4%20b/%20"),
        ("http://b\u00fccher.test/v1", (False, "xn--bcher-kva.test", 80), b"xn--bcher-kva.test", b"/v1"),
    ],
)
def test_a_url_becomes_origin_host_and_target(
    url: str, origin: tuple[bool, str, int], host: bytes, target: bytes
) -> None:
    assert parse_url(url) == (origin, host, target)


def test_headers_cannot_break_out() -> None:
    assert headers_to_bytes({"A": "b"}) == b"A: b\r\n"
    for bad in ("b\r\nC: d", "b\n", "\0"):
        with pytest.raises(ValueError, match="header"):
            headers_to_bytes({"A": bad})


@pytest.mark.parametrize(("connect_timeout_s", "error"), [(20, HttpConnectTimeout), (60, TimeoutError)])
async def test_the_limit_that_was_reached_is_named_though_a_timer_is_early(
    monkeypatch: pytest.MonkeyPatch, connect_timeout_s: float, error: type[Exception]
) -> None:
    """Which limit it was is known from the limits, and not from the clock after the timer."""
    client = HttpClient()

    def end_at_once(_: float) -> asyncio.Timeout:
        return asyncio.timeout(0)

    async def never(_: object) -> HttpConnection:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(client, "_open_connection", never)
    monkeypatch.setattr(asyncio, "timeout_at", end_at_once)
    now = time.monotonic()
    with pytest.raises(error) as caught:
        await client.send("GET", "http://127.0.0.1:1/", b"", None, connect_timeout_s, now + 40)
    assert type(caught.value) is error
