"""The proxy of a container against programs that want more than they may: hosts, addresses, names in TLS, bounds."""

import asyncio
import hashlib
import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from providers.tool_runtime.python.egress.proxy import open_proxy
from providers.tool_runtime.python.egress.settings import EgressCounts, NetworkSettings
from tests.support.servers.container_proxy import Opened, container_proxy, server_context
from tests.support.servers.fetcher_hosts import SITE, Canary, Site
from tests.support.waiting import until

HOST = "api.example.com"


@pytest.fixture
async def site() -> AsyncGenerator[Site]:
    async with Site() as site:
        site.page("/x", "the page", "text/plain")
        yield site


@pytest.fixture
async def canary() -> AsyncGenerator[Canary]:
    async with Canary() as canary:
        yield canary
        assert canary.connections == 0


def status(answer: bytes) -> int:
    return int(answer.split()[1])


async def test_a_plain_request_reaches_an_allowed_host(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        answer = await opened.get(
            f"http://{HOST}:{site.port}/x?a=b#c", "Proxy-Authorization: x", "Connection: X-A", "X-A: 1"
        )
        assert (status(answer), answer.endswith(b"the page")) == (200, True)
        ((method, path, headers, _),) = site.requests
        assert (method, path, headers["Host"]) == ("GET", "/x?a=b", f"{HOST}:{site.port}")
        assert not {"Proxy-Authorization", "X-A"} & {*headers}
        counts = opened.proxy.access.take_counts()
        assert (counts.connections, counts.refusals) == (1, 0)
        assert counts.received_bytes > len(answer) / 2
        assert opened.proxy.access.take_counts() == EgressCounts()


async def test_bodies_pass_in_both_directions(site: Site) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(20):
            await response.write(await request.read())
        return response

    site.pages["/echo"] = echo
    url, data = f"http://{HOST}:{site.port}/echo", b"a" * 100_000
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        head = f"POST {url} HTTP/1.1\r\nHost: {HOST}:{site.port}\r\n".encode()
        whole = head + b"Content-Length: 100000\r\n\r\n" + data
        chunked = (
            head + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n186a0\r\n" + data + b"\r\n0\r\n\r\n"
        )
        for request in (whole, chunked):
            answer = await opened.ask(request)
            assert answer.count(b"a") > 2_000_000
            assert site.requests[-1][3] == data
        assert answer.startswith(b"HTTP/1.1 100 ")


REFUSED = {
    "another host": ("http://evil.example/x", 403, b"The host evil.example is not in network_policy.allowed_domains"),
    "a name below": (f"http://a.{HOST}/x", 403, b"is not in network_policy.allowed_domains"),
    "another port": (f"http://{HOST}:22/x", 403, b"Port 22 of api.example.com is not open: see egress.allowed_hosts"),
    "the default port where one is named": (f"http://{HOST}/x", 403, b"Port 80"),
    "an address": ("http://127.0.0.1/x", 403, b"The host 127.0.0.1 is not in"),
    "the address of an allowed host": (f"http://{SITE}/x", 403, b"is not in"),
    "the metadata of a cloud": ("http://169.254.169.254/latest", 403, b"is not in"),
    "an odd address": ("http://0x7f.1/x", 400, b"usual spelling"),
    "a number": ("http://2130706433/x", 400, b"usual spelling"),
    "an address of IPv6": ("http://[::1]/x", 403, b"The host ::1 is not in"),
    "a user": (f"http://{HOST}@evil.example/x", 400, b"usual spelling"),
    "a scheme of files": ("file:///etc/passwd", 400, b"http://"),
    "TLS in plain": (f"https://{HOST}/x", 400, b"http://"),
    "no host": ("/x", 400, b"http://"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_is_refused_says_why(name: str, site: Site, canary: Canary) -> None:
    url, expected, text = REFUSED[name]
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        answer = await opened.ask(f"GET {url} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        assert status(answer) in (expected, 400 if b"Host header" in answer else expected)
        connect = url.partition("://")[2].partition("/")[0]
        matching = await opened.ask(f"GET {url} HTTP/1.1\r\nHost: {connect or 'x'}\r\n\r\n".encode())
        assert status(matching) == expected
        head, _, body = matching.partition(b"\r\n\r\n")
        assert text in body
        assert body.strip() in head.split(b"\r\n")[0]  # clients of tunnels show the reason alone
        assert opened.proxy.access.take_counts().refusals == 2
    assert site.requests == []


async def test_a_host_header_that_names_another_host_is_refused(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}", f"b.example:{site.port}"]) as opened:
        url = f"http://{HOST}:{site.port}/x"
        for host in (f"b.example:{site.port}", HOST, f"{HOST}:80", "evil.example", "a b"):
            assert status(await opened.ask(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())) == 400
        twice = f"GET {url} HTTP/1.1\r\nHost: {HOST}:{site.port}\r\nHost: b.example\r\n\r\n"
        assert status(await opened.ask(twice.encode())) == 400
    assert site.requests == []


async def test_a_second_request_after_the_first_is_never_sent(site: Site) -> None:
    authority = f"{HOST}:{site.port}"
    async with container_proxy([authority]) as opened:
        one = f"GET http://{authority}/x HTTP/1.1\r\nHost: {authority}\r\n\r\n"
        hidden = f"POST http://{authority}/x HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 5\r\n\r\nhello{one}"
        for pair in (one + one, hidden):
            answer = await opened.ask(pair.encode())
            assert answer.count(b"HTTP/1.1 200") == 1
        assert len(site.requests) == 2
        for broken in (
            one.replace("\r\n\r\n", "\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            one.replace("\r\n\r\n", "\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
            one.replace("\r\n\r\n", "\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
            one.replace("\r\n\r\n", "\r\nA: b\rX: y\r\n\r\n"),
            one.replace("GET", "GET\0"),
            one.replace("HTTP/1.1", "HTTP/1.1 HTTP/1.1"),
        ):
            assert b" 200 " not in await opened.ask(broken.encode())
    assert len(site.requests) == 2


# --- addresses -------------------------------------------------------------------------------------------------------


async def test_a_name_that_leads_to_a_private_address_is_refused(canary: Canary) -> None:
    private = {"a.example": [["127.0.0.1"]], "b.example": [["8.8.8.8", "10.0.0.1"]], "c.example": [["169.254.169.254"]]}
    hosts = [f"{name}:{canary.port}" for name in private]
    async with container_proxy(hosts, addresses=private) as opened:
        for host in hosts:
            answer = await opened.get(f"http://{host}/x")
            assert status(answer) == 403
            assert b"egress.allowed_private_networks" in answer
            async with opened.tunnel(host, status=403):
                pass


async def test_a_name_that_changes_its_address_gets_nothing(site: Site, canary: Canary) -> None:
    """Each connection is to the addresses that were checked for it: a second look-up never comes."""
    addresses = {"a.example": [[SITE], ["127.0.0.1"]]}
    async with container_proxy([f"a.example:{site.port}"], addresses=addresses) as opened:
        assert status(await opened.get(f"http://a.example:{site.port}/x")) == 200
        assert status(await opened.get(f"http://a.example:{site.port}/x")) == 403
    assert len(site.requests) == 1


async def test_a_host_without_an_address_or_a_server_is_said_to_be_so() -> None:
    addresses: dict[str, list[list[str]]] = {"nowhere.example": [[]]}
    async with container_proxy(["nowhere.example:1", "closed.example:1"], addresses=addresses) as opened:
        for host, text in (("nowhere.example", b"is not known"), ("closed.example", b"cannot be reached")):
            answer = await opened.get(f"http://{host}:1/")
            assert (status(answer), text in answer) == (502, True)


# --- tunnels ---------------------------------------------------------------------------------------------------------


async def test_tls_passes_untouched(tmp_path: Path) -> None:
    context, trusted = await server_context(tmp_path, HOST)
    async with Site(context) as site, container_proxy([f"{HOST}:{site.port}"]) as opened:
        body = os.urandom(3_000_000)
        site.page("/x", body)
        request = f"GET /x HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        answer = await opened.ask_over_tls(f"{HOST}:{site.port}", request, trusted)
        assert hashlib.sha256(answer.partition(b"\r\n\r\n")[2]).digest() == hashlib.sha256(body).digest()
        assert opened.proxy.access.certificates.count(b"BEGIN CERTIFICATE") > 10  # those of the system alone


async def test_a_tunnel_whose_tls_asks_for_another_host_ends(tmp_path: Path) -> None:
    context, trusted = await server_context(tmp_path, "evil.example")
    async with Site(context) as site, container_proxy([f"{HOST}:{site.port}"]) as opened:
        for name in ("evil.example", f"a.{HOST}"):
            with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
                await opened.ask_over_tls(f"{HOST}:{site.port}", "", trusted, name=name)
        with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):  # no name in clear
            await opened.ask_over_tls(f"{HOST}:{site.port}", "", trusted, name="127.0.0.1")
        assert opened.proxy.access.take_counts().refusals == 3
    assert site.requests == []


async def test_a_tunnel_carries_nothing_but_tls(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        for data in (b"GET /x HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\0\0"):
            async with opened.tunnel(f"{HOST}:{site.port}") as (reader, writer):
                writer.write(data)
                assert await reader.read() == b""
        early = f"CONNECT {HOST}:{site.port} HTTP/1.1\r\nHost: {HOST}:{site.port}\r\n\r\nGET /x HTTP/1.1\r\n\r\n"
        assert (await opened.ask(early.encode())).partition(b"\r\n\r\n")[2] == b""
    assert site.requests == []


@pytest.mark.parametrize(
    ("authority", "expected"),
    [
        ("evil.example:443", 403),
        ("api.example.com:22", 403),
        ("127.0.0.1:443", 403),
        ("api.example.com", 400),
        ("api.example.com:0", 400),
        ("api.example.com:99999", 400),
        ("user@api.example.com:443", 400),
    ],
)
async def test_a_tunnel_to_elsewhere_is_refused(authority: str, expected: int) -> None:
    async with container_proxy([HOST]) as opened:
        async with opened.tunnel(authority, status=expected):
            pass
        other = await opened.ask(f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n".encode())
        assert status(other) == 400


# --- bounds ----------------------------------------------------------------------------------------------------------


async def test_a_hundred_connections_of_a_container_wait_for_each_other(site: Site) -> None:
    limits: dict[str, Any] = {"max_container_connections": 8, "head_timeout_s": 0.1}
    async with container_proxy([f"{HOST}:{site.port}"], **limits) as opened, AsyncExitStack() as closing:
        opened_streams = [await opened.connect() for _ in range(100)]
        for _, writer in opened_streams:
            closing.callback(writer.transport.abort)
        assert status(await opened.get(f"http://{HOST}:{site.port}/x")) == 200
        assert opened.egress.places.used <= 8


async def test_a_body_in_chunks_of_one_byte_does_not_stop_the_others(site: Site) -> None:
    """Each chunk is work in a turn of its tenant: the event loop has many turns while they come."""
    iterations = 0

    async def count() -> None:
        nonlocal iterations
        while True:
            await asyncio.sleep(0)
            iterations += 1

    site.page("/x", "the page", "text/plain")
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        lines = [f"POST http://{HOST}:{site.port}/x HTTP/1.1", f"Host: {HOST}:{site.port}"]
        head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""])
        counting = asyncio.ensure_future(count())
        answer = await opened.ask(head.encode() + b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n")
        counting.cancel()
        assert status(answer) == 200
    assert site.requests[0][3] == b"a" * 10_000
    assert iterations > 10_000 / 64


async def test_one_tenant_leaves_connections_for_another(site: Site) -> None:
    hosts = [f"{HOST}:{site.port}"]
    site.endless("/endless", b"x", 0.01, {})
    async with (
        container_proxy(hosts, max_connections=4, max_container_connections=4) as greedy,
        AsyncExitStack() as open_streams,
    ):
        opened_streams = [await greedy.connect() for _ in range(4)]
        for reader, writer in opened_streams:
            open_streams.callback(writer.transport.abort)
            writer.write(f"GET http://{hosts[0]}/endless HTTP/1.1\r\nHost: {hosts[0]}\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
        assert greedy.egress.places.used == 4
        async with container_proxy(hosts, egress=greedy.egress, owner=("other", "cntr_2")) as other:
            asking = asyncio.ensure_future(other.get(f"http://{hosts[0]}/x"))
            await until(lambda: greedy.egress.places.waiting)
            again = asyncio.ensure_future(greedy.get(f"http://{hosts[0]}/x"))
            opened_streams[0][1].transport.abort()
            assert status(await asking) == 200
            await open_streams.aclose()
            assert status(await again) == 200


async def test_a_client_that_sends_its_head_slowly_is_cut_off() -> None:
    async with container_proxy([HOST], head_timeout_s=0.2) as opened:
        reader, writer = await opened.connect()
        async with asyncio.timeout(5):

            async def drip() -> None:
                for letter in f"GET http://{HOST}/".encode() * 100:
                    writer.write(bytes((letter,)))
                    await asyncio.sleep(0.01)

            dripping = asyncio.ensure_future(drip())
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            dripping.cancel()
            writer.transport.abort()


async def test_a_silent_connection_ends(site: Site) -> None:
    site.endless("/silent", b"x", 60, {})
    async with container_proxy([f"{HOST}:{site.port}"], idle_timeout_s=0.2) as opened:
        answer = await opened.get(f"http://{HOST}:{site.port}/silent")
        assert answer.startswith(b"HTTP/1.1 200")
        await asyncio.wait_for(site.dropped.wait(), 5)


async def test_a_connection_that_never_ends_is_cut_off(site: Site) -> None:
    site.endless("/endless", b"x", 0.01, {})
    async with container_proxy([f"{HOST}:{site.port}"], connection_timeout_s=0.3) as opened:
        assert (await opened.get(f"http://{HOST}:{site.port}/endless")).startswith(b"HTTP/1.1 200")
        await asyncio.wait_for(site.dropped.wait(), 5)


async def test_the_bytes_of_a_container_are_bounded(site: Site) -> None:
    site.page("/large", b"x" * 200_000)
    url = f"http://{HOST}:{site.port}"
    async with container_proxy([f"{HOST}:{site.port}"], container_bytes=300_000) as opened:
        assert len(await opened.get(f"{url}/large")) > 200_000
        assert 0 < len(await opened.get(f"{url}/large")) < 150_000
        answer = await opened.get(f"{url}/x")
        assert (status(answer), b"egress.max_container_mib" in answer) == (403, True)
        assert len(site.requests) == 2
        owner = (opened.proxy.access.tenant, opened.proxy.access.container)
        again = await open_proxy(opened.egress, owner, NetworkSettings([HOST]), (), opened.proxy.access.use)
        assert not again.access.count(EgressCounts())  # a program that ends its sandbox gains no bytes


async def test_a_head_that_is_too_long_is_refused(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        assert status(await opened.get(f"http://{HOST}:{site.port}/x", f"A: {'x' * 20_000}")) == 431
    assert site.requests == []


async def test_a_container_that_ends_takes_its_connections_along(site: Site) -> None:
    site.endless("/endless", b"x", 0.01, {})
    async with container_proxy([f"{HOST}:{site.port}"]) as opened:
        asking = asyncio.ensure_future(opened.get(f"http://{HOST}:{site.port}/endless"))
        await asyncio.wait_for(site.reached.wait(), 5)
        await opened.proxy.close()
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), ConnectionError) or b"\r\n\r\n" in asking.result()
        await asyncio.wait_for(site.dropped.wait(), 5)
        assert opened.egress.places.used == 0
        with pytest.raises(OSError, match=r"(?i)refused|connect"):
            await opened.connect()


# --- hosts that answer oddly -----------------------------------------------------------------------------------------

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
ANSWERS = {
    "no HTTP": (b"SSH-2.0-x\r\n\r\n", 502, b"did not answer in proper HTTP"),
    "nothing": (b"", 502, b"did not answer in proper HTTP"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 502, b"proper HTTP"),
    "an upgrade": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 502, b"proper HTTP"),
    "a head without end": (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000, 502, b"proper HTTP"),
    "a body until its end": (b"HTTP/1.0 200 OK\r\n\r\nwhole", 200, b"whole"),
    "chunks and a length": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\n\r\n",
        200,
        b"5\r\nwhole\r\n0\r\n\r\n",
    ),
    "early hints": (
        b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole",
        200,
        b"whole",
    ),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "another answer after it": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwholeHTTP/1.1 200 OK\r\n\r\n",
        200,
        b"whole",
    ),
}


@asynccontextmanager
async def answering(data: bytes) -> AsyncGenerator[tuple[Opened, int]]:
    """Yield a container that may reach a site of raw bytes, its only answer, and the site's port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, SITE, 0)
    port = server.sockets[0].getsockname()[1]
    async with server, container_proxy([f"{HOST}:{port}"]) as opened:
        yield opened, port


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_odd_answer_is_passed_on_whole_or_not_at_all(name: str) -> None:
    data, expected, body = ANSWERS[name]
    async with answering(data) as (opened, port):
        received = await opened.get(f"http://{HOST}:{port}/x")
        assert status(received) == expected
        assert body in received.partition(b"\r\n\r\n")[2]
        assert received.count(b"HTTP/1.") == 1


async def test_a_cut_answer_is_seen_to_be_cut() -> None:
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n5\r\nhal"
    async with answering(cut) as (opened, port):
        received = b""
        with suppress(ConnectionError):
            received = await opened.get(f"http://{HOST}:{port}/x")
        assert not received.endswith(b"0\r\n\r\n")


async def test_an_answer_that_comes_before_the_body_was_sent_is_passed_on() -> None:
    async with answering(b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n") as (opened, port):
        head = f"POST http://{HOST}:{port}/x HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Length: 1000\r\n\r\n"
        assert status(await opened.ask(head.encode())) == 413
