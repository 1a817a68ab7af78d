"""The page in a real Chromium: every report of its security policy, every console error and every request that leaves
the origin fails the test. All tests of a process share one event loop and one browser, each in windows of its own."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, Request, Route, async_playwright, expect

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
REPORT = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
"""
# on a busy machine a view comes late, and is not missing
expect.set_options(timeout=20_000)
EXPECTED = "Failed to load resource"
"""Chromium writes this for every answer of 400 and more, which pages show as errors on purpose."""


class OpenPage(Protocol):
    """Opens a URL in a new window. The page may also go to `other_origin`, whose own pages load nothing from elsewhere;
    `options` are those of Playwright's `new_context`."""

    def __call__(self, url: str, *, other_origin: str = "", **options: Any) -> AbstractAsyncContextManager[Page]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the asynchronous tests of this folder in one event loop: the browser and the servers of modules need it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncGenerator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """Open a URL; what goes wrong in the page is raised when the context ends."""

    @asynccontextmanager
    async def opened(url: str, *, other_origin: str = "", **options: Any) -> AsyncGenerator[Page]:
        problems: list[str] = []
        own = ("/".join(url.split("/")[:3]), "data:", "blob:", *([other_origin] if other_origin else []))

        async def refuse_others(route: Route) -> None:
            await (route.continue_() if route.request.url.startswith(own) else route.abort())

        def on_console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and EXPECTED not in message.text:
                problems.append(f"{message.type}: {message.text}")

        def on_request(request: Request) -> None:
            is_from_other = bool(other_origin) and page.url.startswith(other_origin)
            if not is_from_other and not request.url.startswith(own):
                problems.append(f"left the origin: {request.url}")

        window: dict[str, Any] = {"viewport": {"width": 1360, "height": 860}, **options}
        context = await browser.new_context(**window)
        await context.add_init_script(REPORT)
        if other_origin:
            await context.route("**/*", refuse_others)
        page = await context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
        page.on("request", on_request)
        try:
            await page.goto(url)
            yield page
            assert not problems, problems
        finally:
            await context.close()

    return opened
