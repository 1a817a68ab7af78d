"""Agents, their sessions and their schedules in Chromium, with reloads, and a server that is killed in mid-turn."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import OpenPage
from tests.console.main_thread import traced
from tests.console.seeded import Seeded
from tests.console.test_accessibility import look, walk, window_of
from tests.console.test_lost_server import started, write_config
from tests.console.test_playground import HOSTILE, MOST_MS, scripted
from tests.support.sdk.client import sdk_client
from tests.support.sdk.sessions import NONE, create_session, list_items, message, rest, run_session, send
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.servers.ports import free_port
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.console

FUNCTION: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"call": "get_weather", "arguments": '{"city": "Bonn"}', "id": "call_1"}
BACKWARDS = "desk \u202egnp.exe"
"""A name that reorders what follows it, where it is not kept apart."""
SECRET_SERVER: Any = {
    "type": "mcp",
    "server_label": "docs",
    "transport": {"type": "http", "server_url": "https://example.com/mcp", "authorization": "secret"},
}


def state_of(page: Page) -> Locator:
    return page.locator(".session > .bar .status")


async def open_session(page: Page, served: Served, session_id: str) -> None:
    await page.goto(f"{served.url}/#/agents/{session_id}")
    await expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_visible()


async def write(page: Page, text: str) -> None:
    await page.get_by_role("textbox", name="Message", exact=True).fill(text)
    await page.keyboard.press("Control+Enter")


async def test_an_agent_is_made_tried_changed_and_deleted(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "It rains."}])) as served, open_page(f"{served.url}/#/agents") as page:
        agents = served.client.beta.agents
        await page.get_by_role("link", name="New agent").first.click()
        await page.get_by_label("Name", exact=True).fill(HOSTILE[0] + BACKWARDS)
        await page.get_by_label("Model").select_option("scripted")
        await page.get_by_label("Effort").select_option("low")
        await page.get_by_label("Instructions").fill("Answer briefly.")
        await page.get_by_label("Tool search").check()
        await page.get_by_label("Functions that your program runs").fill("[{")
        await expect(page.get_by_role("button", name="Create the agent")).to_be_disabled()
        await page.get_by_label("Functions that your program runs").fill(
            '[{"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}]'
        )
        await page.get_by_role("button", name="Add a pair").click()
        await page.get_by_label("Key 1").fill("team")
        await page.get_by_label("Value 1").fill("sky")
        await page.get_by_role("button", name="Create the agent").click()
        await expect(page.locator("h1")).to_have_text(HOSTILE[0] + BACKWARDS)
        (agent,) = [each async for each in agents.list()]
        assert (agent.model, agent.instructions, agent.metadata) == ("scripted", "Answer briefly.", {"team": "sky"})
        assert [tool.type for tool in agent.tools] == ["tool_search", "function"]
        assert agent.reasoning.effort == "low"

        await agents.update(agent.id, text={"verbosity": "high"}, tools=[FUNCTION, SECRET_SERVER])
        await page.reload()
        await expect(page.get_by_label("Effort")).to_have_value("low")
        await expect(page.get_by_role("button", name="Save")).to_be_disabled()
        await page.get_by_label("Name", exact=True).fill("Desk")
        await page.get_by_role("button", name="Save").click()
        await expect(page.get_by_text("Saved.")).to_be_visible()
        changed = await agents.retrieve(agent.id)
        assert (changed.name, changed.text.verbosity, len(changed.tools)) == ("Desk", "high", 2)

        await page.get_by_role("button", name="Remove docs").is_hidden()
        await page.get_by_text("mcp, kept as it is").click()
        await page.get_by_role("button", name="Remove docs").click()
        await page.get_by_role("button", name="Save").click()
        await expect(page.get_by_text("Saved.")).to_be_visible()
        assert [tool.type for tool in (await agents.retrieve(agent.id)).tools] == ["function"]

        await page.get_by_role("button", name="chat with it in the Playground").click()
        await expect(page.locator(".bar select.model, .bar .model select").first).to_have_value(f"agent/{agent.id}")
        await page.go_back()
        await page.get_by_label("First message").fill("Do I need an umbrella?")
        await page.get_by_role("button", name="Start a session").click()
        await expect(page.get_by_text("It rains.")).to_be_visible()
        await expect(state_of(page)).to_have_text("idle")
        await page.goto(f"{served.url}/#/agents")
        await page.get_by_role("button", name="Delete", exact=True).click()
        await page.locator(".ask .danger").click()
        await expect(page.get_by_text("There is no agent yet.")).to_be_visible()


async def test_a_session_is_answered_steered_and_cancelled(open_page: OpenPage) -> None:
    turns = scripted(
        [{"reasoning": "I need the weather."}, {"text": HOSTILE[1]}, CALL],
        [{"text": "It rains in Bonn."}],
        [{"text": ["Slow "]}, {"wait_s": 60}],
    )
    async with serving(turns) as served:
        session = await run_session(served.client, "The weather?", tools=[FUNCTION], reasoning={"summary": "detailed"})
        async with open_page(f"{served.url}/#/agents/sessions") as page:
            await expect(page.locator("td .status")).to_have_text("requires action")
            await page.get_by_role("link", name="Answer").click()
            waiting = page.get_by_label("Waiting for you")
            await expect(waiting).to_contain_text('"city": "Bonn"')
            await page.get_by_label("Result of get_weather").last.fill('{"rain": true}')
            await page.reload()
            await page.get_by_label("Result of get_weather").last.fill('{"rain": true}')
            await page.get_by_role("button", name="Send the result").click()
            await expect(page.get_by_text("It rains in Bonn.")).to_be_visible()
            await expect(waiting).to_have_count(0)
            await expect(state_of(page)).to_have_text("idle")
            live = await page.locator(".turns").inner_text()
            await page.reload()
            await expect(page.get_by_text("It rains in Bonn.")).to_be_visible()
            assert await page.locator(".turns").inner_text() == live
            await page.locator(".reasoning-fold summary").click()
            await expect(page.locator(".thought")).to_contain_text("I need the weather.")

            await write(page, "Go on.")
            await expect(page.get_by_text("Slow")).to_be_visible()
            await page.reload()
            await expect(page.get_by_text("Slow")).to_be_visible()
            await page.get_by_role("textbox", name="Message", exact=True).fill("And in Köln?")
            await page.get_by_role("button", name="Steer").click()
            await expect(page.get_by_text("And in Köln?")).to_be_visible()
            await page.get_by_role("button", name="Cancel the turn").click()
            await expect(state_of(page)).to_have_text("idle")
            await expect(page.locator(".turn-head .status.cancelled")).to_be_visible()
            texts = [
                item.content[0].text
                for item in await list_items(served.client, session.id)
                if item.type == "message" and item.role == "user"
            ]
            assert texts == ["The weather?", "Go on.", "And in Köln?"]
            await page.get_by_role("button", name="Delete", exact=True).click()
            await page.locator(".ask .danger").click()
            await expect(page.get_by_text("There is no session yet.")).to_be_visible()


async def test_a_failure_of_a_function_is_reported(open_page: OpenPage) -> None:
    async with serving(scripted([CALL], [{"text": "I could not look."}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        async with open_page(f"{served.url}/#/agents/{session.id}") as page:
            await page.get_by_label("Result of get_weather").last.fill("No network.")
            await page.get_by_role("button", name="Report a failure").click()
            await expect(page.get_by_text("I could not look.")).to_be_visible()
            await expect(page.locator(".function_call_output")).to_contain_text("No network.")


@pytest.mark.parametrize("decision", ["Approve", "Deny"])
async def test_calls_of_mcp_servers_are_approved_and_denied(open_page: OpenPage, decision: str) -> None:
    real = RealServer()
    turns = scripted([{"call": "wiki__note", "arguments": '{"text": "a"}', "id": "c1"}], [{"text": "Done."}])
    transport = {"type": "http", "server_url": "connector:wiki"}
    tool = {"type": "mcp", "server_label": "wiki", "transport": transport, "require_approval": "always"}
    async with real.serving():
        servers = with_mcp(real.url, connectors={"wiki": real.url})
        async with serving(turns, tool_servers=servers) as served:
            session = await run_session(served.client, tools=[tool])
            async with open_page(f"{served.url}/#/agents/{session.id}") as page:
                await expect(page.get_by_label("Waiting for you")).to_contain_text("wiki · note")
                await page.get_by_role("button", name=decision).click()
                await expect(page.get_by_text("Done.")).to_be_visible()
    assert real.notes == (["a"] if decision == "Approve" else [])


async def test_a_turn_goes_on_in_the_page_after_its_server_was_killed(open_page: OpenPage, tmp_path: Path) -> None:
    config, port = write_config(tmp_path, [{"text": ["The "]}, {"wait_s": 2}, {"text": ["end."]}]), free_port()
    url = f"http://127.0.0.1:{port}"
    async with started(config, port, tmp_path) as process:
        async with sdk_client(url) as client:
            session = await create_session(client, "Go", model="scripted")
        opened = open_page(f"{url}/#/agents/{session.id}")
        page = await opened.__aenter__()
        await expect(page.locator(".markdown")).to_contain_text("The")
        os.kill(process, signal.SIGKILL)
        await expect(page.get_by_text("The connection broke off.")).to_be_visible()
    async with started(config, port, tmp_path):
        await expect(page.get_by_text("The end.")).to_be_visible(timeout=30_000)
        await expect(page.get_by_text("The connection broke off.")).to_have_count(0)
        await expect(state_of(page)).to_have_text("idle", timeout=30_000)
        live = await page.locator(".turns").inner_text()
        await page.reload()
        await expect(page.get_by_text("The end.")).to_be_visible()
        assert await page.locator(".turns").inner_text() == live
        await opened.__aexit__(None, None, None)


async def test_a_long_session_is_a_window_that_moves(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "Yes."}])) as served:
        session = await run_session(served.client, "item 0")
        for turn in range(5):
            events = [message(f"item {turn * 100 + number + 1}") for number in range(100)]
            await send(served.client, session.id, *events)
            await rest(served.client, session.id)
        async with open_page(f"{served.url}/#/agents/sessions") as page:
            items = page.locator(".turns .item")
            await expect(page.locator("td a")).to_have_count(1)
            async with traced(page) as tasks:
                await page.locator("td a").click()
                await expect(page.get_by_text("item 500", exact=True)).to_be_in_viewport()
            assert tasks.cpu_ms[0] < MOST_MS * tasks.slowdown, tasks.cpu_ms[:5]
            counts = [await items.count()]
            while await page.get_by_role("button", name="Earlier items").count():
                first = await items.first.get_attribute("data-item")
                await page.get_by_role("button", name="Earlier items").click()
                await expect(items.first).not_to_have_attribute("data-item", first or "")
                await expect(page.locator(f'[data-item="{first}"]')).to_be_in_viewport()
                counts.append(await items.count())
            assert max(counts) <= 240
            assert len(counts) > 5
            await expect(page.get_by_text("item 0", exact=True)).to_have_count(1)
            await expect(page.get_by_text("item 500", exact=True)).to_have_count(0)
            await send(served.client, session.id, message("not in the window"))
            await rest(served.client, session.id)
            await expect(page.get_by_text("not in the window")).to_have_count(0)
            await page.get_by_role("button", name="Later items").click()
            await expect(page.get_by_text("item 250", exact=True)).to_have_count(1)
            await page.get_by_role("button", name="Newest items").click()
            await expect(page.get_by_text("not in the window")).to_be_in_viewport()
            await write(page, "the last")
            await expect(page.get_by_text("the last", exact=True)).to_be_in_viewport()


async def test_a_turn_of_many_items_is_shown_in_their_order_while_it_runs(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": ["Slow "]}, {"wait_s": 60}])) as served:
        session = await create_session(served.client, "item 0")
        await send(served.client, session.id, *(message(f"item {number}") for number in range(1, 90)))
        async with open_page(f"{served.url}/#/agents/{session.id}") as page:
            await expect(page.get_by_text("item 89", exact=True)).to_be_visible()
            await send(served.client, session.id, message("item 90"))
            await expect(page.get_by_text("item 90", exact=True)).to_be_visible()
            texts = await page.locator(".item .input").all_inner_texts()
            assert texts == [f"item {number}" for number in range(91)][-len(texts) :]
            assert len(texts) < 60
            await page.get_by_role("button", name="Earlier items").click()
            await expect(page.locator(".item .input")).to_have_count(91)
            assert await page.locator(".item .input").all_inner_texts() == [f"item {number}" for number in range(91)]


async def test_a_session_with_a_workspace_shows_commands_as_they_run(open_page: OpenPage) -> None:
    commands = ["cat data.csv; sleep 2; touch made; echo end; exit 3"]
    turns = scripted(
        [{"call": "shell", "arguments": json.dumps({"commands": commands}), "id": "c1"}], [{"text": "Done."}]
    )
    async with (
        serving(turns, tool_runtime={"provider": "python"}) as served,
        open_page(f"{served.url}/#/agents/sessions/new") as page,
    ):
        await page.get_by_label("With a workspace").check()
        file = {"name": "data.csv", "mimeType": "text/csv", "buffer": b"a,b\n"}
        await page.locator("input[type=file]").set_input_files(file)  # type: ignore[arg-type]  # a FilePayload
        await page.get_by_label("First message").fill("Look.")
        await page.get_by_role("button", name="Start a session").click()
        terminal = page.locator(".terminal")
        await expect(terminal).to_contain_text("a,b", timeout=30_000)
        await page.reload()
        await expect(terminal).to_contain_text("a,b")
        await expect(terminal).to_contain_text("end")
        await expect(page.locator(".command_execution")).to_contain_text("exit code 3")
        await expect(page.get_by_text("Done.")).to_be_visible()
        await page.locator(".workspace summary").click()
        await expect(page.locator(".workspace li")).to_contain_text(["data.csv", "made"])
        await page.locator(".workspace input[type=file]").set_input_files({**file, "name": "added.csv"})  # type: ignore[arg-type]  # a FilePayload
        await expect(page.locator(".workspace li")).to_contain_text(["added.csv", "data.csv", "made"])


async def test_commands_and_artifacts_are_shown_and_nothing_of_them_runs(open_page: OpenPage) -> None:
    command = {
        "id": "cmd_1",
        "type": "command_execution",
        "command": f"ls {BACKWARDS}",
        "cwd": "/workspace",
        "output": "\n".join([*(f"line {number}" for number in range(2000)), *HOSTILE]),
        "exit_code": 2,
        "duration_ms": 1200,
        "status": "completed",
    }
    unknown = {"id": "x_1", "type": "later_call", "text": HOSTILE[0]}
    picture = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f0005000"
        "1ff56c72f0d0000000049454e44ae426082"
    )
    async with serving() as served:
        session = await run_session(served.client, "Go")
        *_, turn_id = [item.turn_id for item in await list_items(served.client, session.id)]

        def artifact(name: str) -> dict[str, Any]:
            names = {"id": f"art_{name[:4]}", "session_id": session.id, "turn_id": turn_id}
            return {**names, "path": f"/workspace/outputs/{name}", "size_bytes": 68}

        async with open_page(f"{served.url}/#/agents") as page:
            path = f"**/agents/sessions/{session.id}"
            has_machine = session.to_dict() | {"environment": {"type": "openai_hosted", "id": "env_1"}}
            items = [{**item, "turn_id": turn_id} for item in (unknown, command)]
            artifacts = [artifact("<img src=x>.png"), artifact("page.html")]
            await page.route(path, lambda route: route.fulfill(json=has_machine))
            await page.route(f"{path}/items?*", lambda route: route.fulfill(json={"data": items, "has_more": False}))
            await page.route(
                f"{path}/artifacts?*", lambda route: route.fulfill(json={"data": artifacts, "has_more": False})
            )
            await page.route(f"{path}/artifacts/*/content", lambda route: route.fulfill(body=picture))
            await open_session(page, served, session.id)
            card = page.locator(".command_execution")
            await expect(card).to_contain_text("exit code 2")
            await expect(card.locator(".terminal")).not_to_contain_text("line 10\n")
            await card.get_by_role("button", name="Show all").click()
            await expect(card.locator(".terminal")).to_contain_text("line 10\n")
            await expect(page.locator(".later_call")).to_contain_text("onerror")
            await expect(page.locator(".artifact img")).to_have_count(1)
            await expect(page.get_by_text("<img src=x>.png")).to_be_visible()
            async with page.expect_download() as download:
                await page.get_by_role("button", name="Download page.html").click()
            assert (await download.value).suggested_filename == "page.html"


async def test_a_schedule_is_made_run_paused_changed_and_deleted(open_page: OpenPage) -> None:
    async with (
        serving(scripted([{"text": "Sunny."}])) as served,
        open_page(f"{served.url}/#/agents/schedules", timezone_id="Asia/Tokyo", locale="en-GB") as page,
    ):
        automations = served.client.beta.agents.automations
        agent = await served.client.beta.agents.create(model="scripted", name="Weather")
        await page.get_by_role("link", name="New schedule").first.click()
        await expect(page.get_by_label("Time zone")).to_have_value("Asia/Tokyo")
        await page.get_by_label("Name", exact=True).fill("Morning")
        await page.get_by_role("button", name="on weekdays at 8:00").click()
        await page.get_by_label("Time zone").fill("Europe/Berlin")
        await page.get_by_label("Agent or model").select_option(agent.id)
        await page.get_by_role("textbox", name="Message").fill("The weather?")
        await page.get_by_role("button", name="Create the schedule").click()
        await expect(page.locator(".times li")).to_have_count(5)
        await expect(page.locator(".times li").first).to_contain_text("08:00 in Europe/Berlin")
        await page.get_by_role("button", name="Run Morning now").click()
        await expect(page.locator("table .status.completed")).to_have_text("delivered")
        await page.get_by_role("button", name="Pause Morning").click()
        await expect(page.get_by_text("None: it is paused.")).to_be_visible()
        await page.reload()
        await page.get_by_role("button", name="Resume Morning").click()
        await expect(page.locator(".times li")).to_have_count(5)
        await page.get_by_label("Cron expression").fill("61 * * * *")
        await page.get_by_role("button", name="Save").click()
        await expect(page.get_by_role("alert")).to_contain_text("param expression")
        await page.get_by_label("Cron expression").fill("30 7 * * *")
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator(".times li").first).to_contain_text("07:30 in Europe/Berlin")
        (automation,) = [each async for each in automations.list()]
        assert automation.type == "periodic"
        assert (automation.expression, automation.timezone) == ("30 7 * * *", "Europe/Berlin")
        assert automation.target.to_dict()["agent_id"] == agent.id
        await page.locator("table").get_by_role("link").click()
        await expect(page.get_by_text("Sunny.")).to_be_visible()
        await page.goto(f"{served.url}/#/agents/{automation.id}")
        await page.get_by_role("button", name="Delete", exact=True).click()
        await page.locator(".ask .danger").click()
        await expect(page.get_by_text("There is no schedule yet.")).to_be_visible()


async def test_one_time_begins_a_response_or_a_message_to_a_session(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/#/agents/schedules/new") as page:
        session = await run_session(served.client)
        for name, work, fill in (
            ("Answer", "response", lambda: page.get_by_label("Agent or model").select_option("model:scripted")),
            ("Reminder", "existing_session", lambda: page.get_by_role("textbox", name="Session").fill(session.id)),
        ):
            await page.goto(f"{served.url}/#/agents/schedules/new")
            await page.reload()
            await page.get_by_label("Name", exact=True).fill(name)
            await page.get_by_label("Repeats").select_option("once")
            await page.get_by_role("combobox", name="Work").select_option(work)
            await fill()
            await page.get_by_role("textbox", name="Message").fill("Go on.")
            await page.get_by_role("button", name="Create the schedule").click()
            await expect(page.locator(".times li")).to_have_count(1)
            await page.get_by_role("button", name=f"Run {name} now").click()
            await expect(page.locator("table .status.completed")).to_have_text("delivered")
            await expect(page.locator("table").get_by_role("link")).to_have_count(1)


HIDE = """
state => {
  Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}
"""


async def test_a_hidden_tab_gives_up_its_connection_and_reads_later_what_it_missed(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "Yes."}])) as served:
        session = await run_session(served.client, "First")
        async with open_page(f"{served.url}/#/agents") as page:
            await page.clock.install()
            await open_session(page, served, session.id)
            await expect(page.get_by_text("Yes.")).to_be_visible()
            async with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
                await page.evaluate(HIDE, "hidden")
                await page.clock.fast_forward(31_000)
            await send(served.client, session.id, message("Second"))
            await rest(served.client, session.id)
            await page.evaluate(HIDE, "visible")
            await expect(page.get_by_text("Yes.")).to_have_count(2)
            await expect(page.get_by_text("The connection broke off.")).to_have_count(0)


async def _fill(served: Served) -> dict[str, str]:
    """Put something into each view, and return their hashes by name."""
    client = served.client
    agent = await client.beta.agents.create(
        model="scripted",
        name=f"A rather long name of {BACKWARDS}",
        instructions="Be brief.",
        tools=[FUNCTION, SECRET_SERVER],
    )
    done = await run_session(client, "Hello")
    session = await run_session(client, "The weather?", tools=[FUNCTION])
    target: Any = {
        "type": "new_session",
        "environment": NONE,
        "agent_id": agent.id,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Go"}]}],
    }
    times: Any = {"type": "periodic", "expression": "0 8 * * MON-FRI", "timezone": "Europe/Berlin"}
    schedule = await client.beta.agents.automations.create(**times, name="Morning", target=target)
    await client.beta.agents.automations.invocations.create(schedule.id)
    return {
        "agents": "agents",
        "agent": f"agents/{agent.id}",
        "new agent": "agents/new",
        "sessions": "agents/sessions",
        "session": f"agents/{session.id}",
        "idle session": f"agents/{done.id}",
        "missing session": "agents/sess_missing",
        "schedules": "agents/schedules",
        "new schedule": "agents/schedules/new",
        "schedule": f"agents/{schedule.id}",
    }


async def test_the_keyboard_alone_reaches_every_control(open_page: OpenPage) -> None:
    wrong: list[str] = []
    async with serving(scripted([{"reasoning": "Hm."}, {"text": "Hello."}], [CALL])) as served:
        stack = Seeded(served, await _fill(served))
        async with open_page(f"{served.url}/") as page:
            for name, path in stack.views.items():
                wrong += [f"{name}: {control}" for control in await walk(page, stack, path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (380, "dark")])
async def test_axe_finds_nothing_and_nothing_is_too_wide(open_page: OpenPage, width: int, scheme: str) -> None:
    wrong: list[str] = []
    async with serving(
        scripted([{"reasoning": "Hm."}, {"text": "Hello **you**."}], [{"text": "Let me look."}, CALL])
    ) as served:
        views = await _fill(served)
        async with open_page(f"{served.url}/#/agents", **window_of(width, scheme)) as page:
            await look(page, "agents", wrong)
            for name, path in views.items():
                await page.goto("about:blank")
                await page.goto(f"{served.url}/#/{path}")
                await expect(page.locator("h1")).to_be_visible()
                await look(page, name, wrong)
    assert not wrong, "\n".join(sorted(set(wrong)))
