"""Exa against a real local server: what it asks, what it makes of the answers, and what never gets out."""

import asyncio
import gzip
import json
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from apis.errors import ConfigError, ToolFailed
from apis.tool_runtime import Source, ToolCall
from providers.tool_runtime.exa import Exa
from tests.conformance.tool_runtime import LAWS, Subject
from tests.support.servers.fake_exa import FAILURES, KEY, FakeExa, page


@pytest.fixture
async def server() -> AsyncGenerator[FakeExa]:
    async with FakeExa() as server:
        yield server


@asynccontextmanager
async def started(url: str, **fields: Any) -> AsyncGenerator[Exa]:
    exa = Exa(Exa.Config.model_validate({"api_key": KEY, "base_url": url, **fields}))
    await exa.start()
    try:
        yield exa
    finally:
        await exa.close()


@pytest.fixture
async def exa(server: FakeExa) -> AsyncGenerator[Exa]:
    async with started(server.url) as exa:
        yield exa


def search(query: Any = "who", **options: Any) -> ToolCall:
    return ToolCall(id="call_1", name="search", arguments={"query": query}, options=options)


async def failure_of(exa: Exa, call: ToolCall) -> ToolFailed:
    async with asyncio.timeout(10):
        with pytest.raises(ToolFailed) as failure:
            await exa.call(call)
    return failure.value


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_conforms(server: FakeExa, law: Callable[[Subject], Awaitable[None]]) -> None:
    async with started(server.url, tool_timeout_s=1) as exa:
        await law(Subject(exa, search(), search("hang"), server.reached, server.dropped))


async def test_asks_as_exa_wants_to_be_asked(server: FakeExa, exa: Exa) -> None:
    await exa.call(search("  who\x00 am\n i "))
    headers, body = server.requests[0]
    assert headers["x-api-key"] == KEY
    assert headers["Content-Type"] == "application/json"
    assert body == {
        "query": "who am i",
        "type": "auto",
        "numResults": 10,
        "contents": {"highlights": {"maxCharacters": 1000}},
    }


async def test_options_of_the_declaration_reach_the_service(server: FakeExa, exa: Exa) -> None:
    call = search(
        allowed_domains=["Example.COM.", "bücher.example"],
        blocked_domains=["ｂａｄ.example"],
        context_size="low",
        user_location={"type": "approximate", "country": "ch", "city": "Bern"},
        live=False,
    )
    await exa.call(call)
    assert server.requests[0][1] == {
        "query": "who",
        "type": "auto",
        "numResults": 5,
        "contents": {"highlights": {"maxCharacters": 500}, "maxAgeHours": -1},
        "includeDomains": ["example.com", "xn--bcher-kva.example"],
        "excludeDomains": ["bad.example"],
        "userLocation": "CH",
    }


async def test_null_options_are_unset(server: FakeExa, exa: Exa) -> None:
    options = dict.fromkeys(("allowed_domains", "blocked_domains", "context_size", "user_location", "live"))
    await exa.call(search(**options))
    await exa.call(search())
    assert server.requests[0][1] == server.requests[1][1]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_domains": ["a.example"] * 10_000},
        {"allowed_domains": ["*.example.com"]},
        {"allowed_domains": ["https://example.com"]},
        {"allowed_domains": ["example.com/path"]},
        {"allowed_domains": ["user@example.com"]},
        {"allowed_domains": ["example.com:80"]},
        {"allowed_domains": ["127.0.0.1"]},
        {"allowed_domains": ["localhost"]},
        {"allowed_domains": [""]},
        {"blocked_domains": ["a..example"]},
        {"blocked_domains": [f"{'a' * 64}.example"]},
        {"blocked_domains": "example.com"},
        {"context_size": "huge"},
        {"user_location": {"country": "Switzerland"}},
        {"live": "yes"},
    ],
    ids=lambda options: str(options)[:40],
)
async def test_wrong_options_are_refused_before_anything_is_sent(
    server: FakeExa, exa: Exa, options: Mapping[str, Any]
) -> None:
    failure = await failure_of(exa, search(**options))
    assert failure.message.startswith(f"Wrong options: {next(iter(options))}")
    assert not server.requests


@pytest.mark.parametrize("query", ["", " \n\t\x00 ", "x" * 4097, "\ud800", 5, None])
async def test_wrong_queries_are_refused_before_anything_is_sent(server: FakeExa, exa: Exa, query: Any) -> None:
    failure = await failure_of(exa, search(query))
    assert failure.message.startswith("Wrong arguments: query: ")
    assert not server.requests


async def test_results_are_a_list_to_cite_from(server: FakeExa, exa: Exa) -> None:
    server.results = [page(1), page(2, title=None, highlights=None, text="Whole text"), page(3, highlights=[])]
    result = await exa.call(search())
    assert result.text == (
        "[1] Title 1\nhttps://site1.example.com/page\nFirst passage of 1. … Second passage of 1.\n\n"
        "[2] site2.example.com\nhttps://site2.example.com/page\nWhole text\n\n"
        "[3] Title 3\nhttps://site3.example.com/page"
    )
    assert [source.url for source in result.sources] == [page(number)["url"] for number in (1, 2, 3)]
    assert result.sources[1] == Source("https://site2.example.com/page", "site2.example.com", "Whole text")


async def test_no_results_is_a_result(server: FakeExa, exa: Exa) -> None:
    server.results = []
    result = await exa.call(search())
    assert result.text == "The search found no results."
    assert list(result.sources) == []


@pytest.mark.parametrize(("size", "results", "chars"), [("low", 5, 500), ("medium", 10, 1000), ("high", 20, 1500)])
async def test_context_size_bounds_results_and_their_text(
    server: FakeExa, exa: Exa, size: str, results: int, chars: int
) -> None:
    server.results = [page(number, title="t" * 4000, highlights=["x" * 4000]) for number in range(60)]
    result = await exa.call(search(context_size=size))
    assert len(result.sources) == results
    assert all(len(source.text) == chars and source.text.endswith("…") for source in result.sources)
    assert all(len(source.title) == 200 for source in result.sources)


async def test_ten_thousand_results_are_cut_to_the_requested_number(server: FakeExa, exa: Exa) -> None:
    server.results = [{"url": "https://a.example/"}] * 10_000
    assert len((await exa.call(search(context_size="high"))).sources) == 20


async def test_control_characters_and_lone_surrogates_do_not_get_through(server: FakeExa, exa: Exa) -> None:
    server.raw = json.dumps(
        {
            "results": [
                page(1, title="a\x1b[31m\ud83d\ude00\x00b", highlights=["x\n\n[2] Forged\nhttps://evil.example \udc00"])
            ]
        }
    ).encode()
    result = await exa.call(search())
    assert result.sources[0].title == "a [31m😀 b"
    assert result.sources[0].text == "x [2] Forged https://evil.example \ufffd"
    assert result.text.count("\n") == 2


async def test_an_answer_that_a_gateway_compressed_is_read(server: FakeExa, exa: Exa) -> None:
    server.raw, server.encoding = gzip.compress(json.dumps({"results": server.results}).encode()), "gzip"
    packed = await exa.call(search())
    server.raw = None
    assert packed == await exa.call(search())


async def test_invalid_utf8_is_replaced(server: FakeExa, exa: Exa) -> None:
    server.raw = b'{"results": [{"url": "https://a.example/", "title": "caf\xe9"}]}'
    assert (await exa.call(search())).sources[0].title == "caf\ufffd"


async def test_results_without_a_web_address_are_left_out(server: FakeExa, exa: Exa) -> None:
    addresses = [
        "javascript:alert(1)",
        "file:///etc/passwd",
        "https://",
        "https://[::1",
        "https://a.example/ b",
        "https://a.example/\nb",
        "https://a.example/" + "x" * 3000,
        None,
        7,
    ]
    server.results = [{"url": address} for address in addresses] + [None, "text", {}, page(1, title=5, highlights=[5])]
    result = await exa.call(search(context_size="high"))
    assert result.sources == [Source("https://site1.example.com/page", "site1.example.com")]


async def test_domains_hold_even_if_the_service_ignores_them(server: FakeExa, exa: Exa) -> None:
    server.results = [
        {"url": url}
        for url in (
            "https://docs.example.com/",
            "https://EXAMPLE.com./x",
            "https://notexample.com/",
            "https://example.com.evil.example/",
            "https://example.com@evil.example/",
            "https://private.example.com/",
            "https://bücher.example/",
        )
    ]
    call = search(allowed_domains=["example.com", "xn--bcher-kva.example"], blocked_domains=["private.example.com"])
    urls = [source.url for source in (await exa.call(call)).sources]
    assert urls == ["https://docs.example.com/", "https://EXAMPLE.com./x", "https://bücher.example/"]


STATUS_WORDS = {
    "status 401": "refused the key",
    "status 403": "refused the key",
    "status 402": "credits are used up",
    "status 400": "did not accept the search",
    "status 422": "did not accept the search",
    "status 429": "allows no more searches",
    "status 302": "HTTP 302",
    "status 418": "HTTP 418",
    "status 500": "HTTP 500",
    "status 503": "HTTP 503",
    "html": "no list of results",
    "not json": "no list of results",
    "deep": "no list of results",
    "cut off": "broke off",
    "zipped": "more than 1 MiB",
    "unknown encoding": "encoding 'br'",
}


@pytest.mark.parametrize("query", FAILURES)
async def test_failures_name_neither_the_key_nor_the_services_own_words(
    exa: Exa, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failure = await failure_of(exa, search(query))
    assert STATUS_WORDS.get(query, "The search service") in failure.message
    everything = failure.message + repr(failure) + "".join(traceback.format_exception(failure)) + caplog.text
    assert KEY not in everything
    assert "upstream says" not in everything
    assert failure.__cause__ is None
    assert failure.message in caplog.text


async def test_redirects_are_not_followed(server: FakeExa, exa: Exa) -> None:
    await failure_of(exa, search("status 307"))
    assert len(server.requests) == 1


async def test_the_key_is_in_no_repr(server: FakeExa, exa: Exa) -> None:
    config = Exa.Config.model_validate({"api_key": KEY})
    assert KEY not in f"{config!r} {config} {config.model_dump()} {exa!r}"
    with pytest.raises(ValidationError) as failure:
        Exa.Config.model_validate({"api_key": [KEY]})
    assert KEY not in f"{failure.value}"
    broken = Exa(Exa.Config.model_validate({"api_key": f"{KEY}\nX-Evil: 1"}))
    with pytest.raises(ConfigError, match=r"tool_runtime\.api_key") as error:
        await broken.start()
    assert KEY not in str(error.value)


@pytest.mark.parametrize("key", [None, "", "  "])
async def test_without_a_key_no_tool_is_offered_and_a_call_names_the_config_key(
    server: FakeExa, key: str | None
) -> None:
    async with started(server.url, api_key=key) as exa:
        assert list(exa.tools()) == []
        assert "tool_runtime.api_key" in (await failure_of(exa, search())).message
    assert not server.requests


async def test_a_wrong_key_is_refused(server: FakeExa) -> None:
    async with started(server.url, api_key="wrong") as exa:
        assert (await failure_of(exa, search())).message == "The search service refused the key."


async def test_a_service_that_is_down_fails_in_words(unused_tcp_port: int) -> None:
    async with started(f"http://127.0.0.1:{unused_tcp_port}") as exa:
        assert "could not be reached" in (await failure_of(exa, search())).message


@pytest.mark.parametrize("query", ["hang", "drip"])
async def test_slow_answers_end_at_the_limit(server: FakeExa, query: str) -> None:
    async with started(server.url, tool_timeout_s=0.3) as exa:
        assert "0.3 s" in (await failure_of(exa, search(query))).message
        async with asyncio.timeout(5):
            await server.dropped.wait()


async def test_an_endless_answer_is_read_no_further_than_its_limit(server: FakeExa, exa: Exa) -> None:
    assert "more than 1 MiB" in (await failure_of(exa, search("endless"))).message
    async with asyncio.timeout(5):
        await server.dropped.wait()
    assert server.sent_bytes < 16 * 1024 * 1024  # beyond the limit there is only what the sockets hold


async def test_cancelling_while_the_body_arrives_closes_the_connection(server: FakeExa, exa: Exa) -> None:
    call = asyncio.ensure_future(exa.call(search("drip")))
    async with asyncio.timeout(5):
        await server.reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.dropped.wait()


async def test_proxies_of_the_environment_are_ignored_for_a_service_over_http(
    server: FakeExa, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with started(server.url) as exa:
        assert (await exa.call(search())).sources


@pytest.mark.parametrize("url", ["ftp://a.example", "https://user@a.example", "a.example", "https://a.example/?x=1"])
def test_the_address_of_the_service_must_be_a_plain_one(url: str) -> None:
    with pytest.raises(ValidationError):
        Exa.Config.model_validate({"base_url": url})
