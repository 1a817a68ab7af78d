"""Tavily against a real local server: what it asks, what it makes of the answers, and what never gets out."""

import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from apis.tool_runtime import Source, ToolRuntime
from providers.tool_runtime.tavily import Tavily
from tests.conformance.tool_runtime import LAWS, Subject
from tests.support.servers.fake_exa import FAILURES, KEY
from tests.support.servers.fake_search import Dialect, FakeSearch, failure_of, search, settings, started


def page(number: int) -> dict[str, Any]:
    url = f"https://site{number}.example.com/page"
    return {"title": f"Title {number}", "url": url, "content": "A passage.", "score": 0.9, "raw_content": None}


def answer(results: list[Any]) -> dict[str, Any]:
    return {"query": "who", "answer": None, "images": [], "results": results, "response_time": "1.0"}


DIALECT = Dialect("/search", "POST", {"Authorization": f"Bearer {KEY}"}, answer, page)


@pytest.fixture
async def server() -> AsyncGenerator[FakeSearch]:
    async with FakeSearch(DIALECT).listening() as server:
        yield server


@pytest.fixture
async def tavily(server: FakeSearch) -> AsyncGenerator[ToolRuntime]:
    async with started(Tavily(Tavily.Config.model_validate(settings(server)))) as runtime:
        yield runtime


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_conforms(server: FakeSearch, law: Callable[[Subject], Awaitable[None]]) -> None:
    async with started(Tavily(Tavily.Config.model_validate(settings(server, tool_timeout_s=1)))) as runtime:
        await law(Subject(runtime, search(), search("hang"), server.reached, server.dropped))


@pytest.mark.parametrize("query", FAILURES)
async def test_failures_name_neither_the_key_nor_the_services_own_words(
    tavily: ToolRuntime, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failure = await failure_of(tavily, search(query))
    everything = failure.message + repr(failure) + "".join(traceback.format_exception(failure)) + caplog.text
    assert KEY not in everything
    assert "upstream says" not in everything


async def test_domains_hold_even_if_the_service_ignores_them(server: FakeSearch, tavily: ToolRuntime) -> None:
    call = search(allowed_domains=["site1.example.com", "site2.example.com"], blocked_domains=["site2.example.com"])
    assert [source.url for source in (await tavily.call(call)).sources] == ["https://site1.example.com/page"]


async def test_thousands_of_results_are_cut_to_the_requested_number(server: FakeSearch, tavily: ToolRuntime) -> None:
    server.results = [None, 7, {}, {"url": "javascript:x"}, *([DIALECT.page(1)] * 5000)]
    for size, count in (("low", 5), ("medium", 10), ("high", 20)):
        assert len((await tavily.call(search(context_size=size))).sources) == count


async def test_asks_as_tavily_wants_to_be_asked(server: FakeSearch, tavily: ToolRuntime) -> None:
    call = search(
        "w" * 500,
        context_size="high",
        allowed_domains=["bücher.example"],
        blocked_domains=["b.example"],
        user_location={"country": "ch", "city": "Bern"},
    )
    await tavily.call(call)
    await tavily.call(search(user_location={"country": "XX"}))
    assert server.bodies == [
        {
            "query": "w" * 400,
            "search_depth": "basic",
            "max_results": 20,
            "include_domains": ["xn--bcher-kva.example"],
            "exclude_domains": ["b.example"],
            "country": "switzerland",
        },
        {"query": "who", "search_depth": "basic", "max_results": 10},
    ]


async def test_live_false_is_refused_unsent(server: FakeSearch, tavily: ToolRuntime) -> None:
    assert "live web" in (await failure_of(tavily, search(live=False))).message
    assert not server.requests


async def test_results_are_a_list_to_cite_from(server: FakeSearch, tavily: ToolRuntime) -> None:
    result = await tavily.call(search())
    assert result.sources[0] == Source("https://site1.example.com/page", "Title 1", "A passage.")
    server.results = []
    assert (await tavily.call(search())).text == "The search found no results."


@pytest.mark.parametrize("key", [None, "", "  "])
async def test_without_a_key_no_tool_is_offered(server: FakeSearch, key: str | None) -> None:
    async with started(Tavily(Tavily.Config.model_validate(settings(server, api_key=key)))) as tavily:
        assert list(tavily.tools()) == []
        assert "tool_runtime.api_key" in (await failure_of(tavily, search())).message
    assert not server.requests
