"""The tools of a server in its overview and in the page: switches for those that it has, reasons for the others."""

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import ask, scripted
from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console


async def test_tools_that_are_not_there_are_grey_with_the_reason(open_page: OpenPage) -> None:
    """The switch of a tool that the server lacks cannot be set, and names the part of the config that brings it."""
    tool_servers = {"provider": "mcp", "servers": {"notes": {"url": "https://notes.example/mcp"}}}
    turns = [[{"text": "Fine."}]]
    async with (
        serving(scripted(*turns), more={"tool_servers": tool_servers}) as served,
        open_page(f"{served.url}/") as page,
    ):
        overview: Any = await served.client.get("/stack/overview", cast_to=object)
        tools = {tool["type"]: tool for tool in overview["tools"]}
        assert tools["mcp"] == {"type": "mcp", "reason": None, "servers": ["notes"]}
        assert "`vector_stores` section" in tools["file_search"]["reason"]
        await page.get_by_text("What this server does not have yet").click()
        await expect(page.locator(".welcome dl")).to_contain_text("a search provider and its key")
        await page.get_by_role("button", name="Settings").click()
        await expect(page.get_by_label("Web search")).to_be_disabled()
        await expect(page.locator(".switch", has_text="Python").first).to_contain_text("the provider `python`")
        await expect(page.get_by_label("notes")).to_be_enabled()
        await expect(page.locator(".switch", has_text="notes").locator(".status")).to_have_text("failed")
        await ask(page, "Hello")
        await expect(page.get_by_text("Fine.")).to_be_visible()


async def test_files_are_asked_about_by_the_names_of_their_stores(open_page: OpenPage, tmp_path: Path) -> None:
    """A store is chosen by its name."""
    async with filing(tmp_path, [{"text": "Found."}]) as served:
        store, _ = await store_of(served)
        await served.client.vector_stores.update(store, name="Zoo")
        async with open_page(f"{served.url}/#/files/{store}") as page:
            await page.get_by_role("button", name="Ask about these").click()
            await page.get_by_role("button", name="Tools 1").click()
            await expect(page.get_by_label("File search")).to_be_checked()
            await expect(page.get_by_label("Zoo")).to_be_checked()
            await ask(page, "What is in it?")
            await expect(page.get_by_text("Found.")).to_be_visible()
        listed: Any = await served.client.get("/responses", cast_to=object)
        response = await served.client.responses.retrieve(listed["data"][0]["id"])
        [tool] = response.tools
        assert tool.type == "file_search"
        assert tool.vector_store_ids == [store]


async def test_instructions_are_kept_under_a_name(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/") as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Instructions", exact=True).fill("You are a poet.")
        await page.get_by_label("Name of a preset").fill("Poet")
        await page.keyboard.press("Enter")
        await page.get_by_label("Instructions", exact=True).fill("")
        await page.reload()
        await page.get_by_label("Preset", exact=True).select_option("Poet")
        await expect(page.get_by_label("Instructions", exact=True)).to_have_value("You are a poet.")
        await page.get_by_role("button", name="Forget it").click()
        await expect(page.get_by_label("Preset", exact=True)).to_have_count(0)
