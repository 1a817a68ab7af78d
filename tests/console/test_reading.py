"""Answers in Chromium: formulas, colours of code, copies, citations, pictures and files, a card for every item."""

import base64
import json
from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import HOSTILE, ask, scripted
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console

PIXEL = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
"""A picture in base64."""

ANSWER = r"""Energy is $E = mc^2$, or \(a^2\), and costs $5 or $6.

$$\int_0^\infty e^{-x^2} dx = \frac{\sqrt{\pi}}{2}$$

```python
def double(x: int) -> int:
    return 2 * x  # <b>twice</b>
```

```nonsense
<script>document.title = 'owned'</script>
```
"""
HOSTILE_FORMULAS = [
    r"$\href{javascript:alert(1)}{x}$ $\url{https://evil.example}$ $\includegraphics{https://evil.example/a.png}$",
    r"$\htmlStyle{position:fixed}{x}$ $\class{dialog}{x}$ $\color{red}{x}$ $\text{<img src=x onerror=alert(1)>}$",
    r"$\def\a{\a\a}\a$ $\rule{99999em}{99999em}$",
    "$" + "{" * 900 + "x" + "}" * 900 + "$",
    "$$" + "x^{2}+" * 5000 + "1$$",
    r"\[" * 4000 + r"\(" * 4000 + "$a" * 4000,
    "```python\n" + "x = '''" * 6000 + "\n```",
]
DRAW = """
async (items) => {
  const { h, render } = await import("./console/vendor/preact.js");
  const { Items } = await import("./console/parts/items.js");
  const box = document.createElement("div");
  document.querySelector(".turns").append(box);
  render(h(Items, { items }), box);
  await new Promise((resolve) => setTimeout(resolve, 100));
  return [...box.children].map((section) => section.innerText);
}
"""


async def test_formulas_and_code_are_drawn_and_copied(open_page: OpenPage) -> None:
    """Formulas as MathML, code with its language, its colours and a button that copies it; so has the answer."""
    options: dict[str, Any] = {"permissions": ["clipboard-read", "clipboard-write"]}
    loaded: list[str] = []
    async with (
        serving(scripted([{"text": "Plain."}], [{"text": ANSWER}])) as served,
        open_page(f"{served.url}/", **options) as page,
    ):
        page.on("request", lambda request: loaded.append(request.url))
        await ask(page, "First")
        await expect(page.get_by_text("Plain.")).to_be_visible()
        assert not [url for url in loaded if "temml" in url or "highlight" in url]
        await ask(page, "Explain")
        await expect(page.locator("math")).to_have_count(3)
        await expect(page.locator("math.tml-display")).to_have_count(1)
        await expect(page.get_by_text("costs $5 or $6.")).to_be_visible()
        await expect(page.locator(".code-head").first).to_contain_text("python")
        await expect(page.locator(".hljs-keyword").first).to_have_text("def")
        await page.locator(".copy-code").first.click()
        await expect(page.locator(".copy-code").first).to_have_text("Copied")
        program = "def double(x: int) -> int:\n    return 2 * x  # <b>twice</b>"
        assert await page.evaluate("navigator.clipboard.readText()") == program
        await page.get_by_label("Copy the answer").last.click()
        await expect(page.get_by_label("Copy the answer").last).to_have_text("copied")
        assert await page.evaluate("navigator.clipboard.readText()") == ANSWER
        assert "owned" not in await page.title()


async def test_hostile_formulas_and_code_run_nothing_and_hold_nothing_up(open_page: OpenPage) -> None:
    async with (
        serving(scripted(*[[{"text": text}] for text in HOSTILE_FORMULAS])) as served,
        open_page(f"{served.url}/") as page,
    ):
        for number in range(len(HOSTILE_FORMULAS)):
            await ask(page, f"Turn {number}")
            await expect(page.locator("article.turn footer")).to_have_count(number + 1)
        await expect(page.locator("math").first).to_be_attached()
        assert await page.locator(".turns :is(a, img, script, [style*=position])").count() == 0
        overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0


def message(role: str, part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [part]}


async def test_every_kind_of_item_has_a_card(open_page: OpenPage) -> None:
    """No item of the API is shown as raw JSON; what a card does not expect does not break the others."""
    picture = f"data:image/gif;base64,{PIXEL}"
    citation = {"type": "url_citation", "url": "https://a.example/x?(y)", "title": 'The "source"'}
    text = "The Loire is long. ([The source](https://a.example/x)) It is."
    cited = {**citation, "start_index": 19, "end_index": 54}
    outcome = {"type": "exit", "exit_code": 3}
    items: list[dict[str, Any]] = [
        message("assistant", {"type": "output_text", "text": text, "annotations": [cited]}),
        {"type": "image_generation_call", "result": PIXEL, "revised_prompt": "A dot"},
        {"type": "shell_call", "action": {"commands": ["ls -la"]}},
        {"type": "shell_call_output", "output": [{"stdout": "a.txt", "stderr": "oh", "outcome": outcome}]},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a.py", "diff": "-x\n+y"}},
        {"type": "computer_call", "actions": [{"type": "click", "x": 1}]},
        {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": picture}},
        {"type": "tool_search_output", "tools": [{"type": "function", "name": "look", "description": "Looks."}]},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "in parts"}]},
        {"type": "mcp_approval_response", "approve": False, "reason": "no"},
        message("user", {"type": "input_file", "filename": "a.pdf", "file_data": picture}),
        message("assistant", {"type": "output_text", "text": HOSTILE[3], "annotations": None}),
    ]
    async with serving() as served, open_page(f"{served.url}/") as page:
        texts = await page.evaluate(DRAW, items)
        assert await page.locator(".json").count() == 0
        mark = page.locator("a.cite")
        assert (await mark.get_attribute("title") or "").endswith("· a.example")
        assert await page.locator(".item img").count() == 2
    assert len(texts) == len(items)
    expected = ["“The Loire is long.”", "A dot", "ls -la", "exit code 3", "a.py", "click", "screen", "look Looks."]
    assert [each for each, text in zip(expected, texts, strict=False) if each not in text] == []
    assert "in parts" in texts[8]
    assert "Denied no" in texts[9]
    assert "a.pdf" in texts[10]
    assert json.dumps(texts).count("owned") == 0


async def test_a_picture_that_is_attached_shows_before_and_after_it_is_sent(open_page: OpenPage) -> None:
    dot = base64.b64decode(PIXEL)
    async with serving(scripted([{"text": "A dot."}])) as served, open_page(f"{served.url}/") as page:
        files: Any = [{"name": "dot.gif", "mimeType": "image/gif", "buffer": dot}]
        await page.locator(".composer input[type=file]").set_input_files(files)
        await expect(page.locator(".composer .thumb")).to_be_visible()
        await ask(page, "What is it?")
        await expect(page.locator(".turn img.attached")).to_be_visible()
        await page.get_by_role("button", name="Edit").click()
        await expect(page.locator(".composer .thumb")).to_be_visible()
