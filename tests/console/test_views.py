"""The other views of the page in Chromium: listings, runs, files, figures, reload, errors."""

import asyncio

import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import HOSTILE, ask, scripted
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console

COUNT_NAMELESS = """
[...document.querySelectorAll("button, a[href], input:not([hidden]), select, textarea")].filter(
  (node) => !(node.innerText || node.ariaLabel || node.title || node.placeholder || node.labels?.length),
).length
"""
VIEWS = ["playground", "responses", "runs", "conversations", "agents", "files", "traces", "figures"]


async def test_responses_are_listed_filtered_opened_and_deleted(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "The answer."}])) as served:
        response = await served.client.responses.create(model="scripted", input="The question.")
        async with open_page(f"{served.url}/#/responses") as page:
            await expect(page.get_by_text("The answer.")).to_be_visible()
            await page.get_by_label("Status").select_option("failed")
            await expect(page.get_by_text("No stored response matches.")).to_be_visible()
            await page.reload()
            await expect(page.get_by_text("No stored response matches.")).to_be_visible()
            await page.get_by_label("Status").select_option("")
            await page.locator("td a").first.click()
            await expect(page.get_by_text("The question.")).to_be_visible()
            await page.get_by_role("button", name="Delete", exact=True).click()
            await expect(page.get_by_text(f"Delete {response.id}?")).to_be_visible()
            await page.locator(".ask .danger").click()
            await expect(page.get_by_text("No response is stored yet.")).to_be_visible()


async def test_a_background_run_is_followed_again_after_the_tab_was_closed(open_page: OpenPage) -> None:
    script = scripted([{"text": ["First part. "]}, {"wait_s": 6}, {"text": "Second part."}])
    async with serving(script) as served:
        response = await served.client.responses.create(model="scripted", input="Go", background=True)
        async with open_page(f"{served.url}/#/runs") as page:
            await page.get_by_role("link", name="Follow").click()
            await expect(page.locator(".markdown")).to_contain_text("First part.")
        async with open_page(f"{served.url}/#/responses/{response.id}") as page:
            await expect(page.locator(".markdown")).to_contain_text("Second part.", timeout=15_000)
            await page.get_by_role("tab", name="trace").click()
            await expect(page.locator(".waterfall .span")).to_have_count(2)


async def test_a_run_is_cancelled(open_page: OpenPage) -> None:
    async with serving(scripted([{"wait_s": 60}])) as served:
        response = await served.client.responses.create(model="scripted", input="Go", background=True)
        async with open_page(f"{served.url}/#/runs") as page:
            await page.get_by_role("button", name="Cancel").click()
            await expect(page.locator(".status.cancelled").first).to_be_visible()
        assert (await served.client.responses.retrieve(response.id)).status == "cancelled"


async def test_files_are_uploaded_with_hostile_names_and_deleted(open_page: OpenPage) -> None:
    async with serving(more={"files": {"provider": "kv"}}) as served, open_page(f"{served.url}/#/files") as page:
        name = "<img src=x onerror=alert(1)>.txt"
        file = {"name": name, "mimeType": "text/plain", "buffer": b"Hi"}
        await page.locator("input[type=file]").set_input_files(file)  # type: ignore[arg-type]  # a FilePayload
        await expect(page.locator("td").first).to_have_text(name)
        await page.get_by_role("button", name="Delete", exact=True).click()
        await page.locator(".ask .danger").click()
        await expect(page.get_by_text("No file is stored yet.")).to_be_visible()


async def test_a_conversation_shows_its_items(open_page: OpenPage) -> None:
    async with serving() as served:
        items = [{"role": "user", "content": HOSTILE[0]}]
        conversation = await served.client.conversations.create(items=items)  # type: ignore[arg-type]  # a plain dict
        async with open_page(f"{served.url}/#/conversations") as page:
            await page.locator("td a").first.click()
            await expect(page.get_by_text("onerror")).to_be_visible()
            assert conversation.id in await page.title()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 380])
async def test_every_view_fits_its_window_and_names_its_controls(open_page: OpenPage, scheme: str, width: int) -> None:
    async with (
        serving(scripted([{"text": "Hello."}])) as served,
        open_page(f"{served.url}/", viewport={"width": width, "height": 800}, color_scheme=scheme) as page,
    ):
        await ask(page, "Hi")
        await expect(page.locator(".turn > footer")).to_have_count(1)
        for view in VIEWS:
            await page.goto(f"{served.url}/#/{view}")
            await expect(page.locator("h1")).to_be_visible()
            overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{view} is {overflow} px wider than the window"
            nameless = await page.evaluate(COUNT_NAMELESS)
            assert nameless == 0, f"{view} has {nameless} controls without a name"


async def test_a_server_without_models_says_so(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/healthz") as page:
        await page.route("**/v1/models", lambda route: asyncio.ensure_future(route.fulfill(json={"data": []})))
        await page.goto(f"{served.url}/")
        await expect(page.get_by_role("heading", name="This server has no model yet")).to_be_visible()
        await page.unroute("**/v1/models")
        await page.reload()
        await expect(page.get_by_role("heading", name="What do you want to know?")).to_be_visible()


async def test_a_server_that_ends_is_reported_and_tried_again(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "Hello."}])) as served, open_page(f"{served.url}/") as page:
        await expect(page.locator("h1")).to_be_visible()
        await page.route("**/v1/responses", lambda route: asyncio.ensure_future(route.abort()))
        await ask(page, "Hi")
        await expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
        await page.unroute("**/v1/responses")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.get_by_text("Hello.")).to_be_visible()
