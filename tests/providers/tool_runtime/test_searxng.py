"""SearXNG against a real local server: what it asks, what it makes of the answers, and what never gets out."""

import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from apis.tool_runtime import Source, ToolRuntime
from providers.tool_runtime.searxng import SearXNG
from tests.conformance.tool_runtime import LAWS, Subject
from tests.support.servers.fake_exa import FAILURES, KEY
from tests.support.servers.fake_search import Dialect, FakeSearch, failure_of, search, settings, started


def page(number: int) -> dict[str, Any]:
    url = f"https://site{number}.example.com/page"
    return {"url": url, "title": f"Title {number}", "content": "A passage.", "engine": "brave", "score": 1.0}


def answer(results: list[Any]) -> dict[str, Any]:
    return {"query": "who", "number_of_results": 0, "results": results, "answers": [], "unresponsive_engines": []}


DIALECT = Dialect("/search", "GET", None, answer, page)


@pytest.fixture
async def server() -> AsyncGenerator[FakeSearch]:
    async with FakeSearch(DIALECT).listening() as server:
        yield server


@pytest.fixture
async def searxng(server: FakeSearch) -> AsyncGenerator[ToolRuntime]:
    async with started(SearXNG(SearXNG.Config.model_validate(settings(server)))) as runtime:
        yield runtime


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_conforms(server: FakeSearch, law: Callable[[Subject], Awaitable[None]]) -> None:
    async with started(SearXNG(SearXNG.Config.model_validate(settings(server, tool_timeout_s=1)))) as runtime:
        await law(Subject(runtime, search(), search("hang"), server.reached, server.dropped))


@pytest.mark.parametrize("query", FAILURES)
async def test_failures_name_neither_the_key_nor_the_services_own_words(
    searxng: ToolRuntime, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failure = await failure_of(searxng, search(query))
    everything = failure.message + repr(failure) + "".join(traceback.format_exception(failure)) + caplog.text
    assert KEY not in everything
    assert "upstream says" not in everything


async def test_domains_hold_even_if_the_service_ignores_them(server: FakeSearch, searxng: ToolRuntime) -> None:
    call = search(allowed_domains=["site1.example.com", "site2.example.com"], blocked_domains=["site2.example.com"])
    assert [source.url for source in (await searxng.call(call)).sources] == ["https://site1.example.com/page"]


async def test_thousands_of_results_are_cut_to_the_requested_number(server: FakeSearch, searxng: ToolRuntime) -> None:
    server.results = [None, 7, {}, {"url": "javascript:x"}, *([DIALECT.page(1)] * 5000)]
    for size, count in (("low", 5), ("medium", 10), ("high", 20)):
        assert len((await searxng.call(search(context_size=size))).sources) == count


async def test_asks_as_searxng_wants_to_be_asked(server: FakeSearch, searxng: ToolRuntime) -> None:
    await searxng.call(search("who & what", blocked_domains=["b.example"], user_location={"country": "ch"}))
    assert dict(server.requests[0].query) == {"q": "who & what -site:b.example", "format": "json"}
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"


async def test_it_needs_no_key(server: FakeSearch) -> None:
    config = SearXNG.Config.model_validate({"base_url": server.url, "language": "de-CH"})
    async with started(SearXNG(config)) as searxng:
        assert [tool.name for tool in searxng.tools()] == ["search"]
        assert (await searxng.call(search())).sources[0] == Source(
            "https://site1.example.com/page", "Title 1", "A passage."
        )
    assert "Authorization" not in server.requests[0].headers
    assert server.requests[0].query["language"] == "de-CH"


async def test_live_false_is_refused_before_anything_is_sent(server: FakeSearch, searxng: ToolRuntime) -> None:
    assert "live search engines" in (await failure_of(searxng, search(live=False))).message
    assert not server.requests


async def test_an_instance_that_gives_no_json_names_the_remedy(server: FakeSearch, searxng: ToolRuntime) -> None:
    assert "search.formats" in (await failure_of(searxng, search("status 403"))).message
