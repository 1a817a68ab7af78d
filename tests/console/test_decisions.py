"""Decisions in the Playground: questions are edited, and their probabilities drawn as bars."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import OpenPage
from tests.console.test_accessibility import look, window_of
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import HANG, Answer, Received, UpstreamServer, json_answer

pytestmark = pytest.mark.console

SHARES: Mapping[str, tuple[float, ...]] = {"noul": (0.872,), "choice": (0.7, 0.25, 0.05), "score": (0.1, 0.1, 0.8)}


def system_one(request: Received) -> Answer:
    """Answer as a server of decision models does: each kind of question in its own way."""
    answers: dict[str, Any] = {}
    for name, question in request.json["questions"].items():
        kind, shares = question["type"], SHARES[question["type"]]
        if kind == "noul":
            answers[name] = {"type": kind, "noul": shares[0]}
            continue
        criteria: Any = question.get("criteria", [])
        keys = [*criteria] if kind == "choice" else [str(at) for at in range(len(criteria))]
        rest = [0.0] * (len(keys) - len(shares))
        answers[name] = {"type": kind, "probabilities": dict(zip(keys, [*rest, *shares], strict=False))}
    return json_answer({"answers": answers, "usage": {"input_tokens": 1200, "cached_tokens": 900, "output_tokens": 3}})


@asynccontextmanager
async def deciding(answer: Any = system_one) -> AsyncGenerator[Served]:
    async with UpstreamServer(models=["decider"]) as upstream:
        upstream.routes["/v1/systemone"] = answer
        async with serving({"provider": "vllm", "base_url": upstream.base_url, "max_retries": 0}) as served:
            yield served


async def fill_example(page: Page) -> None:
    await page.get_by_role("button", name="Example").click()
    await expect(page.locator(".question")).to_have_count(3)


async def test_each_question_gets_its_answer_as_bars(open_page: OpenPage) -> None:
    async with deciding() as served, open_page(f"{served.url}/") as page:
        await page.get_by_role("link", name="decisions").click()
        await expect(page.get_by_role("button", name="Decide")).to_be_disabled()
        await fill_example(page)
        await page.keyboard.press("Control+Enter")
        verdicts = page.locator(".verdict")
        await expect(verdicts).to_have_text(
            ["87.2 % true", "billing confidence 0.32", "1.70 of 0 to 2 confidence 0.42"], use_inner_text=True
        )
        topics = page.locator(".question").nth(1).locator(".probabilities li")
        await expect(topics).to_have_text(["billing70.0 %", "bug25.0 %", "shipping5.0 %"])
        await expect(page.locator(".probabilities li.on")).to_have_text(
            ["true87.2 %", "billing70.0 %", "furious80.0 %"]
        )
        widths = await topics.locator("rect").evaluate_all("all => all.map((rect) => rect.getAttribute('width'))")
        assert [float(width) for width in widths] == [70, 25, 5]
        await expect(page.locator(".usage")).to_contain_text("1,200 in (900 cached)")


async def test_an_answer_says_that_its_question_has_changed_since(open_page: OpenPage) -> None:
    async with deciding() as served, open_page(f"{served.url}/#/playground/decisions") as page:
        await fill_example(page)
        await page.get_by_role("button", name="Decide").click()
        await expect(page.locator(".verdict")).to_have_count(3)
        await expect(page.locator(".stale")).to_have_count(0)
        await page.get_by_label("Text of question 2").fill("Which team?")
        await expect(page.locator(".stale")).to_have_count(1)
        await page.get_by_role("button", name="Remove question 1").click()
        await expect(page.locator(".verdict").first).to_contain_text("billing")
        await page.get_by_label("Input").fill("Another text.")
        await expect(page.locator(".stale")).to_have_count(2)
        await page.get_by_role("button", name="Decide").click()
        await expect(page.locator(".stale")).to_have_count(0)


async def test_the_request_is_shown_as_a_program(open_page: OpenPage) -> None:
    async with deciding() as served, open_page(f"{served.url}/#/playground/decisions") as page:
        await fill_example(page)
        code = page.locator(".exchange pre.code")
        await expect(code).to_contain_text("decision = client.decisions.create(")
        await page.get_by_role("tab", name="curl").click()
        await expect(code).to_contain_text(f"curl {served.url}/v1/decisions")
        await page.get_by_role("tab", name="Answer").click()
        await expect(page.locator(".exchange")).to_contain_text("No answer yet.")
        await page.get_by_role("button", name="Decide").click()
        await expect(page.locator(".exchange")).to_contain_text("probabilities")


async def test_of_many_choices_the_likeliest_are_shown_first(open_page: OpenPage) -> None:
    async with deciding() as served, open_page(f"{served.url}/#/playground/decisions") as page:
        await page.get_by_label("Input").fill("A text.")
        await page.get_by_label("Kind of question 1").select_option("choice")
        await page.get_by_label("Text of question 1").fill("Which number?")
        for number in range(20):
            if number > 1:
                await page.get_by_role("button", name="Add a choice").click()
            await page.get_by_label(f"Choice {number + 1} of question 1", exact=True).fill(f"n{number}")
        await page.get_by_role("button", name="Decide").click()
        bars = page.locator(".probabilities li")
        await expect(bars).to_have_count(12)
        await expect(bars.first).to_have_text("n1770.0 %")
        await page.get_by_role("button", name="Show all 20").click()
        await expect(bars).to_have_count(20)
        await expect(bars.first).to_have_text("n00.0 %")


async def test_the_questions_are_there_again_after_a_reload(open_page: OpenPage) -> None:
    async with deciding() as served, open_page(f"{served.url}/#/playground/decisions") as page:
        await fill_example(page)
        await page.get_by_label("Text of question 3").fill("How sad?")
        await page.reload()
        await expect(page.get_by_label("Text of question 3")).to_have_value("How sad?")
        await expect(page.locator(".foot [role=status]")).to_have_text("The input is empty.")


async def test_a_model_without_decisions_and_a_stop_leave_the_form_unchanged(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/#/playground/decisions") as page:
        await fill_example(page)
        await page.get_by_role("button", name="Decide").click()
        await expect(page.get_by_role("alert")).to_contain_text("makes no decisions")
        await expect(page.locator(".question")).to_have_count(3)
    async with deciding([HANG]) as served, open_page(f"{served.url}/#/playground/decisions") as page:
        await fill_example(page)
        await page.get_by_role("button", name="Decide").click()
        await expect(page.get_by_role("button", name="Stop")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name="Decide")).to_be_enabled()
        await expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1600, 380])
async def test_axe_finds_nothing_and_nothing_is_too_wide(open_page: OpenPage, width: int, scheme: str) -> None:
    wrong: list[str] = []
    async with (
        deciding() as served,
        open_page(f"{served.url}/#/playground/decisions", **window_of(width, scheme)) as page,
    ):
        await fill_example(page)
        await look(page, "asked", wrong)
        await page.get_by_role("button", name="Decide").click()
        await expect(page.locator(".verdict")).to_have_count(3)
        await look(page, "answered", wrong)
        await page.get_by_label("Input").fill("Another text.")
        await look(page, "changed", wrong)
    assert not wrong, "\n".join(sorted(set(wrong)))
