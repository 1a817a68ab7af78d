"""Chats in Chromium: their list, which every browser has, branches of turns, drafts, exports, and long ones."""

import json
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import HOSTILE, ask, scripted
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.console

UNITS = """
async () => {
  const { chatOf, groupByDay, titleOf } = await import("/console/chats.js");
  const { Branches } = await import("/console/chain.js");
  const { toMarkdown } = await import("/console/exports.js");
  const noon = new Date(2026, 10, 27, 12).getTime() / 1000;
  const chat = (id, days, more) => chatOf({ id, created_at: noon - days * 86400, metadata: { title: id, ...more } });
  const chats = [chat("old", 90), chat("a", 0), chat("p", 50, { pinned: "true" }), chat("b", 1), chat("c", 3)];
  const groups = groupByDay(chats, noon);
  const row = (id, previous_response_id) => ({ id, previous_response_id });
  const branches = new Branches([row("1"), row("2a", "1"), row("2b", "1"), row("3", "2a"), row("4", "lost")]);
  branches.add(row("2c", "1"));
  branches.add(row("2c", "1"));
  const loop = new Branches([row("x", "y"), row("y", "x")]);
  const message = (role, text) => ({ type: "message", role, content: [{ type: "output_text", text }] });
  const call = { type: "function_call", name: "look", arguments: "```" };
  const response = { model: "m", created_at: 1, output: [call, message("assistant", "A.")] };
  return {
    titles: [titleOf("## What is\\n*this*?"), titleOf(""), titleOf("word ".repeat(100)), titleOf("x".repeat(200))],
    groups: groups.map(({ name, chats }) => [name, chats.map(({ id }) => id)]),
    siblings: branches.siblings("2b"), path: branches.pathTo("3"),
    leaf: branches.leafOf("1"), left: branches.leafOf("2a"),
    loop: [loop.pathTo("x").length, loop.leafOf("x").length],
    markdown: toMarkdown("T", [{ response, input: [message("user", "Q?")] }]),
  };
}
"""


async def test_titles_days_branches_and_exports_are_made_by_pure_functions(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/") as page:
        results = await page.evaluate(UNITS)
    assert results["titles"][:2] == ["What is this ?", "New chat"]
    assert all(len(title) <= 81 and title.endswith("…") for title in results["titles"][2:])
    assert results["groups"] == [
        ["Pinned", ["p"]],
        ["Today", ["a"]],
        ["Yesterday", ["b"]],
        ["Tuesday", ["c"]],
        ["August 2026", ["old"]],
    ]
    assert results["siblings"] == ["2a", "2b", "2c"]
    assert (results["path"], results["leaf"], results["left"]) == (["1", "2a", "3"], "2c", "3")
    assert results["loop"] == [2, 1]
    assert "## You\n\nQ?" in results["markdown"]
    assert "## m\n\nA." in results["markdown"]
    assert "````json" in results["markdown"]


async def turn(page: Page, number: int) -> None:
    """Wait until that many turns have ended."""
    await expect(page.locator("article.turn footer")).to_have_count(number)


async def test_a_chat_is_listed_renamed_pinned_searched_and_deleted_in_every_browser(open_page: OpenPage) -> None:
    """A chat has its first words as title, and is found by the words of a question and of an answer."""
    script = scripted([{"text": "The Loire."}], [{"text": "About 1006 km."}], [{"text": "Bonjour."}])
    async with serving(script) as served:
        async with open_page(f"{served.url}/") as page:
            await ask(page, "Which river of France is the longest?")
            await turn(page, 1)
            await ask(page, "How LONG is it exactly?")
            await turn(page, 2)
            await page.get_by_role("button", name="New chat").click()
            await ask(page, HOSTILE[0])
            await turn(page, 1)
        async with open_page(f"{served.url}/") as page:
            rows = page.locator(".chats li")
            await expect(rows).to_have_count(2)
            await expect(rows.nth(0)).to_contain_text("img src=x onerror=")
            await expect(rows.nth(1)).to_contain_text("Which river of France is the longest?")
            await rows.nth(1).get_by_role("button").click()
            await page.get_by_role("button", name="Rename").click()
            await page.get_by_label("Title", exact=True).fill("Rivers")
            await page.keyboard.press("Enter")
            await expect(rows.nth(1)).to_contain_text("Rivers")
            await rows.nth(1).get_by_role("button").click()
            await page.get_by_role("button", name="Pin").click()
            await expect(page.locator(".chats section").nth(0)).to_contain_text("Pinned")
            for words in ("how long", "1006", "rivers"):
                await page.get_by_label("Search chats").fill(words)
                await expect(page.locator(".chats [role=status]")).to_have_text("1 found")
                await expect(rows).to_contain_text("Rivers")
            await rows.get_by_role("link").click()
            await expect(page.get_by_role("heading", name="Rivers")).to_be_visible()
            await turn(page, 2)
            await page.get_by_label("Search chats").fill("")
            await expect(rows.nth(0)).to_have_class("on")
            await rows.nth(0).get_by_role("button").click()
            await page.locator(".chats .actions .danger").click()
            await page.locator(".chats .ask .danger").click()
            await expect(rows).to_have_count(1)
            await expect(page.get_by_role("heading", name="Playground")).to_be_visible()
        listed: Any = await served.client.get("/responses", cast_to=object)
        assert [row["question"] for row in listed["data"]] == [HOSTILE[0]]


async def test_edits_and_new_tries_are_branches_that_stay(open_page: OpenPage) -> None:
    """A turn that was tried again or edited has arrows to its branches, the first one too, after a reload."""
    script = scripted(*([{"text": text}] for text in ("One.", "Two.", "Two again.", "Three.", "Another one.")))
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await ask(page, "First question")
        await turn(page, 1)
        await ask(page, "Second question")
        await turn(page, 2)
        await page.get_by_role("button", name="Retry").last.click()
        await expect(page.get_by_text("Two again.")).to_be_visible()
        await ask(page, "Third question")
        await turn(page, 3)
        arrows = page.get_by_role("group", name="Branches")
        await expect(arrows).to_have_text("2/2")
        await page.get_by_role("button", name="Earlier branch").click()
        await expect(page.get_by_text("Two.", exact=True)).to_be_visible()
        await turn(page, 2)
        await page.reload()
        await expect(arrows).to_have_text("1/2")
        await page.get_by_role("button", name="Later branch").click()
        await expect(page.get_by_text("Three.", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Edit").first.click()
        await expect(page.get_by_label("Message")).to_have_value("First question")
        await turn(page, 3)
        await page.get_by_label("Message").fill("A better question")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("Another one.")).to_be_visible()
        await turn(page, 1)
        await page.reload()
        await expect(arrows).to_have_text("2/2")
        await page.get_by_role("button", name="Earlier branch").click()
        await expect(page.get_by_text("Three.", exact=True)).to_be_visible()
        await expect(page.locator(".chats li")).to_have_count(1)


async def test_a_draft_survives_a_reload_and_an_answer_goes_on(open_page: OpenPage) -> None:
    script = scripted([{"text": ["First part. "]}, {"wait_s": 1}, {"text": "Second part."}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await page.get_by_label("Message").fill("Half a thought")
        await page.reload()
        await expect(page.get_by_label("Message")).to_have_value("Half a thought")
        await page.keyboard.press("Tab")
        await ask(page, "Go")
        await expect(page.get_by_text("First part.")).to_be_visible()
        await page.get_by_label("Message").fill("And then?")
        await page.reload()
        await expect(page.get_by_text("First part. Second part.")).to_be_visible()
        await expect(page.get_by_label("Message")).to_have_value("And then?")
        await page.get_by_role("button", name="New chat").click()
        await expect(page.get_by_label("Message")).to_have_value("")


async def export_chat(page: Page, name: str) -> str:
    await page.locator(".chats li").get_by_role("button", name="Actions").click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name=name).click()
    await page.locator(".chats li").get_by_role("button", name="Actions").click()
    return (await (await download.value).path()).read_text()


async def test_a_chat_is_saved_as_markdown_and_as_json_with_all_branches(open_page: OpenPage) -> None:
    script = scripted([{"reasoning": "Hm."}, {"text": "One **strong** answer."}], [{"text": "Another."}])
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await ask(page, "What is it?")
        await turn(page, 1)
        await page.get_by_role("button", name="Retry").click()
        await expect(page.get_by_text("Another.")).to_be_visible()
        await turn(page, 1)
        markdown = await export_chat(page, "Markdown")
        saved = json.loads(await export_chat(page, "JSON"))
    assert markdown.startswith("# What is it?\n")
    assert "## You\n\nWhat is it?\n\n## scripted\n\nAnother.\n" in markdown
    texts = {each["response"]["output"][-1]["content"][0]["text"] for each in saved["turns"]}
    assert texts == {"One **strong** answer.", "Another."}


async def create_chain(served: Served, length: int) -> str:
    previous: str | None = None
    for number in range(length):
        response = await served.client.responses.create(
            model="scripted", input=f"Question {number}", previous_response_id=previous
        )
        previous = response.id
    assert previous
    return previous


async def test_a_long_chain_opens_at_its_end_and_shows_earlier_turns_when_asked(
    open_page: OpenPage,
) -> None:
    script = scripted(*[[{"text": f"Answer {number}."}] for number in range(100)])
    async with serving(script) as served:
        last = await create_chain(served, 100)
        async with open_page(f"{served.url}/#/playground?from={last}") as page:
            await expect(page.get_by_text("Answer 99.")).to_be_in_viewport()
            await turn(page, 30)
            await page.get_by_role("button", name="70 earlier turns").click()
            await turn(page, 60)
            await page.get_by_role("button", name="40 earlier turns").click()
            await page.get_by_role("button", name="10 earlier turns").click()
            await expect(page.get_by_text("Answer 0.", exact=True)).to_be_attached()


async def test_a_link_to_an_early_turn_leads_to_the_later_ones(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "One."}], [{"text": "Two."}], [{"text": "Three."}])) as served:
        first = await served.client.responses.create(model="scripted", input="1")
        second = await served.client.responses.create(model="scripted", input="2", previous_response_id=first.id)
        await served.client.responses.create(model="scripted", input="3", previous_response_id=second.id)
        async with open_page(f"{served.url}/#/playground?from={first.id}") as page:
            await page.get_by_role("button", name="2 later turns").click()
            await turn(page, 3)


async def test_two_models_answer_one_question_and_stay_side_by_side_after_a_reload(open_page: OpenPage) -> None:
    """One composer asks both; the address keeps both; their answers are branches of one chat."""
    script = scripted(*([{"text": text}] for text in ("Before.", "One of two.", "One of two.")))
    async with serving(script) as served, open_page(f"{served.url}/") as page:
        await ask(page, "Start")
        await turn(page, 1)
        await page.get_by_role("button", name="Compare").click()
        await expect(page.get_by_text("Before.")).to_have_count(2)
        await expect(page.get_by_label("Message")).to_have_count(1)
        await ask(page, "Both")
        await expect(page.get_by_text("One of two.")).to_have_count(2)
        await turn(page, 4)
        await page.reload()
        await expect(page.get_by_text("One of two.")).to_have_count(2)
        await page.get_by_role("button", name="Compare").click()
        await expect(page.get_by_role("group", name="Branches")).to_contain_text("/2")
        await expect(page.locator(".chats li")).to_have_count(1)
