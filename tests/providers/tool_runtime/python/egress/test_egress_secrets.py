"""Secrets of a container: they reach their host over TLS that is verified, and come back as placeholders."""

import asyncio
import base64
import json
import logging
import ssl
import zlib
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from providers.tool_runtime.python.egress.settings import SecretValue
from tests.support.servers.container_proxy import Opened, container_proxy, server_context
from tests.support.servers.fetcher_hosts import Site
from tests.support.waiting import until

HOST = "api.example.com"
SECRET = "sk-0123456789-the-secret"
OTHER = "sk-9876543210-of-another-host"


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Site]:
    """A host over TLS whose certificate the proxy trusts; it returns its requests."""
    context, trusted = await server_context(tmp_path, HOST)
    file = tmp_path / "trusted.pem"
    await asyncio.to_thread(file.write_bytes, trusted)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    async with Site(context) as site:
        site.pages["/echo"] = echo
        yield site


async def echo(request: web.Request) -> web.StreamResponse:
    """All that a request says, in its head, its body and in Base64."""
    said = {**request.headers, "path": request.path_qs, "body": (await request.read()).decode()}
    said["basic"] = base64.b64encode(request.headers.get("Authorization", "").encode()).decode()
    return web.Response(text=json.dumps(said), headers={"X-Echo": request.headers.get("Authorization", "")})


def request_of(site: Site, *headers: str, path: str = "/echo", body: str = "") -> str:
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}:{site.port}", f"Content-Length: {len(body)}", *headers, "", body]
    return "\r\n".join(lines)


async def ask(opened: Opened, site: Site, request: str, host: str = HOST) -> bytes:
    return await opened.ask_over_tls(f"{host}:{site.port}", request, opened.proxy.access.certificates)


async def test_a_host_gets_the_secret_and_the_program_a_placeholder_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened:
        placeholder = opened.proxy.access.environment["API_KEY"]
        assert SECRET not in str(opened.proxy.access.environment)
        basic = base64.b64encode(f"user:{placeholder}".encode()).decode()
        for header in (
            f"Authorization: Bearer {placeholder}",
            f"Authorization: Basic {basic}",
            f"X-Key: {placeholder}",
        ):
            answer = await ask(opened, site, request_of(site, header, "Accept-Encoding: gzip", "Range: bytes=0-9"))
            assert answer.startswith(b"HTTP/1.1 200")
            assert placeholder.encode() in answer.partition(b"\r\n\r\n")[2]
            assert SECRET.encode() not in answer
            assert base64.b64encode(SECRET.encode())[:-4] not in answer
        sent = [headers for _, _, headers, _ in site.requests]
        assert sent[0]["Authorization"] == f"Bearer {SECRET}"
        assert base64.b64decode(sent[1]["Authorization"].removeprefix("Basic ")) == f"user:{SECRET}".encode()
        assert (sent[2]["X-Key"], sent[2]["Accept-Encoding"], "Range" in sent[2]) == (SECRET, "identity", False)
    assert SECRET not in caplog.text
    assert "/echo" not in caplog.text
    assert f"host={HOST} port={site.port} decision='connected'" in caplog.text


async def test_a_secret_is_put_into_headers_alone(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened:
        placeholder = opened.proxy.access.environment["API_KEY"]
        request = request_of(site, path=f"/echo?key={placeholder}", body=placeholder)
        answer = await ask(opened, site, request)
        assert answer.startswith(b"HTTP/1.1 200")
        ((_, path, _, body),) = site.requests
        assert (path, body) == (f"/echo?key={placeholder}", placeholder.encode())


async def test_a_secret_is_for_its_own_host(site: Site) -> None:
    """Another host's TLS passes untouched, and so does its placeholder; over plain HTTP no secret is sent."""
    secrets = {(HOST, "API_KEY"): SECRET}
    async with Site() as plain:
        hosts = [f"{HOST}:{site.port}", f"{HOST}:{plain.port}", f"b.example:{site.port}"]
        async with container_proxy(hosts, domains=[HOST, "b.example"], secrets=secrets) as opened:
            header = f"Authorization: Bearer {opened.proxy.access.environment['API_KEY']}"
            await opened.get(f"http://{HOST}:{plain.port}/", header)
            assert plain.requests[0][2]["Authorization"] == header.partition(" ")[2]
            with pytest.raises(ssl.SSLCertVerificationError):  # its own certificate, which is not for this name
                await ask(opened, site, request_of(site, header), "b.example")
    assert site.requests == []


async def test_a_container_knows_no_secret_of_another(site: Site) -> None:
    hosts = [f"{HOST}:{site.port}"]
    async with container_proxy(hosts, secrets={(HOST, "API_KEY"): SECRET}) as mine:
        owner, secrets = ("other", "cntr_2"), {(HOST, "API_KEY"): OTHER}
        async with container_proxy(hosts, egress=mine.egress, owner=owner, secrets=secrets) as others:
            placeholder = mine.proxy.access.environment["API_KEY"]
            assert others.proxy.access.environment["API_KEY"] != placeholder
            await ask(others, site, request_of(site, f"Authorization: {placeholder}"))
            assert site.requests[0][2]["Authorization"] == placeholder
            trusted = others.proxy.access.certificates
            with pytest.raises(ssl.SSLCertVerificationError):  # nor does it trust the other's authority
                await mine.ask_over_tls(f"{HOST}:{site.port}", request_of(site), trusted)


async def test_a_host_that_is_not_the_one_gets_nothing(tmp_path: Path, site: Site) -> None:
    (tmp_path / "evil").mkdir()
    context, _ = await server_context(tmp_path / "evil", HOST)
    async with (
        Site(context) as evil,
        container_proxy([f"{HOST}:{evil.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened,
        opened.tunnel(f"{HOST}:{evil.port}", status=502),
    ):
        pass
    assert evil.requests == []


async def test_tls_that_asks_the_proxy_for_another_host_ends(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened:
        trusted = opened.proxy.access.certificates
        for name in ("b.example", "127.0.0.1"):
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await opened.ask_over_tls(f"{HOST}:{site.port}", "", trusted, name=name)
        for wrong in (
            request_of(site).replace(f"Host: {HOST}", "Host: b.example"),
            request_of(site).replace("POST /echo", f"POST http://b.example:{site.port}/echo"),
            request_of(site).replace("POST /echo", f"CONNECT b.example:{site.port}"),
        ):
            assert (await ask(opened, site, wrong)).startswith(b"HTTP/1.1 400")
    assert site.requests == []


async def test_an_answer_in_which_no_secret_can_be_found_is_not_passed_on(site: Site) -> None:
    async def compressed(request: web.Request) -> web.Response:
        body = zlib.compress(request.headers["Authorization"].encode())
        return web.Response(body=body, headers={"Content-Encoding": "deflate"})

    site.pages["/compressed"] = compressed
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened:
        header = f"Authorization: {opened.proxy.access.environment['API_KEY']}"
        answer = await ask(opened, site, request_of(site, header, path="/compressed"))
        assert answer.startswith(b"HTTP/1.1 502")
        assert b"compressed its answer" in answer


async def test_connections_that_break_off_leave_room_for_others(site: Site) -> None:
    """In the middle of an answer, in TLS and before it: each place is given back, also where its transport is gone."""

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"a line\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    site.pages["/cut"] = cut
    limits: dict[str, Any] = {"max_container_connections": 2, "max_connections": 2}
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}, **limits) as opened:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\0", b"") * 2:
            async with opened.tunnel(f"{HOST}:{site.port}") as (reader, writer):
                writer.write(data)
                writer.write_eof()
                with suppress(ConnectionError):
                    await reader.read()
        for _ in range(4):
            with suppress(ConnectionError, ssl.SSLError):
                await ask(opened, site, request_of(site, path="/cut"))
        assert (await ask(opened, site, request_of(site))).startswith(b"HTTP/1.1 200")
        await until(lambda: not opened.egress.places.used)


@pytest.mark.parametrize("header", ["Range", "If-Range", "Request-Range", "x-ms-range", "A-IM"])
async def test_no_header_asks_a_host_for_a_part_of_an_answer(site: Site, header: str) -> None:
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened:
        answer = await ask(opened, site, request_of(site, f"{header}: bytes=0-9"))
        assert answer.startswith(b"HTTP/1.1 200")
    assert header.lower() not in {name.lower() for name in site.requests[0][2]}


@pytest.mark.parametrize("status", [206, 226])
async def test_a_part_of_an_answer_is_not_passed_on(site: Site, status: int) -> None:
    """A host may take its range from a query: parts of a secret are not recognized."""

    async def part(request: web.Request) -> web.Response:
        return web.Response(status=status, text=request.headers["Authorization"][: int(request.query["to"])])

    site.pages["/part"] = part
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened:
        header = f"Authorization: {opened.proxy.access.environment['API_KEY']}"
        answer = await ask(opened, site, request_of(site, header, path="/part?to=12"))
        assert answer.startswith(b"HTTP/1.1 502")
        assert b"a part alone" in answer
        assert SECRET[:12].encode() not in answer


async def test_a_secret_that_a_host_kept_does_not_come_back_in_plain(site: Site) -> None:
    notes: list[str] = []

    async def keep(request: web.Request) -> web.Response:
        notes.append(request.headers["X-Note"])
        return web.Response()

    async def show(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(text=notes[0], headers={"X-Note": notes[0], "x-" + notes[0]: "a name"})

    site.pages["/keep"] = keep
    async with Site() as plain:
        plain.pages["/tell"] = show
        hosts = [f"{HOST}:{site.port}", f"{HOST}:{plain.port}"]
        async with container_proxy(hosts, secrets={(HOST, "API_KEY"): SECRET}) as opened:
            placeholder = opened.proxy.access.environment["API_KEY"]
            await ask(opened, site, request_of(site, f"X-Note: {placeholder}", path="/keep"))
            assert notes == [SECRET]
            answer = await opened.get(f"http://{HOST}:{plain.port}/tell", "Accept-Encoding: gzip")
            assert (answer.count(placeholder.encode()), SECRET.encode() in answer) == (3, False)


async def test_headers_that_secrets_make_too_long_are_not_sent(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): "x" * 60_000}) as opened:
        header = f"X-Note: {opened.proxy.access.environment['API_KEY'] * 300}"
        assert (await ask(opened, site, request_of(site, header))).startswith(b"HTTP/1.1 431")
    assert site.requests == []


async def test_a_stream_is_redacted_as_it_comes(site: Site) -> None:
    is_read = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"data: 1\n\n", f"data: {SECRET[:9]}".encode()):
            await response.write(piece)
        await asyncio.wait_for(is_read.wait(), 5)
        await response.write(f"{SECRET[9:]}\n\n".encode())
        return response

    site.pages["/stream"] = stream
    async with (
        container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): SECRET}) as opened,
        opened.tunnel(f"{HOST}:{site.port}") as (reader, writer),
    ):
        context = ssl.create_default_context(cadata=opened.proxy.access.certificates.decode())
        await writer.start_tls(context, server_hostname=HOST)
        writer.write(request_of(site, path="/stream").encode())
        assert await reader.readuntil(b"data: 1\n\n")
        is_read.set()
        rest = await reader.read()
        assert SECRET[:9].encode() not in rest
        assert f"{opened.proxy.access.environment['API_KEY']}\n\n".encode() in rest


async def test_a_new_value_replaces_the_former_one(site: Site) -> None:
    async with container_proxy([f"{HOST}:{site.port}"], secrets={(HOST, "API_KEY"): "former-value"}) as opened:
        await opened.proxy.access.secrets.update([SecretValue(HOST, "API_KEY", SECRET)])
        await ask(opened, site, request_of(site, f"Authorization: {opened.proxy.access.environment['API_KEY']}"))
        assert site.requests[0][2]["Authorization"] == SECRET
