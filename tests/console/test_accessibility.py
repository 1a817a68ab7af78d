"""axe-core over every view in both themes, and the keyboard alone through all of them."""

from collections.abc import AsyncGenerator
from importlib.resources import files
from typing import Any, Final

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.seeded import Seeded, seeded
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console


AXE: Final = files("axe_playwright_python").joinpath("axe.min.js").read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Seeded]:
    """A stack with something in every view, which no test of this file changes."""
    async with seeded(tmp_path_factory.mktemp("seeded")) as stack:
        yield stack


async def findings(page: Page) -> list[str]:
    """Return what axe-core finds wrong: the rule, the element, the reason."""
    if not await page.evaluate("'axe' in window"):  # a view of the same document has it
        await page.evaluate(AXE)
    results: Any = await page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [
        f"{violation['id']}: {node['target']}: {node['failureSummary']}"
        for violation in results["violations"]
        for node in violation["nodes"]
    ]


def window_of(width: int, scheme: Any) -> dict[str, Any]:
    """Options of a window without motion."""
    return {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "reduced_motion": "reduce"}


async def look(page: Page, name: str, wrong: list[str]) -> None:
    """Append what axe-core finds wrong, and whether the page is wider than its window."""
    await settle(page)
    wrong.extend(f"{name}: {finding}" for finding in await findings(page))
    overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if overflow > 0:
        wrong.append(f"{name} is {overflow} px wider than the window")


async def settle(page: Page) -> None:
    await expect(page.locator(".skeleton")).to_have_count(0)
    await page.wait_for_timeout(250)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
async def test_axe_finds_nothing_in_any_view(open_page: OpenPage, stack: Seeded, scheme: Any, width: int) -> None:
    wrong: list[str] = []
    async with open_page(f"{stack.served.url}/", **window_of(width, scheme)) as page:
        for name, path in stack.views.items():
            await page.goto(f"{stack.served.url}/#/{path}")
            await settle(page)
            wrong += [f"{name}: {finding}" for finding in await findings(page)]
        await page.goto(f"{stack.served.url}/#/{stack.views['response']}")
        for tab in ("Schema", "Response"):
            await page.get_by_role("tab", name=tab).click()
            wrong += [f"{tab}: {finding}" for finding in await findings(page)]
        await page.goto(f"{stack.served.url}/#/playground")
        await page.get_by_role("button", name="Settings").click()
        wrong += [f"settings: {finding}" for finding in await findings(page)]
        await page.locator("h1").click()
        await page.keyboard.press("?")
        wrong += [f"help: {finding}" for finding in await findings(page)]
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_in_empty_views(open_page: OpenPage, scheme: Any) -> None:
    wrong: list[str] = []
    async with serving() as served, open_page(f"{served.url}/", color_scheme=scheme, reduced_motion="reduce") as page:
        for view in ("playground", "responses", "runs", "conversations", "agents", "files", "traces", "figures"):
            await page.goto(f"{served.url}/#/{view}")
            await settle(page)
            wrong += [f"{view}: {finding}" for finding in await findings(page)]
    assert not wrong, "\n".join(wrong)


REACHABLE = "a[href], button:not([disabled]), input:not([hidden], [disabled]), select, textarea, summary"
UNREACHED = f"""
() => [...document.querySelectorAll({REACHABLE!r})]
  .filter((node) => node.checkVisibility() && !node.reached && node.tabIndex >= 0)
  .map((node) => node.outerHTML.slice(0, 120))
"""
MARK = """
() => {
  const node = document.activeElement;
  const again = Boolean(node.reached) || node === document.body;
  node.reached = true;
  const style = getComputedStyle(node);
  return [again, node === document.body || style.outlineStyle !== "none" || Boolean(node.closest(".composer"))];
}
"""


async def walk(page: Page, stack: Seeded, path: str) -> list[str]:
    """Press Tab until the focus has gone round; return the controls that it did not reach, or reached unseen."""
    await page.goto("about:blank")
    await page.goto(f"{stack.served.url}/#/{path}")
    await settle(page)
    unseen: list[str] = []
    for _ in range(400):
        await page.keyboard.press("Tab")
        again, is_visible = await page.evaluate(MARK)
        if not is_visible:
            unseen.append(await page.evaluate("document.activeElement.outerHTML.slice(0, 120)"))
        if again:
            break
    return [*await page.evaluate(UNREACHED), *unseen]


async def test_the_keyboard_alone_reaches_every_control_of_every_view(open_page: OpenPage, stack: Seeded) -> None:
    wrong: list[str] = []
    async with open_page(f"{stack.served.url}/") as page:
        for name, path in stack.views.items():
            wrong += [f"{name}: {control}" for control in await walk(page, stack, path)]
    assert not wrong, "\n".join(wrong)


async def test_tabs_events_and_deletion_work_by_keyboard(open_page: OpenPage, stack: Seeded) -> None:
    async with open_page(f"{stack.served.url}/") as page:
        await page.goto(f"{stack.served.url}/#/{stack.views['response']}")
        await page.get_by_role("tab", name="output").focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("tab", name="tree")).to_be_focused()
        await expect(page.locator(".node")).to_have_count(4)
        await page.get_by_role("group", name="Events").focus()
        await page.keyboard.press("Home")
        await page.keyboard.press("ArrowDown")
        await expect(page.locator(".event.on")).to_contain_text("queued")
        await page.get_by_role("button", name="Delete", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Keep")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Delete", exact=True)).to_be_visible()
