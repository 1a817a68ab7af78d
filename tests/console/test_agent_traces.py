"""Agents' spans in the page: the list of traces, one as a waterfall, and those around a response."""

from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.test_playground import HOSTILE, scripted
from tests.console.test_views import COUNT_NAMELESS
from tests.support.sdk.agent_traces import DAY
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.console
TRACE = "trace_" + "1" * 32


def span(number: int, parent: int | None, data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "object": "trace.span",
        "id": f"span_{number:024}",
        "trace_id": TRACE,
        "parent_id": None if parent is None else f"span_{parent:024}",
        "started_at": f"{DAY}T12:00:0{number}.000Z",
        "ended_at": f"{DAY}T12:00:09.500Z",
        "span_data": data,
        "error": None,
        **fields,
    }


async def ingest(served: Served, response_id: str) -> None:
    data = [
        {"object": "trace", "id": TRACE, "workflow_name": HOSTILE[0], "group_id": "chat-1"},
        span(1, None, {"type": "agent", "name": "Tutor"}),
        span(2, 1, {"type": "response", "response_id": response_id}),
        span(3, 1, {"type": "function", "name": HOSTILE[0], "input": "{}"}, error={"message": "no luck"}),
        span(4, 5, {"type": "custom", "name": "circle"}),
        span(5, 4, {"type": "handoff", "from_agent": "Tutor", "to_agent": "Helper"}),
    ]
    await served.client.post("/traces/ingest", cast_to=object, body={"data": data})


async def test_a_trace_of_an_agent_is_a_waterfall_joined_with_its_responses(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "The answer."}])) as served:
        response = await served.client.responses.create(model="scripted", input="Hi")
        await ingest(served, response.id)
        async with open_page(f"{served.url}/#/traces") as page:
            agents = page.get_by_role("region", name="Agents' traces")
            await expect(agents.get_by_text("1 failed")).to_be_visible()
            await agents.locator("td a").click()
            rows = page.locator(".agent-spans button.span")
            await expect(rows).to_have_count(5)
            await expect(rows.nth(0)).to_contain_text("agent Tutor")
            await expect(rows.nth(0)).to_contain_text("8.50 s")
            await expect(rows.nth(2)).to_contain_text("failed")
            await expect(page.get_by_text("handoff Tutor → Helper")).to_be_visible()
            await rows.nth(2).focus()
            await page.keyboard.press("Enter")
            await expect(page.locator(".span-details").get_by_text("no luck").first).to_be_visible()
            await expect(
                page.get_by_role("table", name="Responses of the trace").get_by_text("completed")
            ).to_be_visible()
            assert await page.evaluate(COUNT_NAMELESS) == 0
            await rows.nth(1).click()
            await page.get_by_role("link", name=f"Open the response {response.id}").click()
            own = page.locator(".agent-spans button.own")
            await expect(own).to_contain_text("response")
            await page.get_by_role("link", name=HOSTILE[0]).click()
            await page.get_by_role("button", name="Delete", exact=True).click()
            await page.locator(".ask .danger").click()
            await expect(page.get_by_text("No agent has sent a trace yet.")).to_be_visible()


async def test_a_large_trace_is_drawn_in_parts(open_page: OpenPage) -> None:
    async with serving() as served:
        for start in (0, 1000):
            data = [
                {**span(1, None, {"type": "custom", "name": f"n{number}"}), "id": f"span_{number:024}"}
                for number in range(start, start + 1000)
            ]
            await served.client.post("/traces/ingest", cast_to=object, body={"data": data})
        async with open_page(f"{served.url}/#/traces/{TRACE}") as page:
            await expect(page.locator(".agent-spans button.span")).to_have_count(300)
            await page.get_by_role("button", name="1700 more spans").click()
            await expect(page.locator(".agent-spans button.span")).to_have_count(1300)


@pytest.mark.parametrize("width", [1360, 380])
async def test_agents_spans_fit_the_window(open_page: OpenPage, width: int) -> None:
    async with serving(scripted([{"text": "Hello."}])) as served:
        response = await served.client.responses.create(model="scripted", input="Hi")
        await ingest(served, response.id)
        for path in ("traces", f"traces/{TRACE}", f"responses/{response.id}/trace"):
            async with open_page(f"{served.url}/#/{path}", viewport={"width": width, "height": 800}) as page:
                await expect(page.get_by_text("Agents'").or_(page.locator(".agent-spans")).first).to_be_visible()
                overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert overflow <= 0, f"{path} is {overflow} px wider than the window"
