"""Subagents in the timeline of a session in Chromium: their work under the calls that created them."""

import json
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import OpenPage
from tests.console.test_accessibility import look, window_of
from tests.console.test_agents import open_session, state_of
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.sessions import FUNCTION, create_session, message, rest, run_session, send, tool_result
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console
WAIT: Script = [call("wait_for_subagents", "{}", id="w")]
AGENT: Any = {"tools": [FUNCTION], "multi_agent": {"enabled": True}}
ASK: Script = [{"reasoning": "I need a number."}, call("get", '{"city": "Bonn"}', id="g")]


def create(name: str, *turns: Script) -> Any:
    return call("create_subagent", json.dumps({"task": play(*turns), "name": name}), id=f"create_{name}")


CREATE: Script = [create("Reader", [{"text": "I have read *all* of it."}]), create("Counter", ASK)]


def group_of(page: Page, name: str) -> Locator:
    return page.locator(".subagent").filter(has_text=name)


async def test_the_work_of_subagents_is_under_the_calls_that_created_them(open_page: OpenPage) -> None:
    async with serving(MODEL) as served:
        session = await run_session(served.client, '[[{"text": "Ready."}]]', **AGENT)
        async with open_page(f"{served.url}/#/agents") as page:
            await open_session(page, served, session.id)
            await send(served.client, session.id, message(play(CREATE, WAIT)))
            reader, counter = group_of(page, "Reader"), group_of(page, "Counter")
            await expect(reader.locator(".status")).to_have_text("completed")
            await expect(counter.locator(".status")).to_have_text("waits for you")
            turn = page.locator(".turn").last
            await expect(turn.locator(":scope > .create_subagent_call + .subagent")).to_have_count(2)
            await expect(page.locator(".item em")).to_have_count(0)
            await expect(page.get_by_label("Waiting for you")).to_contain_text("for Counter")
            await reader.locator("summary").first.click()
            await expect(reader.locator(".inside em")).to_have_text("all")
            await counter.locator("summary").first.click()
            await expect(counter.get_by_text("I need a number.")).to_have_count(0)  # folded, as reasoning is
            await page.get_by_label("Result of get").last.fill("42")
            await page.get_by_role("button", name="Send the result").click()
            await expect(state_of(page)).to_have_text("idle")
            await expect(counter.locator(":scope > summary .status")).to_have_text("completed")
            await expect(counter.locator(".function_call_output")).to_contain_text("42")
            await expect(turn.locator(":scope > .wait_for_subagents_call")).to_contain_text("agent → Reader, Counter")
            await expect(turn.locator(":scope > .agent_message").first).to_contain_text("Reader → agent")
            live = [await each.locator(".inside").inner_text() for each in (reader, counter)]
            await page.reload()
            for group, text in zip((reader, counter), live, strict=True):
                await expect(group.locator(":scope > summary .status")).to_have_text("completed")
                await group.locator("summary").first.click()
                await expect(group.locator(".inside .item").last).to_be_visible()
                assert await group.locator(".inside").inner_text() == text


async def test_a_subagent_that_works_is_seen_by_its_last_words_also_after_a_reload(open_page: OpenPage) -> None:
    slow = create("Writer", [{"text": ["One ", "two "]}, {"wait_s": 60}])
    async with serving(MODEL) as served:
        session = await create_session(served.client, play([slow], WAIT), **AGENT)
        async with open_page(f"{served.url}/#/agents/{session.id}") as page:
            writer = group_of(page, "Writer")
            for _ in range(2):
                await expect(writer.locator(".last")).to_have_text("One two")
                await expect(writer.locator(".status")).to_have_text("working")
                await page.reload()
            await writer.locator("summary").first.click()
            await expect(writer.locator(".inside .message")).to_contain_text("One two")
            await page.get_by_role("button", name="Cancel the turn").click()
            await expect(writer.locator(":scope > summary .status")).to_have_text("cancelled")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (380, "dark")])
async def test_axe_finds_nothing_in_a_session_with_subagents(open_page: OpenPage, width: int, scheme: str) -> None:
    wrong: list[str] = []
    async with serving(MODEL) as served:
        session = await run_session(served.client, play(CREATE, WAIT), **AGENT)
        async with open_page(f"{served.url}/#/agents/{session.id}", **window_of(width, scheme)) as page:
            for name in ("Reader", "Counter"):
                await group_of(page, name).locator("summary").first.click()
                await expect(group_of(page, name).locator(".inside .item").first).to_be_visible()
            await look(page, "session", wrong)
        await send(served.client, session.id, tool_result(session.required_actions[0]))
        assert (await rest(served.client, session.id)).status == "idle"
    assert not wrong, "\n".join(wrong)
