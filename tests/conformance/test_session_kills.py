"""Sessions of agents whose workers are killed at any moment, and those of two workers, over each shared store.

STACK_KILL_TRIALS says how many times (once by default), STACK_KILL_SEED the seed, which is printed.
"""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.sdk.client import TLS
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.servers.worker_processes import Workers, worker_processes
from tests.support.waiting import until

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "1"))
SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
BOUND_S = 150.0
"""Another worker takes the place of one that is killed before it serves in up to 60 seconds."""
SESSIONS, TURNS, KILLS = 4, 2, 2
BETA = {"OpenAI-Beta": "agents=v1"}
AGENTS: dict[str, Any] = {"provider": "kv", "lease_s": 1.5, "poll_s": 0.1, "retry_s": 0.1}
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "description": "d", "parameters": {"type": "object", "properties": {}}}
    for name in "fg"
]
numbers = itertools.count()
pytestmark = pytest.mark.timeout(120 + 80 * TRIALS)


async def ask(workers: Workers, method: str, path: str, key: str = "", **fields: Any) -> Any:
    """A request about sessions; one with a key is sent again until a worker answers."""
    headers = {**BETA, **({"Idempotency-Key": key} if key else {})}
    answer = await workers.ask(method, f"/agents/sessions{path}", headers=headers, **fields)
    assert answer.status_code < 300, answer.text
    return answer.json() if answer.content else None


async def live(workers: Workers, name: str) -> str:
    """Drive a session through its turns, with results for all its calls; return its id."""
    body: dict[str, Any] = {
        "agent": {"model": "scripted", "tools": FUNCTIONS},
        "environment": {"type": "none"},
        "input": f"{name} 0",
    }
    session_id: str = (await ask(workers, "POST", "", f"{name} create", json=body))["id"]
    for number in range(1, TURNS + 1):
        await rest(workers, session_id)
        if number == TURNS:
            break
        content = [{"type": "input_text", "text": f"{name} {number}"}]
        event = {"type": "agent.session.input.message", "input": [{"role": "user", "content": content}]}
        await ask(workers, "POST", f"/{session_id}/events", f"{name} {number}", json={"events": [event]})
    return session_id


async def rest(workers: Workers, session_id: str) -> None:
    """Answer the calls of a session until it is idle."""
    ends_at = time.monotonic() + BOUND_S
    while (session := await ask(workers, "GET", f"/{session_id}"))["status"] != "idle":
        assert session["status"] != "failed", session["error"]
        assert time.monotonic() < ends_at, session
        for action in session["required_actions"]:
            # the script names all its calls alike, so that a key of the call would stand for several
            await post(workers, session_id, answer_of(action))
        await asyncio.sleep(0.05)


def answer_of(action: dict[str, Any]) -> dict[str, Any]:
    """Return the event that does what a session waits for."""
    if action["type"] == "mcp_approval_request":
        approval = {"type": "mcp_tool_call", "decision": "approve"}
        name = "agent.session.input.mcp_approval_request_result"
        return {"type": name, "request_id": action["request_id"], "response": approval}
    ids = {"turn_id": action["turn_id"], "call_id": action["call_id"]}
    output = f"of {action['call_id']}"
    return {"type": "agent.session.input.tool_result", **ids, "success": True, "output": output}


async def read_events(workers: Workers, session_id: str) -> list[dict[str, Any]]:
    """The log of a session that rests, from the second event on."""
    path = f"{workers.url}/v1/agents/sessions/{session_id}/events?starting_after=0"
    lines: list[str] = []
    async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
        with suppress(httpx.ReadTimeout):
            async with client.stream("GET", path, headers=BETA, timeout=1.5) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - those before the time-out count
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def check_session(workers: Workers, name: str, session_id: str) -> None:
    """Each message, item and turn is there once, and the numbers of the events have no gap."""
    events = await read_events(workers, session_id)
    assert [event["sequence_number"] for event in events] == [*range(1, len(events) + 1)]
    assert events[-1]["type"] == "agent.session.idle"
    kinds = Counter(event["type"].removeprefix("agent.session.") for event in events)
    assert kinds["turn.created"] == kinds["turn.completed"] == TURNS
    added = [event["item"]["id"] for event in events if event["type"] == "agent.session.turn.item.added"]
    ended = [event["item"]["id"] for event in events if event["type"] == "agent.session.turn.item.done"]
    assert len(set(added)) == len(added)
    assert len(set(ended)) == len(ended)
    page = await ask(workers, "GET", f"/{session_id}/items?limit=100&order=asc")
    assert not page["has_more"]
    items: list[dict[str, Any]] = page["data"]
    assert [item["id"] for item in items] == added
    texts = [item["content"][0]["text"] for item in items if item.get("role") == "user"]
    assert texts == [f"{name} {number}" for number in range(TURNS)]
    assert {item["id"] for item in items if item.get("role") != "user" and item["type"] != "function_call_output"} == {
        *ended
    }
    outputs = Counter(item["turn_id"] + item["call_id"] for item in items if item["type"] == "function_call_output")
    calls = Counter(item["turn_id"] + item["call_id"] for item in items if item["type"] == "function_call")
    assert outputs == calls
    assert len((await ask(workers, "GET", f"/{session_id}/turns"))["data"]) == TURNS


async def test_no_session_loses_or_repeats_anything_when_workers_are_killed(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    async with worker_processes(tmp_path, shared_store, workers=2, more={"agents": AGENTS}) as workers:
        for trial in range(TRIALS):
            names = [f"input {trial}-{number}" for number in range(SESSIONS)]
            lives = [asyncio.create_task(live(workers, name)) for name in names]
            for _ in range(KILLS):
                await asyncio.sleep(dice.uniform(0.1, 1.3))
                if targets := workers.processes():
                    with suppress(psutil.NoSuchProcess):
                        dice.choice(targets).kill()
            began_at = time.monotonic()
            ids = await asyncio.gather(*lives)
            print(f"all rest {time.monotonic() - began_at:.1f} s after the last kill")
            await asyncio.gather(*(check_session(workers, name, each) for name, each in zip(names, ids, strict=True)))
            await live_through_kill(workers, dice.choice(AIMS), 0)


# --- kills aimed at each state ---------------------------------------------------------------------------------------

CANCEL = {"type": "agent.session.input.cancel"}
Aim = Callable[[Workers, str], Awaitable[list[str]]]
"""Brings a session into a state, and returns what was said in it since its creation."""


def say(text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "agent.session.input.message", "input": [{"role": "user", "content": content}]}


async def post(workers: Workers, session_id: str, *events: dict[str, Any]) -> None:
    key = f"aimed {next(numbers)}"
    await ask(workers, "POST", f"/{session_id}/events", key, json={"events": [*events]})


async def until_status(workers: Workers, session_id: str, status: str) -> None:
    async def has_status() -> bool:
        return (await ask(workers, "GET", f"/{session_id}"))["status"] == status

    await until(has_status, BOUND_S)


async def until_said(workers: Workers, session_id: str) -> None:
    """Wait until the model has begun to say something."""

    async def is_said() -> bool:
        return len((await ask(workers, "GET", f"/{session_id}/items"))["data"]) > 1

    await until(is_said, BOUND_S)


async def be_queued(_workers: Workers, _session_id: str) -> list[str]:
    return []


async def run(workers: Workers, session_id: str) -> list[str]:
    await until_said(workers, session_id)
    return []


async def wait_for_function(workers: Workers, session_id: str) -> list[str]:
    await until_status(workers, session_id, "requires_action")
    return []


async def answer_function(workers: Workers, session_id: str) -> list[str]:
    await until_status(workers, session_id, "requires_action")
    await rest_step(workers, session_id)
    return []


async def wait_for_approval(workers: Workers, session_id: str) -> list[str]:
    return await wait_for_function(workers, session_id)


async def approve(workers: Workers, session_id: str) -> list[str]:
    return await answer_function(workers, session_id)


async def steer(workers: Workers, session_id: str) -> list[str]:
    await until_said(workers, session_id)
    await post(workers, session_id, say("steered 1"), say("steered 2"))
    return ["steered 1", "steered 2"]


async def cancel(workers: Workers, session_id: str) -> list[str]:
    await until_said(workers, session_id)
    await post(workers, session_id, CANCEL)
    return []


async def cancel_and_say(workers: Workers, session_id: str) -> list[str]:
    await until_said(workers, session_id)
    await post(workers, session_id, CANCEL, say("after it"))
    return ["after it"]


async def cancel_waiting(workers: Workers, session_id: str) -> list[str]:
    await until_status(workers, session_id, "requires_action")
    await post(workers, session_id, CANCEL, say("go on"))
    return ["go on"]


async def finish(workers: Workers, session_id: str) -> list[str]:
    """The model has said its last word, and the end of the turn is about to be written."""
    await until_status(workers, session_id, "requires_action")
    await rest_step(workers, session_id)

    async def has_answer() -> bool:
        item = (await ask(workers, "GET", f"/{session_id}/items"))["data"][0]
        return item["type"] == "message" and item["role"] == "assistant"

    await until(has_answer, BOUND_S)
    return []


async def rest_step(workers: Workers, session_id: str) -> None:
    """Answer the calls that wait now."""
    for action in (await ask(workers, "GET", f"/{session_id}"))["required_actions"]:
        await post(workers, session_id, answer_of(action))


AIMS: tuple[Aim, ...] = (
    *(be_queued, run, wait_for_function, answer_function, steer, cancel, cancel_and_say, cancel_waiting, finish),
)
APPROVAL_AIMS: tuple[Aim, ...] = (wait_for_approval, approve)
GET: dict[str, Any] = {**FUNCTIONS[0], "name": "get"}
NOTE: dict[str, Any] = {
    "type": "mcp",
    "server_label": "real",
    "transport": {"type": "http", "server_url": "connector:wiki"},
    "require_approval": "always",
}


def choose_play(aim: Aim) -> tuple[str, list[dict[str, Any]]]:
    """Return the first word of the input, and the tools of the agent."""
    if aim in APPROVAL_AIMS:
        return "note", [NOTE]
    if aim in (wait_for_function, answer_function, cancel_waiting, finish):
        return "get", [GET]
    return "input", []


async def live_through_kill(workers: Workers, aim: Aim, delay_s: float) -> list[dict[str, Any]]:
    """Create a session, kill all workers in the state that is aimed at, and check what is left at the rest. Return its
    items."""
    word, tools = choose_play(aim)
    first, agent = f"{word} {next(numbers)}", {"model": "scripted", "tools": tools}
    body = {"agent": agent, "environment": {"type": "none"}, "input": first}
    session_id: str = (await ask(workers, "POST", "", f"create {first}", json=body))["id"]
    sent = [first, *await aim(workers, session_id)]
    await asyncio.sleep(delay_s)
    for process in workers.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await rest(workers, session_id)
    await post(workers, session_id, say(f"{first} ends"))  # the session goes on
    await rest(workers, session_id)
    events = await read_events(workers, session_id)
    assert [event["sequence_number"] for event in events] == [*range(1, len(events) + 1)]
    kinds = Counter(event["type"].removeprefix("agent.session.") for event in events)
    ends = [kinds[f"turn.{end}"] for end in ("completed", "cancelled", "failed")]
    assert (sum(ends), ends[2], events[-1]["type"]) == (kinds["turn.created"], 0, "agent.session.idle"), (aim, kinds)
    added = [event["item"]["id"] for event in events if event["type"] == "agent.session.turn.item.added"]
    items = (await ask(workers, "GET", f"/{session_id}/items?limit=100&order=asc"))["data"]
    assert [item["id"] for item in items] == [*dict.fromkeys(added)] == added
    texts = [item["content"][0]["text"] for item in items if item.get("role") == "user"]
    assert texts == [*sent, f"{first} ends"], aim
    conversations = (await workers.ask("GET", "/conversations?limit=1&order=desc")).json()["data"]
    path = f"/conversations/{conversations[0]['id']}/items?limit=100&order=asc"
    read = [item for item in (await workers.ask("GET", path)).json()["data"] if item.get("role") == "user"]
    assert [item["content"][0]["text"] for item in read] == texts, aim
    return items


@pytest.mark.long
@pytest.mark.timeout(120 + 90 * max(TRIALS, 8))
async def test_no_kill_in_any_state_of_a_session_loses_or_repeats_anything(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    dice, real = random.Random(SEED), RealServer()
    async with real.serving("streamable_http"):
        more = {"agents": AGENTS, "tool_servers": with_mcp(real.url, connectors={"wiki": real.url})}
        async with worker_processes(tmp_path, shared_store, workers=2, more=more) as workers:
            for _ in range(max(TRIALS, 8)):
                for aim in (*AIMS, *APPROVAL_AIMS):
                    notes_before = len(real.notes)
                    print(shared_store["provider"], aim.__name__)
                    items = await live_through_kill(workers, aim, dice.choice((0, dice.uniform(0, 0.3))))
                    calls = [item["status"] for item in items if item["type"] == "mcp_call"]
                    assert bool(calls) == (aim in APPROVAL_AIMS)
                    assert calls.count("completed") <= len(real.notes) - notes_before <= (aim in APPROVAL_AIMS), calls
