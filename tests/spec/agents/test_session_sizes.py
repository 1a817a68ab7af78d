"""Sessions at their limits: the event loop stays free for others, and nothing is taken beyond a bound."""

import asyncio
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from tests.support.sdk.sessions import RESTING, message, run_session
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
