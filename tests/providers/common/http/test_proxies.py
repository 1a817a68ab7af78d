"""Upstreams over an HTTP proxy: which proxy is used, forwarding and tunnels, and errors without credentials."""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from apis.deltas import Delta, TextDelta
from apis.errors import ConfigError, UpstreamError
from providers.common.net.http.client import HttpClient
from providers.common.net.http.route import Origin, Proxy, ProxyRules, parse_url
from providers.inference.vllm import VLLM
from tests.providers.common.http.proxy_server import ProxyServer
from tests.providers.common.http.test_client import certificate
from tests.providers.inference.remote import chat_request, sent, started
from tests.support.servers.upstream_server import HANG, Act, UpstreamServer, delta_chunk, stream, text_chunks

CREDENTIALS = "user:p%40ss-wörd"
SECRET = "p@ss-wörd"
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"
ANSWER = stream(text_chunks("Hel", "lo"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_direct"),
    [
        ("", "http://a.test", False),
        ("*", "http://a.test", True),
        ("a.test", "http://a.test", True),
        ("A.Test", "https://a.test", True),
        ("a.test", "http://b.a.test", True),
        ("a.test", "http://ba.test", False),
        (".a.test", "http://b.a.test", True),
        (".a.test", "http://a.test", False),
        ("*.a.test", "http://b.a.test", True),
        ("*.a.test", "http://a.test", False),
        ("x.test, a.test ,y.test", "http://a.test", True),
        ("a.test:8000", "http://a.test:8000", True),
        ("a.test:8000", "http://a.test:9000", False),
        ("a.test:443", "https://a.test", True),
        ("https://a.test", "https://a.test", True),
        ("https://a.test", "http://a.test", False),
        ("all://a.test", "http://a.test", True),
        ("localhost", "http://localhost:8000", True),
        ("localhost", "http://127.0.0.1:8000", False),
        ("127.0.0.1", "http://127.0.0.1:8000", True),
        ("10.0.0.0/8", "http://10.1.2.3", True),
        ("10.0.0.0/8", "http://11.1.2.3", False),
        ("10.0.0.0/8", "http://a.test", False),
        ("::1", "http://[::1]:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("[::1]:9000", "http://[::1]:8000", False),
        ("fd00::/8", "http://[fd00::1]", True),
    ],
)
def test_no_proxy_lists_hosts_suffixes_ports_and_networks(
    no_proxy: str, url: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy.test:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (ProxyRules.from_environment().find_proxy(parse_url(url)[0]) is None) is is_direct


def test_the_variable_of_the_scheme_comes_before_all_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, secure = Origin(tls=False, host="a.test", port=80), Origin(tls=True, host="a.test", port=443)
    assert ProxyRules.from_environment().find_proxy(plain) is None
    monkeypatch.setenv("https_proxy", "secure.test:1")
    rules = ProxyRules.from_environment()
    assert rules.find_proxy(plain) is None
    assert rules.find_proxy(secure) == Proxy(Origin(tls=False, host="secure.test", port=1))
    monkeypatch.setenv("ALL_PROXY", "http://[::1]:2")
    proxy = ProxyRules.from_environment().find_proxy(plain)
    assert proxy is not None
    assert proxy.name == "[::1]:2"


@pytest.mark.parametrize(
    "url",
    ["socks5://user:secret@h:1", "https://user:secret@h", "http://user:secret@h:secret", "http://user:secret@", ""],
)
async def test_an_invalid_proxy_is_an_error_without_its_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a proxy looks like") as raised:
        Proxy.parse(url)
    assert "secret" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    if not url:
        return
    with pytest.raises(ValidationError, match="a proxy looks like") as invalid:
        VLLM.Config.model_validate({"proxy": url})
    assert "secret" not in str(invalid.value.errors(include_input=False, include_context=False))
    monkeypatch.setenv("HTTP_PROXY", url)
    with pytest.raises(ConfigError, match="a proxy looks like") as refused:
        await VLLM(VLLM.Config.model_validate({})).start()
    assert "secret" not in str(refused.value)


def test_a_proxys_credentials_are_not_shown() -> None:
    proxy = Proxy.parse(f"http://{CREDENTIALS}@h:1")
    assert proxy.authorization.startswith(b"Proxy-Authorization: Basic ")
    assert "Basic" not in repr(proxy)
    config = VLLM.Config.model_validate({"proxy": f"http://{CREDENTIALS}@h:1"})
    assert "user" not in repr(config)


# --- forwarding and tunnels ------------------------------------------------------------------------------------------


async def chat_text(vllm: VLLM) -> str:
    deltas: list[Delta] = []
    async with aclosing(vllm.chat(chat_request())) as batches:
        async for batch in batches:
            deltas.extend(batch)
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


async def test_requests_to_a_plain_upstream_have_the_absolute_form() -> None:
    async with UpstreamServer(ANSWER) as upstream, ProxyServer(credentials=f"user:{SECRET}") as proxy:
        async with started(upstream.base_url, proxy=proxy.url.replace("//", f"//{CREDENTIALS}@")) as vllm:
            assert await chat_text(vllm) == "Hello"
            assert await chat_text(vllm) == "Hello"
        assert proxy.request_lines == [f"POST {upstream.base_url}/chat/completions HTTP/1.1"] * 2
        assert upstream.connections == 1
        assert "proxy-authorization" not in upstream.received[0].headers


@asynccontextmanager
async def tls_upstream(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Sequence[Act] = ANSWER
) -> AsyncGenerator[str]:
    """Serve the bytes of an answer over TLS, with a certificate that this test trusts; yield the base URL."""
    file = certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert b"Proxy-Authorization" not in head
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0] or 0)
                await reader.readexactly(length)
                writer.writelines(act for act in answer if isinstance(act, bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"


async def test_requests_to_a_tls_upstream_go_through_a_tunnel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        tls_upstream(tmp_path, monkeypatch) as base_url,
        ProxyServer(credentials=f"user:{SECRET}") as proxy,
        started(base_url, proxy=proxy.url.replace("//", f"//{CREDENTIALS}@")) as vllm,
    ):
        assert await chat_text(vllm) == "Hello"
        assert await chat_text(vllm) == "Hello"
        authority = base_url.removeprefix("https://").removesuffix("/v1")
        assert proxy.request_lines == [f"CONNECT {authority} HTTP/1.1"]


async def test_the_environments_proxy_is_used_unless_the_config_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with UpstreamServer(ANSWER) as upstream, ProxyServer() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        for field, lines in (("none", 0), ("", 1)):
            async with started(upstream.base_url, proxy=field) as vllm:
                assert await chat_text(vllm) == "Hello"
            assert len(proxy.request_lines) == lines
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        async with started(upstream.base_url) as vllm:
            assert await chat_text(vllm) == "Hello"
        assert len(proxy.request_lines) == 1


async def test_the_local_engines_client_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy.test:3128")
    assert HttpClient(idle_s=0).find_proxy(Origin(tls=False, host="127.0.0.1", port=1)) is None


# --- errors ----------------------------------------------------------------------------------------------------------


async def failing_chat(base_url: str, proxy: str) -> UpstreamError:
    url = proxy.replace("//", f"//{CREDENTIALS}@")
    async with started(base_url, proxy=url, max_retries=0) as vllm:
        with pytest.raises(UpstreamError) as raised:
            await chat_text(vllm)
    return raised.value


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (None, "refused the connection with HTTP status 407, its credentials may be missing or wrong."),
        (BAD_GATEWAY, "refused the connection with HTTP status 502."),
        (b"SSH-2.0-x\r\n\r\n", "sent an invalid response."),
    ],
)
async def test_a_refusal_names_the_proxy_without_credentials(
    scheme: str, refusal: bytes | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ProxyServer(credentials="another:one", refusal=refusal) as proxy:
        error = await failing_chat(f"{scheme}://upstream.test/v1", proxy.url)
    if scheme == "https" or refusal is None:
        assert error.message == f"The inference server could not be reached: the proxy {proxy.name} {message}"
    assert type(error) is UpstreamError or refusal is not None
    for text in (error.message, caplog.text, repr(error.__cause__)):
        assert "ss-w" not in text
        assert "user" not in text


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_dead_proxy_is_named(scheme: str) -> None:
    async with ProxyServer() as proxy:
        pass
    error = await failing_chat(f"{scheme}://upstream.test/v1", proxy.url)
    assert error.message == f"The inference server could not be reached: the proxy {proxy.name} could not be reached."


async def test_a_proxy_that_closes_before_the_tunnel_is_named() -> None:
    async def close_after_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(close_after_request, "127.0.0.1", 0) as server:
        name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        error = await failing_chat("https://upstream.test/v1", f"http://{name}")
    assert error.message == f"The inference server could not be reached: the proxy {name} closed the connection."


@pytest.mark.parametrize("tls", [False, True])
async def test_a_proxy_that_closes_in_the_middle_is_named(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning = [*sent(delta_chunk(content="Hel")), HANG]
    async with (
        UpstreamServer(beginning) as upstream,
        tls_upstream(tmp_path, monkeypatch, beginning) as tls_url,
        ProxyServer() as proxy,
        started(tls_url if tls else upstream.base_url, proxy=proxy.url) as vllm,
        aclosing(vllm.chat(chat_request())) as batches,
    ):
        assert await anext(batches) == [TextDelta("Hel")]
        await proxy.break_connections()
        with pytest.raises(UpstreamError) as raised:
            await anext(batches)
    message = f"The connection to the inference server through the proxy {proxy.name} broke before the answer ended."
    assert raised.value.message == message


async def test_a_silent_proxy_is_a_connect_timeout_that_names_it() -> None:
    async with (
        ProxyServer(refusal=b"") as proxy,
        started("https://upstream.test/v1", proxy=proxy.url, max_retries=0, connect_timeout_s=0.05) as vllm,
    ):
        with pytest.raises(UpstreamError, match=f"through the proxy {proxy.name} could not be reached within"):
            await chat_text(vllm)
