"""Sessions at their limits: the event loop stays free for others, and nothing is taken beyond a bound."""

import asyncio
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.support.sdk.sessions import CANCEL, FUNCTION, RESTING, message, rest, run_session, send, tool_result
from tests.support.servers.loop_turns import measured_turns
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
SOME = 5_000
MAX_TURN_S = 0.1
"""Longest turn of the event loop, as for requests of as many items."""
HEADERS = {"content-type": "application/json", "OpenAI-Beta": "agents=v1"}


def send_and_rest(served: Served, session_id: str, events: list[Json]) -> tuple[int, Json]:
    """Send events to a session, and wait in a thread until it rests; return the status and the session."""
    path = f"/v1/agents/sessions/{session_id}"
    with closing(HTTPConnection(urlsplit(served.url).netloc, timeout=60)) as connection:
        connection.request("POST", f"{path}/events", orjson.dumps({"events": events}), HEADERS)
        answer = connection.getresponse()
        status = (answer.status, answer.read())[0]
        while True:
            connection.request("GET", path, headers=HEADERS)
            session: Json = orjson.loads(connection.getresponse().read())
            if session["status"] in RESTING:
                return status, session
            time.sleep(0.05)


@pytest.mark.long
async def test_many_messages_leave_turns_of_the_event_loop_to_others(tmp_path: Path) -> None:
    """Both where they are taken and where a response reads them all."""
    store = {"provider": "sqlite", "path": str(tmp_path / "stack.db")}
    async with serving(scripted([{"text": "ok"}]), kv_store=store) as served:
        first = await run_session(served.client)
        await asyncio.to_thread(send_and_rest, served, first.id, [message("more")])  # what is loaded once
        longest_s = 1.0
        for _ in range(3):  # other programs on the core only add to it
            session = await run_session(served.client)
            events = [message(f"m{number}") for number in range(SOME)]
            with measured_turns() as turns:
                status, rested = await asyncio.to_thread(send_and_rest, served, session.id, events)
            assert (status, rested["status"]) == (202, "idle"), rested["error"]
            longest_s = min(longest_s, turns.longest_s)
            if longest_s < MAX_TURN_S:
                break
        assert longest_s < MAX_TURN_S


async def test_more_messages_than_may_wait_are_a_conflict_and_none_is_taken() -> None:
    """A hundred events may hold more messages than a session may have waiting."""
    async with serving(scripted([{"text": "ok"}])) as served:
        session = await run_session(served.client)
        events = [{**message("x"), "input": message("x")["input"] * 1000} for _ in range(17)]
        status, rested = await asyncio.to_thread(send_and_rest, served, session.id, events)
        assert (status, rested["status"]) == (409, "idle")
        page = await served.client.beta.agents.sessions.items.list(session.id)
        assert len(page.data) == 2


LARGE = "x" * (1024 * 1024)


async def ask(served: Served, method: str, path: str, body: Json | None = None) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, headers=HEADERS, timeout=60) as client:
        return await client.request(method, f"{served.url}/v1/agents{path}", json=body)


async def test_an_agent_that_is_too_large_is_refused_with_its_largest_field() -> None:
    """Each status of a session repeats its agent, in the log and in memory."""
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "d" * 60_000}
    tools = [{**function, "name": f"f{number}"} for number in range(40)]
    session: Json = {"environment": {"type": "none"}, "input": "hi"}
    async with serving(scripted([{"text": "ok"}])) as served:
        small = (await ask(served, "POST", "", {"model": "scripted", "instructions": LARGE})).json()["id"]
        created = (await ask(served, "POST", "/sessions", {**session, "agent_id": small})).json()["id"]
        for path, body, param in (
            ("", {"model": "scripted", "tools": tools}, "tools"),
            (f"/{small}", {"tools": tools}, "tools"),
            ("/sessions", {**session, "agent": {"model": "scripted", "tools": tools}}, "agent.tools"),
            ("/sessions", {**session, "agent_id": small, "agent": {"tools": tools[:20]}}, "agent.tools"),
            (f"/sessions/{created}", {"agent": {"tools": tools}}, "agent.tools"),
        ):
            refused = await ask(served, "POST", path, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), path


async def test_pages_of_large_objects_end_at_their_bytes() -> None:
    """A page holds eight megabytes with the highest `limit`, and the SDK reads all of them."""
    message_of_user = {"role": "user", "content": [{"type": "input_text", "text": LARGE[:-2000]}]}
    automation: Json = {
        "type": "once",
        "name": "a",
        "run_at": int(time.time()) + 9000,
        "target": {
            "type": "new_session",
            "environment": {"type": "none"},
            "agent": {"model": "scripted"},
            "input": [message_of_user],
        },
    }
    session: Json = {"environment": {"type": "none"}, "agent": {"model": "scripted"}, "input": [message_of_user]}
    async with serving(scripted([{"text": "ok"}])) as served:
        for _ in range(12):
            await ask(served, "POST", "", {"model": "scripted", "instructions": LARGE})
            await ask(served, "POST", "/automations", automation)
        first = (await ask(served, "POST", "/sessions", session)).json()["id"]
        for _ in range(11):
            await ask(served, "POST", "/sessions", {**session, "agent": {"model": "scripted", "instructions": LARGE}})
            await rest(served.client, first)
            await ask(served, "POST", f"/sessions/{first}/events", {"events": [message(LARGE)]})
        await rest(served.client, first)
        agents: Any = served.client.beta.agents
        for path, listing in (
            ("", agents.list(limit=100)),
            ("/sessions", agents.sessions.list(limit=100)),
            ("/sessions", agents.sessions.list(limit=100, extra_query={"metadata[none]": ""})),
            ("/automations", agents.automations.list(limit=100)),
            (f"/sessions/{first}/items", agents.sessions.items.list(first, limit=100, order="asc")),
        ):
            page = await listing
            size = sum(len(each.model_dump_json()) for each in page.data)
            assert (page.has_more, size < 10 * 2**20) == (True, True), path
        assert len([each async for each in agents.sessions.list(limit=100)]) == 12
        assert len([each async for each in agents.sessions.items.list(first, limit=100)]) == 24


async def test_more_bytes_than_one_model_could_read_do_not_wait() -> None:
    """A session that waits for its client takes messages for days; its turn would read them all at once."""
    call = {"call": "get", "arguments": "{}", "id": "call_1"}
    async with serving(scripted([call], [{"text": "ok"}], [{"text": "ok"}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        assert session.status == "requires_action"
        path = f"/sessions/{session.id}/events"
        statuses = [(await ask(served, "POST", path, {"events": [message(LARGE * 5)]})).status_code for _ in range(4)]
        assert statuses == [202, 202, 202, 409]
        await send(served.client, session.id, tool_result(session.required_actions[0]))
        assert (await rest(served.client, session.id)).status == "idle"
        assert (await ask(served, "POST", path, {"events": [message(LARGE * 9)]})).status_code == 202
        assert (await rest(served.client, session.id)).status == "idle"


async def test_input_that_is_too_large_for_a_request_is_not_tried_again() -> None:
    async with serving(scripted([{"text": "ok"}]), server={"max_body_bytes": 4 * 2**20}) as served:
        session = await run_session(served.client)
        for _ in range(3):  # they are read together, after the turn that is cancelled
            await send(served.client, session.id, message(LARGE), CANCEL, message(LARGE), message(LARGE))
            await rest(served.client, session.id)
        await send(served.client, session.id, message("small"))
        rested = await rest(served.client, session.id)
        assert (rested.status, rested.error) == ("idle", None)
