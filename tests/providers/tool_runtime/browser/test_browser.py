"""Browser through a real GuardedFetcher and real servers: the text for the model, and the requests that are refused."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from apis.tool_runtime import Source, ToolCall, ToolRuntime
from providers.fetcher.safe import GuardedFetcher
from providers.reader.child import ChildReader
from providers.reader.confinement import ReaderConfinement
from providers.tool_runtime.browser.provider import Browser
from tests.conformance.tool_runtime import LAWS, Subject
from tests.support.servers.fake_search import failure_of, started
from tests.support.servers.fetcher_hosts import SITE, Canary, Site, answers, fetching
from tests.support.servers.forbidden_urls import forbidden

PAGE = "<title>A page</title><h1>Head</h1><p>Words with <a href='/next'>a link</a>.</p>"


@pytest.fixture(autouse=True)
def no_process_left() -> Generator[None]:
    """No child process outlives a test."""
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


@pytest.fixture
async def site() -> AsyncGenerator[Site]:
    async with Site() as site:
        yield site


def browsing(safe: GuardedFetcher, **fields: Any) -> Browser:
    return Browser(Browser.Config.model_validate(fields), safe, ChildReader(ChildReader.Config(), None, safe))


@pytest.fixture
async def browser(site: Site) -> AsyncGenerator[ToolRuntime]:
    async with fetching([site.port]) as safe, started(browsing(safe)) as browser:
        yield browser


def opening(url: Any, **options: Any) -> ToolCall:
    return ToolCall(id="call_1", name="open_page", arguments={"url": url}, options=options)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_conforms(site: Site, law: Callable[[Subject], Awaitable[None]]) -> None:
    good = opening(site.page("/page", PAGE))
    endless = opening(site.endless("/endless", b"x", 0.02, {"Content-Type": "text/html"}))
    async with fetching([site.port], timeout_s=3) as safe, started(browsing(safe)) as browser:
        await law(Subject(browser, good, endless, site.reached, site.dropped))


async def test_a_page_is_text_with_numbered_links(site: Site, browser: ToolRuntime) -> None:
    site.page("/dir/page", PAGE)
    result = await browser.call(opening(site.redirect("/start", "/dir/page")))
    assert result.text == (
        f"A page\n{site.url}/dir/page\n\n# Head\n\nWords with a link[#1].\n\nLinks:\n[#1] {site.url}/next"
    )
    assert result.sources == [Source(f"{site.url}/dir/page", "A page", "# Head\n\nWords with a link[#1].")]
    assert result.data == {"links": [f"{site.url}/next"], "cut": False}


@pytest.mark.parametrize(
    ("media_type", "body", "text"),
    [
        ("text/plain", "a\n<b>", "a\n<b>"),
        ("text/plain; charset=iso-8859-1", "café".encode("latin-1"), "café"),
        ("application/json", '{"a": 1}', '{"a": 1}'),
        ("application/ld+json", "{}", "{}"),
        ("text/markdown", "# A\n* b", "# A\n* b"),
        ("application/rss+xml", "<rss/>", "<rss/>"),
        ("text/html; charset=utf-8", "<p>é", "é"),
        ("TEXT/HTML;;;", "<p>x", "x"),
        ("application/xhtml+xml", "<html><p>x</p></html>", "x"),
        ("application/octet-stream", "<!DOCTYPE html><p>x", "x"),
        ("application/octet-stream", "plain", "plain"),
    ],
)
async def test_every_kind_of_text_is_read(
    site: Site, browser: ToolRuntime, media_type: str, body: str | bytes, text: str
) -> None:
    result = await browser.call(opening(site.page("/", body, media_type)))
    assert result.sources[0].text == text
    assert result.sources[0].title == SITE


@pytest.mark.parametrize(
    ("media_type", "body", "words"),
    [
        ("application/pdf", b"%PDF-1.7", "is a PDF"),
        ("text/html", b"%PDF-1.7", "is a PDF"),
        ("image/png", b"\x89PNG", "image/png"),
        ("application/zip", b"PK", "application/zip"),
        ("application/octet-stream", b"\0\1\2", "octet-stream"),
        ("text/html", b"", "has no text"),
        ("text/html", b"<script>x</script>", "has no text"),
        ("image/x" + "y" * 5000, b"x", "is no text"),
    ],
)
async def test_bodies_without_text_are_refused_in_words(
    site: Site, browser: ToolRuntime, media_type: str, body: bytes, words: str
) -> None:
    failure = await failure_of(browser, opening(site.page("/", body, media_type)))
    assert words in failure.message
    assert len(failure.message) < 300


async def test_an_error_status_of_the_server_is_named(browser: ToolRuntime, site: Site) -> None:
    assert "HTTP 404" in (await failure_of(browser, opening(f"{site.url}/nowhere"))).message


async def test_a_long_page_is_cut_and_says_so(site: Site) -> None:
    url = site.page("/", "<p>word</p>" * 10_000)
    async with fetching([site.port]) as safe, started(browsing(safe, max_page_chars=1000)) as browser:
        result = await browser.call(opening(url))
    assert len(result.sources[0].text) == 1000
    assert result.text.endswith("[The page is longer; these are its first 1000 characters.]")
    assert result.data["cut"]


@pytest.mark.parametrize("html", ["<div>" * 100_000 + "deep", "<p></p>" * 700_000 + "x"], ids=["nested", "long"])
async def test_hostile_pages_end_in_text_or_an_error_and_leave_no_process(
    site: Site, browser: ToolRuntime, html: str
) -> None:
    hostile = asyncio.gather(browser.call(opening(site.page("/hostile", html))), return_exceptions=True)
    for _ in range(3):
        assert (await browser.call(opening(site.page("/", PAGE)))).text
    async with asyncio.timeout(30):
        await hostile


def replace_reader_program(monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    """Run another program instead of the reader's, unconfined: its folder is open to no other user."""
    monkeypatch.setattr("providers.reader.confinement.PROGRAM", program)
    monkeypatch.setattr("providers.reader.child.choose_confinement", lambda: ReaderConfinement("none"))


async def test_a_parser_that_dies_takes_nothing_along(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for body in ("import os; os.abort()", "import time; time.sleep(60)", "print('x' * 2**24)", "print('{}')"):
        program = tmp_path / "program.py"
        program.write_text(body)
        replace_reader_program(monkeypatch, program)
        async with fetching([site.port]) as safe, started(browsing(safe, tool_timeout_s=1.5)) as browser:
            failure = await failure_of(browser, opening(site.page("/", PAGE * 10_000)))
            assert "cannot be read" in failure.message or "within 1.5 s" in failure.message


async def test_the_reader_process_gets_no_secrets(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXA_API_KEY", "secret")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, json\n"
        "print(json.dumps({'title': '', 'links': [], 'is_truncated': False}))\n"
        "print(json.dumps(dict(os.environ)))"
    )
    replace_reader_program(monkeypatch, program)
    async with fetching([site.port]) as safe, started(browsing(safe)) as browser:
        environment = json.loads((await browser.call(opening(site.page("/", PAGE)))).sources[0].text)
    assert "EXA_API_KEY" not in environment
    assert "EXA_API_KEY" in os.environ


async def test_no_forbidden_url_is_ever_connected_to(site: Site) -> None:
    async with Canary() as canary, fetching([canary.port, site.port, 80, 443]) as safe:
        async with started(browsing(safe)) as browser:
            for url in forbidden(canary.port):
                await failure_of(browser, opening(url))
                if url.isascii() and url.isprintable() and 0 < len(url) < 4096:
                    away = site.redirect("/away", url)
                    await failure_of(browser, opening(away))
        assert canary.connections == 0


async def test_nothing_that_a_page_names_is_fetched(site: Site) -> None:
    async with Canary() as canary, fetching([canary.port, site.port]) as safe, started(browsing(safe)) as browser:
        there = f"http://127.0.0.1:{canary.port}"
        await browser.call(
            opening(
                site.page(
                    "/",
                    f"<!DOCTYPE html SYSTEM '{there}/dtd' [<!ENTITY x SYSTEM '{there}/entity'>]>&x;"
                    f"<base href='{there}/'><meta http-equiv=refresh content='0;{there}'><link rel=stylesheet href=s>"
                    "<script src=s></script><img src=i alt=i><iframe src=f></iframe><p>text",
                )
            )
        )
        assert canary.connections == 0
        assert len(site.requests) == 1


async def test_domains_hold_for_the_page_asked_for_and_for_the_one_that_came(site: Site) -> None:
    resolve, resolved_hosts = answers([SITE])
    site.page("/", PAGE)
    site.redirect("/away", f"http://evil.example:{site.port}/")
    async with fetching([site.port], resolve) as safe, started(browsing(safe)) as browser:
        for options in ({"allowed_domains": ["good.example"]}, {"blocked_domains": ["evil.example"]}):
            assert (await browser.call(opening(f"http://www.good.example:{site.port}/", **options))).text
            for url in (f"http://evil.example:{site.port}/", f"http://EVIL.example.:{site.port}/"):
                resolved_hosts.clear()
                await failure_of(browser, opening(url, **options))
                assert not resolved_hosts
            away = opening(f"http://good.example:{site.port}/away", **options)
            assert "does not allow" in (await failure_of(browser, away)).message


async def test_live_false_refuses_pages_unsent(site: Site, browser: ToolRuntime) -> None:
    assert "does not allow" in (await failure_of(browser, opening(site.page("/", PAGE), live=False))).message
    assert not site.requests


async def test_a_call_as_a_whole_has_a_time_limit(site: Site) -> None:
    url = site.endless("/", b"x", 0.02, {"Content-Type": "text/html"})
    async with fetching([site.port]) as safe, started(browsing(safe, tool_timeout_s=0.4)) as browser:
        assert "within 0.4 s" in (await failure_of(browser, opening(url))).message
    async with asyncio.timeout(5):
        await site.dropped.wait()


def test_a_page_may_not_be_longer_than_a_result_may_be() -> None:
    with pytest.raises(ValidationError):
        Browser.Config.model_validate({"max_page_chars": 10**6})
