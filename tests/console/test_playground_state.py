"""The Playground in Chromium: approvals of MCP calls, a chain that is loaded again, a stop, and a program to copy."""

import asyncio
import os
import sys
from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import ask, scripted
from tests.support.sdk.answer_shapes import Script, call
from tests.support.servers.mcp_stack import DONE, stacked
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console
NOTE: Script = [call("real__note", '{"text":"a"}', id="c1")]


@pytest.mark.parametrize("approves", [True, False])
async def test_an_mcp_call_is_approved_or_denied_and_the_answer_is_shown(open_page: OpenPage, approves: bool) -> None:
    """The answer to an approval request is an item without undefined fields, which has a card."""
    async with stacked(NOTE, DONE) as (served, real), open_page(f"{served.url}/") as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("MCP servers", exact=False).fill(
            f'[{{"server_label": "real", "server_url": "{real.url}", "require_approval": "always"}}]'
        )
        await page.get_by_role("button", name="Settings").click()
        await ask(page, "Take a note.")
        if not approves:
            await page.get_by_label("Reason").fill("not today")
        await page.get_by_role("button", name="Approve" if approves else "Deny").click()
        await expect(page.locator(".item.mcp_approval_response")).to_contain_text(
            "Approved" if approves else "Denied not today"
        )
        await expect(page.get_by_text("Done.", exact=True)).to_be_visible()
    assert real.notes == (["a"] if approves else [])


async def test_an_item_that_cannot_be_drawn_leaves_the_page_unchanged(open_page: OpenPage) -> None:
    """One item whose fields have another shape than expected does not replace the page by an error."""
    async with serving(scripted([{"text": "Kept."}])) as served, open_page(f"{served.url}/") as page:
        await ask(page, "Hello")
        await expect(page.get_by_text("Kept.")).to_be_visible()
        drawn = await page.evaluate(
            """async () => {
              const { h, render } = await import("./console/vendor/preact.js");
              const { Items } = await import("./console/parts/items.js");
              const box = document.createElement("div");
              document.body.append(box);
              const original = console.error;
              console.error = () => {};
              const items = [{ type: "web_search_call", action: { queries: 5 } }, { type: "odd", x: undefined }];
              render(h(Items, { items }), box);
              await new Promise((resolve) => setTimeout(resolve, 100));
              console.error = original;
              return box.innerText;
            }"""
        )
        assert "This item cannot be shown" in drawn
        assert "undefined" in drawn
        await expect(page.get_by_text("Kept.")).to_be_visible()


async def test_a_reload_shows_every_turn_of_the_chain(open_page: OpenPage) -> None:
    """The address names the last response; the page loads the responses before it as well."""
    turns = [[{"text": f"Answer {number}."}] for number in range(12)]
    async with serving(scripted(*turns)) as served, open_page(f"{served.url}/") as page:
        for number in range(3):
            await ask(page, f"Question {number}?")
            await expect(page.locator("article.turn footer")).to_have_count(number + 1)
        await page.reload()
        await expect(page.locator("article.turn")).to_have_count(3)
        for number in range(3):
            await expect(page.locator("article.turn").nth(number)).to_contain_text(f"Question {number}?")
            await expect(page.get_by_text(f"Answer {number}.")).to_be_visible()
        await ask(page, "Question 3?")
        await expect(page.locator("article.turn footer")).to_have_count(4)
        listed: Any = await served.client.get("/responses?limit=1", cast_to=object)
        parent = await served.client.responses.retrieve(listed["data"][0]["previous_response_id"])
        middle = parent.previous_response_id
        assert middle
        await served.client.responses.delete(middle)
        await page.reload()
        await expect(page.get_by_text("An earlier turn was deleted.")).to_be_visible()
        await expect(page.locator("article.turn")).to_have_count(3)


@pytest.mark.parametrize("stores", [True, False])
async def test_a_stopped_turn_says_so_and_keeps_its_text(open_page: OpenPage, stores: bool) -> None:
    """After a stop, the turn has the end that the server stored, or ends here where nothing is stored."""
    script = scripted([{"text": "Half of it"}, {"wait_s": 600}, {"text": "never"}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        served.streams.check = False  # the stream of a cancelled response has no last event
        if not stores:
            await page.get_by_role("button", name="Settings").click()
            await page.get_by_label("stored").uncheck()
            await page.get_by_role("button", name="Settings").click()
        await ask(page, "Go")
        await expect(page.get_by_text("Half of it")).to_be_visible()
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator("article.turn footer")).to_contain_text("stopped")
        await expect(page.get_by_text("Half of it")).to_be_visible()
        await expect(page.get_by_text("in progress")).to_have_count(0)


async def test_the_python_program_of_a_request_runs_without_a_key(open_page: OpenPage) -> None:
    """On a server without keys the shown program needs no variable in the environment."""
    script = scripted(*[[{"text": "It runs."}]] * 2)
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await ask(page, "Hello")
        await expect(page.get_by_text("It runs.")).to_be_visible()
        await page.get_by_role("button", name="Inspect").click()
        await page.get_by_role("tab", name="Code").click()
        program = await page.locator(".inspector pre.code").inner_text()
        environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, env=environment, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    assert (process.returncode, output) == (0, b"It runs.")


@pytest.mark.parametrize("name", ["..", ".", "..%2Ffiles", "x%3Fsearch=1", "x%23y", "a%2F..%2F..%2Fmodels"])
async def test_an_id_in_the_address_leads_to_no_other_route(open_page: OpenPage, name: str) -> None:
    """Any characters of an id in the address become one segment of the path that the page asks for."""
    visited_paths: list[str] = []
    async with serving(scripted([{"text": "x"}])) as served, open_page(f"{served.url}/") as page:
        page.on("request", lambda request: visited_paths.append(request.url.removeprefix(served.url)))
        await page.goto(f"{served.url}/#/responses/{name}")
        await expect(page.get_by_role("alert")).to_contain_text("404")
    paths: list[Any] = [url for url in visited_paths if url.startswith("/v1/responses/")]
    assert paths
    assert all(url.partition("?")[0].count("/") == 3 for url in paths)
    assert not [url for url in visited_paths if url.startswith("/v1/files")]
