"""Brave against a real local server: what it asks, what it makes of the answers, and what never gets out."""

import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from apis.tool_runtime import Source, ToolRuntime
from providers.tool_runtime.brave import Brave
from tests.conformance.tool_runtime import LAWS, Subject
from tests.support.servers.fake_exa import FAILURES, KEY
from tests.support.servers.fake_search import Dialect, FakeSearch, failure_of, search, settings, started


def page(number: int) -> dict[str, Any]:
    url = f"https://site{number}.example.com/page"
    extra = {"extra_snippets": ["More.", "Yet more."]} if number == 1 else {}
    return {"type": "search_result", "title": f"Title {number}", "url": url, "description": "A passage.", **extra}


def answer(results: list[Any]) -> dict[str, Any]:
    body = {"web": {"type": "search", "results": results, "family_friendly": True}} if results else {}
    return {"type": "search", "query": {"original": "who"}, **body}


DIALECT = Dialect("/web/search", "GET", {"X-Subscription-Token": KEY}, answer, page)


@pytest.fixture
async def server() -> AsyncGenerator[FakeSearch]:
    async with FakeSearch(DIALECT).listening() as server:
        yield server


@pytest.fixture
async def brave(server: FakeSearch) -> AsyncGenerator[ToolRuntime]:
    async with started(Brave(Brave.Config.model_validate(settings(server)))) as runtime:
        yield runtime


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_conforms(server: FakeSearch, law: Callable[[Subject], Awaitable[None]]) -> None:
    async with started(Brave(Brave.Config.model_validate(settings(server, tool_timeout_s=1)))) as runtime:
        await law(Subject(runtime, search(), search("hang"), server.reached, server.dropped))


@pytest.mark.parametrize("query", FAILURES)
async def test_failures_name_neither_the_key_nor_the_services_own_words(
    brave: ToolRuntime, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failure = await failure_of(brave, search(query))
    everything = failure.message + repr(failure) + "".join(traceback.format_exception(failure)) + caplog.text
    assert KEY not in everything
    assert "upstream says" not in everything


async def test_domains_hold_even_if_the_service_ignores_them(server: FakeSearch, brave: ToolRuntime) -> None:
    call = search(allowed_domains=["site1.example.com", "site2.example.com"], blocked_domains=["site2.example.com"])
    assert [source.url for source in (await brave.call(call)).sources] == ["https://site1.example.com/page"]


async def test_thousands_of_results_are_cut_to_the_requested_number(server: FakeSearch, brave: ToolRuntime) -> None:
    server.results = [None, 7, {}, {"url": "javascript:x"}, *([DIALECT.page(1)] * 5000)]
    for size, count in (("low", 5), ("medium", 10), ("high", 20)):
        assert len((await brave.call(search(context_size=size))).sources) == count


async def test_asks_as_brave_wants_to_be_asked(server: FakeSearch, brave: ToolRuntime) -> None:
    where = {"country": "ch", "city": "Zürich\r\n", "region": "ZH", "timezone": "Europe/Zurich"}
    await brave.call(search("who am i", context_size="high", user_location=where, live=False))
    request = server.requests[0]
    assert dict(request.query) == {
        "q": "who am i",
        "count": "20",
        "result_filter": "web",
        "text_decorations": "false",
        "extra_snippets": "true",
    }
    names = ("X-Loc-Country", "X-Loc-City", "X-Loc-State-Name", "X-Loc-Timezone", "Accept-Encoding", "Accept")
    header_values = [request.headers[name] for name in names]
    assert header_values == ["CH", "Zürich", "ZH", "Europe/Zurich", "identity", "application/json"]


async def test_domains_are_operators_as_far_as_a_query_holds_them(server: FakeSearch, brave: ToolRuntime) -> None:
    await brave.call(search("who", allowed_domains=["a.example"]))
    await brave.call(search("who", allowed_domains=["a.example", "b.example"]))
    await brave.call(search("who", blocked_domains=["c.example", "d.example"]))
    assert [request.query["q"] for request in server.requests] == [
        "who site:a.example",
        "who (site:a.example OR site:b.example)",
        "who -site:c.example -site:d.example",
    ]
    for domains in (
        {"allowed_domains": [f"a{n}.example" for n in range(100)]},
        {"blocked_domains": ["b.example"] * 100},
    ):
        for query in ("who", "w" * 4000, "w " * 2000):
            await brave.call(search(query, **domains))
    assert all(len(request.query["q"]) <= 400 for request in server.requests)
    assert all(len(request.query["q"].split()) <= 50 for request in server.requests)
    assert all(request.query["q"].count("(") == request.query["q"].count(")") for request in server.requests)


async def test_results_are_a_list_to_cite_from(server: FakeSearch, brave: ToolRuntime) -> None:
    result = await brave.call(search())
    assert result.sources[0] == Source("https://site1.example.com/page", "Title 1", "A passage. … More. … Yet more.")
    assert result.text.startswith("[1] Title 1\nhttps://site1.example.com/page\nA passage.")


async def test_no_results_is_a_result(server: FakeSearch, brave: ToolRuntime) -> None:
    server.results = []
    assert (await brave.call(search())).text == "The search found no results."
