"""Takes a picture of every view of the page, light and dark, narrow and wide, to look at them:

python -m tests.console.pictures FOLDER [PART OF A NAME]
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final, Literal

from playwright.async_api import Page, async_playwright

from tests.console.conftest import CHROMIUM
from tests.console.seeded import seeded

WIDTHS: Final = (380, 1600)
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
PANELS: Final = {"settings": "Settings", "inspector": "Inspect", "chats": "Chats"}
"""Panels of the Playground that are pictured too, by their names in the files."""
_SETTLE_MS: Final = 500


async def take_pictures(folder: Path, part: str) -> None:
    """Write the pictures of the views whose name has the part into the folder."""
    with tempfile.TemporaryDirectory() as data:
        async with seeded(Path(data)) as stack, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            views = {name: path for name, path in stack.views.items() if part in name}
            for width in WIDTHS:
                for scheme in SCHEMES:
                    window = {"width": width, "height": 860}
                    context = await browser.new_context(viewport=window, color_scheme=scheme)  # pyright: ignore[reportArgumentType]  # a TypedDict
                    page = await context.new_page()
                    await page.goto(stack.served.url)
                    for name, path in views.items():
                        await page.evaluate("(path) => { location.hash = `#/${path}`; }", path)
                        await _take(page, folder / f"{name} {width} {scheme}.png")
                    for name, label in PANELS.items() if part in "panels" else ():
                        await page.evaluate(
                            "(path) => { location.hash = `#/${path}`; }",
                            views.get("playground of a response", "playground"),
                        )
                        await page.get_by_role("button", name=label).first.click()
                        await _take(page, folder / f"panel {name} {width} {scheme}.png")
                        await page.get_by_role("button", name=label).first.click(force=True)
                    await context.close()
            await browser.close()


async def _take(page: Page, path: Path) -> None:
    await page.wait_for_timeout(_SETTLE_MS)
    await page.screenshot(path=path)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(take_pictures(target, sys.argv[2] if len(sys.argv) > 2 else ""))
