"""A real Phoenix (`pip install arize-phoenix` in an environment of its own; `phoenix` on the PATH, or named by the
variable PHOENIX) shows a response with its turns and its tool."""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import async_playwright

from tests.spec.telemetry.test_runs import DONE
from tests.spec.tools.test_web_search import TOOL, search, searching
from tests.support.sdk.requests import create
from tests.support.servers.ports import free_port

PHOENIX = os.environ.get("PHOENIX") or shutil.which("phoenix")
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.skipif(PHOENIX is None, reason="phoenix is not installed"),
]


@pytest.fixture
async def phoenix(tmp_path: Path) -> AsyncGenerator[str]:
    """The URL of a running Phoenix."""
    port = free_port()
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(tmp_path / "phoenix"),
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    assert PHOENIX is not None
    with (tmp_path / "phoenix.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(PHOENIX, "serve", env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(180), httpx.AsyncClient() as http:
            while process.returncode is None:
                try:
                    if (await http.get(f"{url}/healthz")).status_code == 200:
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.5)
        assert process.returncode is None, (tmp_path / "phoenix.log").read_text()[-2000:]
        yield url
    finally:
        process.terminate()
        await process.wait()


async def spans_of(url: str, count: int) -> list[dict[str, Any]]:
    """The spans that Phoenix has stored, once there are so many."""
    async with asyncio.timeout(30), httpx.AsyncClient() as http:
        while True:
            answer = await http.get(f"{url}/v1/projects/default/spans", params={"limit": 100})
            data: list[dict[str, Any]] = answer.json().get("data", []) if answer.status_code == 200 else []
            if len(data) >= count:
                return data
            await asyncio.sleep(0.3)


async def test_phoenix_shows_the_turns_and_the_tool_of_a_response(
    phoenix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", phoenix)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    async with searching([search()], DONE) as (served, _):
        await create(served, tools=[TOOL], input="What is new in Rome?", metadata={"agent_name": "traveller"})
    spans = await spans_of(phoenix, 6)
    kinds = {span["name"]: span["span_kind"] for span in spans}
    assert kinds["invoke_agent traveller"] == "AGENT"
    assert kinds["chat scripted"] == "LLM"
    assert kinds["execute_tool web_search"] == "TOOL"
    chat = next(span for span in spans if span["name"] == "chat scripted")
    assert chat["attributes"]["llm.token_count.prompt"] > 0
    trace_id = chat["context"]["trace_id"]
    picture = Path(os.environ.get("PHOENIX_SCREENSHOT", tmp_path / "trace.png"))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(f"{phoenix}/redirects/traces/{trace_id}")
        await page.get_by_text("execute_tool web_search").first.wait_for(timeout=60_000)
        await page.get_by_text("invoke_agent traveller").first.wait_for()
        await page.screenshot(path=picture)
        await browser.close()
    assert picture.stat().st_size > 10_000
