"""Sessions with subagents whose workers are all killed, in each state of the subagents, over each shared store.

STACK_KILL_TRIALS says how many times (once by default), STACK_KILL_SEED the seed, which is printed.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conformance.test_session_kills import (
    AGENTS,
    BOUND_S,
    CANCEL,
    GET,
    SEED,
    TRIALS,
    ask,
    post,
    read_events,
    rest,
)
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.input_model import MODEL, play
from tests.support.servers.worker_processes import Workers, worker_processes
from tests.support.waiting import until

numbers = itertools.count()
Aim = Callable[[Workers, str], Awaitable[None]]
"""Brings a session with two subagents into a state."""
SLOW: list[Any] = [{"text": ["a "] * 20}, {"wait_s": 0.4}, {"text": ["b "] * 20}]
WAIT = [call("wait_for_subagents", '{"subagent_ids": ["$0", "$1"]}', id="w")]


async def list_subagents(workers: Workers, session_id: str, path: str = "") -> list[Any]:
    return (await ask(workers, "GET", f"/{session_id}/subagents{path}?limit=100&order=asc"))["data"]


async def be_created(_workers: Workers, _session_id: str) -> None:
    """The calls that create the subagents are about to be answered."""


async def have_one(workers: Workers, session_id: str) -> None:
    """At least one subagent was created."""
    await until(lambda: list_subagents(workers, session_id), BOUND_S)


async def say(workers: Workers, session_id: str) -> None:
    """A subagent says something."""

    async def is_said() -> bool:
        return any(
            [
                len(await list_subagents(workers, session_id, f"/{each['id']}/items")) > 1
                for each in await list_subagents(workers, session_id)
            ]
        )

    await until(is_said, BOUND_S)


async def wait(workers: Workers, session_id: str) -> None:
    """The agent waits for its subagents, of which one waits for the client."""

    async def is_waiting() -> bool:
        [turn] = (await ask(workers, "GET", f"/{session_id}/turns"))["data"]
        return turn["status"] == "waiting" and bool(await list_required(workers, session_id))

    await until(is_waiting, BOUND_S)


async def report(workers: Workers, session_id: str) -> None:
    """The last subagent ends, which wakes the agent."""
    await wait(workers, session_id)
    await answer(workers, session_id)


async def cancel(workers: Workers, session_id: str) -> None:
    await say(workers, session_id)
    await post(workers, session_id, CANCEL)


async def list_required(workers: Workers, session_id: str) -> list[Any]:
    return (await ask(workers, "GET", f"/{session_id}"))["required_actions"]


async def answer(workers: Workers, session_id: str) -> None:
    for action in await list_required(workers, session_id):
        ids = {"turn_id": action["turn_id"], "call_id": action["call_id"]}
        await post(workers, session_id, {"type": "agent.session.input.tool_result", **ids, "success": True})


AIMS: tuple[Aim, ...] = (be_created, have_one, say, wait, report, cancel)


async def live_through_kill(workers: Workers, aim: Aim, delay_s: float) -> None:
    """Create a session, kill all workers in the state that is aimed at, and check what is there at the rest."""
    tasks = [play(SLOW), play([call("get", "{}", id="g")])]
    creations = [call("create_subagent", json.dumps({"task": task}), id=f"c{n}") for n, task in enumerate(tasks)]
    agent = {"model": "scripted", "tools": [GET], "multi_agent": {"enabled": True}}
    body = {"agent": agent, "environment": {"type": "none"}, "input": play(creations, WAIT)}
    session_id: str = (await ask(workers, "POST", "", f"create {SEED} {next(numbers)}", json=body))["id"]
    await aim(workers, session_id)
    await asyncio.sleep(delay_s)
    for process in workers.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await rest(workers, session_id)
    events = await read_events(workers, session_id)
    assert [event["sequence_number"] for event in events] == [*range(1, len(events) + 1)]
    kinds = Counter(event["type"].removeprefix("agent.session.") for event in events)
    ends = [kinds[f"turn.{end}"] for end in ("completed", "cancelled", "failed")]
    errors = [event["turn"]["error"] for event in events if event["type"] == "agent.session.turn.failed"]
    assert errors == [], aim
    assert (sum(ends), events[-1]["type"]) == (kinds["turn.created"], "agent.session.idle"), (aim, kinds)
    subagents = await list_subagents(workers, session_id)
    items = (await ask(workers, "GET", f"/{session_id}/items?limit=100&order=asc"))["data"]
    all_items = [items, *[await list_subagents(workers, session_id, f"/{each['id']}/items") for each in subagents]]
    item_ids = [item["id"] for of_one in all_items for item in of_one]
    added = [event["item"]["id"] for event in events if event["type"] == "agent.session.turn.item.added"]
    ended = [event["item"]["id"] for event in events if event["type"] == "agent.session.turn.item.done"]
    assert sorted(added) == sorted(item_ids), aim
    assert (len(set(added)), len(set(ended))) == (len(added), len(ended)), aim
    assert len(subagents) == kinds["subagent.created"] == kinds["turn.created"] - 1
    if aim is cancel:
        return
    # a call that was not whole when its response was lost has no effect, and the next response calls again
    items = [item for item in items if item.get("status") != "incomplete"]
    assert len(subagents) == 2, aim
    assert [item["type"] for item in items] == [
        *("message", "create_subagent_call", "create_subagent_call", "wait_for_subagents_call"),
        *("agent_message", "agent_message", "message"),
    ], aim
    assert [item["sender_agent_id"] for item in items[4:6]] == [each["id"] for each in subagents]
    assert items[-1]["content"][0]["text"] == "Done."


@pytest.mark.long
@pytest.mark.timeout(120 + 120 * max(TRIALS, 2))
async def test_no_kill_in_any_state_of_subagents_loses_or_repeats_anything(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    more = {"agents": AGENTS, "inference": MODEL}
    async with worker_processes(tmp_path, shared_store, workers=2, more=more) as workers:
        for _ in range(max(TRIALS, 2)):
            for aim in AIMS:
                await live_through_kill(workers, aim, dice.choice((0, dice.uniform(0, 0.3))))
