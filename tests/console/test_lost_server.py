"""The page while its server is killed with SIGKILL in mid-stream and started again, and while the page is reloaded."""

import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import ask, scripted
from tests.support.servers.ports import free_port
from tests.support.servers.serving import serving
from tests.support.servers.stack_process import running_stack

pytestmark = pytest.mark.console
READ_ROWS = "rows => rows.map((row) => Number(row.firstElementChild.innerText))"


def write_config(folder: Path, *turns: list[dict[str, Any]]) -> str:
    config = {
        "inference": scripted(*turns),
        "kv_store": {"provider": "sqlite", "path": str(folder / "stack.db")},
        "responses": {"provider": "loop", "background": {"poll_s": 0.1, "lease_s": 2}},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return str(path)


@asynccontextmanager
async def started(config: str, port: int, folder: Path) -> AsyncGenerator[int]:
    async with running_stack(config, cwd=folder, port=port) as (_, process):
        yield process


async def watch(page: Page, text: str) -> None:
    """Ask, with the events in sight; what is stored runs in the background."""
    await page.get_by_role("button", name="Inspect").click()
    await ask(page, text)


async def test_a_background_response_goes_on_at_the_last_event_after_a_kill(
    open_page: OpenPage, tmp_path: Path
) -> None:
    config, port = write_config(tmp_path, [{"wait_s": 2}, {"text": ["The ", "end."]}]), free_port()
    async with started(config, port, tmp_path) as process:
        opened = open_page(f"http://127.0.0.1:{port}/", viewport={"width": 1360, "height": 1200})
        page = await opened.__aenter__()
        await watch(page, "Go")
        await expect(page.locator(".event").last).to_contain_text("in_progress")
        os.kill(process, signal.SIGKILL)
        await expect(page.get_by_role("status")).to_contain_text("The connection broke off")
    async with started(config, port, tmp_path):
        await expect(page.get_by_text("The end.")).to_be_visible(timeout=30_000)
        await expect(page.get_by_role("status")).to_have_count(0)
        await page.get_by_label("join deltas").uncheck()
        await expect(page.locator(".event").last).to_contain_text("completed")
        numbers = await page.locator(".event").evaluate_all(READ_ROWS)
        assert numbers == list(range(len(numbers)))
        await opened.__aexit__(None, None, None)


async def test_what_a_kill_has_lost_is_said_and_can_be_asked_again(open_page: OpenPage, tmp_path: Path) -> None:
    config, port = write_config(tmp_path, [{"text": ["Half "]}, {"wait_s": 1}, {"text": "whole."}]), free_port()
    async with started(config, port, tmp_path) as process:
        opened = open_page(f"http://127.0.0.1:{port}/")
        page = await opened.__aenter__()
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("in the background").uncheck()
        await ask(page, "Go")
        await expect(page.get_by_text("Half")).to_be_visible()
        os.kill(process, signal.SIGKILL)
        await expect(page.get_by_role("alert")).to_contain_text("what was not sent is lost")
        await expect(page.get_by_text("Half")).to_be_visible()
    async with started(config, port, tmp_path):
        await page.get_by_role("button", name="Try again").click()
        await expect(page.get_by_text("Half whole.")).to_be_visible()
        await opened.__aexit__(None, None, None)


async def test_a_reload_in_mid_stream_goes_on_with_a_background_response(open_page: OpenPage) -> None:
    script = scripted([{"text": ["First part. "]}, {"wait_s": 2}, {"text": "Second part."}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await watch(page, "Go")
        await expect(page.get_by_text("First part.")).to_be_visible()
        await page.reload()
        await expect(page.get_by_text("First part.")).to_be_visible()
        await expect(page.get_by_text("First part. Second part.")).to_be_visible()
        await expect(page.locator(".event").last).to_contain_text("completed")
        await page.get_by_role("button", name="New chat").click()
        await page.reload()
        await expect(page.get_by_text("What do you want to know?")).to_be_visible()
