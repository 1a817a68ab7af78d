"""Files, vector stores and containers in the page, over the real providers."""

import shutil
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.test_accessibility import findings
from tests.console.test_playground import ask
from tests.support.models import documents
from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console


async def upload(page: Page, name: str, content: bytes, *, within: str = "") -> None:
    file = {"name": name, "mimeType": "text/plain", "buffer": content}
    await page.locator(f"{within} input[type=file]").set_input_files(file)  # type: ignore[arg-type]  # a FilePayload


async def saved(page: Page, label: str) -> bytes:
    """Press a download button and return the bytes that the browser saves."""
    async with page.expect_download() as download:
        await page.get_by_role("button", name=label).click()
    return (await (await download.value).path()).read_bytes()


async def test_a_search_shows_the_chunk_with_its_relevance_and_both_halves(open_page: OpenPage, tmp_path: Path) -> None:
    async with filing(tmp_path, [{"text": "Hi"}]) as served:
        store, _ = await store_of(served)
        async with open_page(f"{served.url}/#/files/{store}") as page:
            await expect(page.locator("tbody")).to_contain_text("whales.md")
            await page.get_by_label("Search").fill("sourdough yeast")
            await page.keyboard.press("Enter")
            hit = page.locator(".hit").first
            await expect(hit).to_contain_text("bread.md")
            await expect(hit).to_contain_text("Sourdough rises by wild yeast")
            scores = [float(text.split("\n")[-1]) for text in await hit.locator(".score").all_inner_texts()]
            relevance, likeness, words = scores
            assert 0 < relevance <= 1
            assert words == pytest.approx(1, abs=0.01)
            assert relevance == pytest.approx((likeness + 0.25 * words) / 1.25, abs=0.01)
            await page.reload()
            await expect(page.locator(".hit").first).to_contain_text("bread.md")


async def test_a_file_that_cannot_be_indexed_shows_its_error(open_page: OpenPage, tmp_path: Path) -> None:
    async with filing(tmp_path, [{"text": "Hi"}]) as served:
        store = await served.client.vector_stores.create(name="Zoo")
        async with open_page(f"{served.url}/#/files/{store.id}") as page:
            await upload(page, "broken.pdf", b"%PDF-1.7 is cut off")
            await expect(page.locator("tbody .status.failed")).to_be_visible(timeout=10_000)
            await expect(page.locator("tbody .bad")).not_to_be_empty()
            await page.get_by_role("link", name="Vector stores").click()
            await expect(page.locator("tbody")).to_contain_text("1 failed")


async def test_the_pages_of_a_pdf_are_shown_where_it_is_stored_and_where_it_is_attached(
    open_page: OpenPage, tmp_path: Path
) -> None:
    async with filing(tmp_path, [{"text": "Hi"}]) as served, open_page(f"{served.url}/#/files") as page:
        await upload(page, "report.pdf", documents.pdf("One.", "Two.", "Three.", "Four.", "Five."))
        await page.get_by_role("button", name="Show the pages of report.pdf").click()
        sheets = page.get_by_role("dialog").get_by_role("img")
        await expect(sheets).to_have_count(4)
        await page.get_by_role("button", name="More pages: 4 of 5 are shown").click()
        await expect(sheets).to_have_count(5)
        assert await sheets.last.evaluate("(image) => image.naturalWidth") == 1000
        assert await findings(page) == []
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name="Show the pages of report.pdf")).to_be_focused()
        await upload(page, "locked.pdf", documents.encrypted_pdf("tiger"))
        await expect(page.get_by_role("button", name="Pages of locked.pdf: The PDF is encrypted")).to_be_disabled()
        await page.goto(f"{served.url}/#/playground")
        await upload(page, "attached.pdf", documents.pdf("Attached."), within=".composer")
        await page.get_by_role("button", name="Show the pages of attached.pdf").click()
        await expect(sheets).to_have_count(1)
        await page.get_by_role("button", name="Close").click()
        await ask(page, "What is in it?")
        await expect(
            page.get_by_role("article").get_by_role("button", name="Show the pages of attached.pdf")
        ).to_be_visible()


async def test_a_file_is_downloaded_as_it_was_uploaded(open_page: OpenPage) -> None:
    async with serving(more={"files": {"provider": "kv"}}) as served, open_page(f"{served.url}/#/files") as page:
        await upload(page, "notes.txt", b"\x00 some bytes")
        assert await saved(page, "Download notes.txt") == b"\x00 some bytes"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_containers_list_download_take_and_delete_files(open_page: OpenPage) -> None:
    python = {"provider": "python", "timeout_s": 5}
    async with serving(tool_runtime=python) as served:
        container = await served.client.containers.create(name="Lab")
        await served.client.containers.files.create(container.id, file=("table.csv", b"a,b\n1,2\n"))
        async with open_page(f"{served.url}/#/files?tab=containers") as page:
            await page.get_by_role("link", name="Lab").click()
            assert await saved(page, "table.csv") == b"a,b\n1,2\n"
            await upload(page, "more.txt", b"more")
            await expect(page.locator("tbody tr")).to_have_count(2)
            await page.locator("tr", has_text="more.txt").get_by_role("button", name="Delete", exact=True).click()
            await page.locator(".ask .danger").click()
            await expect(page.locator("tbody tr")).to_have_count(1)
            await page.get_by_role("button", name="Delete", exact=True).first.click()
            await page.locator(".bar .ask .danger").click()
            await expect(page.get_by_text("There is no container.")).to_be_visible()
        assert (await served.client.containers.list()).data == []


async def test_a_server_without_files_says_so(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/#/files?tab=containers") as page:
        await expect(page.locator(".empty")).to_contain_text("This server has no containers")
