"""The HTTP client of the search services: connections that stay open, and proxies."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from apis.errors import ConfigError
from providers.tool_runtime.exa import Exa
from providers.tool_runtime.searxng import SearXNG
from tests.support.servers.fake_search import failure_of, search, started

PASSWORD = "proxy-password"


class CountingServer:
    """Answers every GET with an empty list of results and refuses every other method; records what it gets."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["CountingServer"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        body = json.dumps({"results": []}).encode()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                status = b"200 OK" if head.startswith("GET ") else b"502 Bad Gateway"
                cookie = b"Set-Cookie: a=b\r\n"
                writer.write(b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, cookie, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def server() -> AsyncGenerator[CountingServer]:
    async with CountingServer().listening() as server:
        yield server


async def test_searches_share_a_connection_and_no_cookies(server: CountingServer) -> None:
    async with started(SearXNG(SearXNG.Config(base_url=server.url))) as runtime:
        for _ in range(3):
            await runtime.call(search())
    assert (server.connections, len(server.requests)) == (1, 3)
    assert not [head for head in server.requests if "cookie" in head.lower()]


async def test_the_proxy_of_the_config_is_used_for_http(server: CountingServer) -> None:
    proxy = server.url.replace("//", f"//user:{PASSWORD}@")
    config = SearXNG.Config.model_validate({"base_url": "http://search.example", "proxy": proxy})
    assert PASSWORD not in f"{config!r} {config.model_dump()}"
    async with started(SearXNG(config)) as runtime:
        await runtime.call(search())
    assert server.requests[0].startswith("GET http://search.example/search?q=who&format=json HTTP/1.1\r\n")
    assert "\r\nproxy-authorization: Basic " in server.requests[0].replace("Proxy-Authorization", "proxy-authorization")


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY"])
async def test_the_proxy_of_the_environment_is_used_for_https(
    server: CountingServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, server.url)
    config = Exa.Config.model_validate({"api_key": "key-of-exa", "base_url": "https://search.example"})
    async with started(Exa(config)) as runtime:
        assert "could not be reached" in (await failure_of(runtime, search())).message
    assert server.requests[0].startswith("CONNECT search.example:443 HTTP/1.1\r\n")
    assert "key-of-exa" not in server.requests[0]


async def test_hosts_of_no_proxy_are_reached_without_it(
    server: CountingServer, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config = SearXNG.Config.model_validate({"base_url": f"https://127.0.0.1:{unused_tcp_port}"})
    async with started(SearXNG(config)) as runtime:
        await failure_of(runtime, search())
    assert server.connections == 0


@pytest.mark.parametrize("proxy", [f"ftp://user:{PASSWORD}@a.example", f"http://user:{PASSWORD}@a.example:x"])
async def test_a_proxy_of_another_form_is_refused_without_its_password(proxy: str) -> None:
    with pytest.raises(ConfigError, match=r"tool_runtime\.proxy") as failure:
        await SearXNG(SearXNG.Config.model_validate({"proxy": proxy})).start()
    assert PASSWORD not in str(failure.value)
    assert failure.value.__cause__ is None
