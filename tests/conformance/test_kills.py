"""Workers that are killed, stopped and drained while they make background responses, on each shared store.

STACK_KILL_TRIALS says how many times (once by default), STACK_KILL_SEED what is drawn; the seed is printed.
"""

import asyncio
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.servers.worker_processes import UNLOSABLE_LEASE_S, Workers, check_log, worker_processes

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "1"))
SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
BOUND_S = 20.0
pytestmark = pytest.mark.timeout(120 + 40 * TRIALS)


@dataclass
class Asked:
    """A response that was asked for: what was said, in which conversation, and its id if it was acknowledged."""

    text: str
    conversation: str | None = None
    id: str | None = None

    async def begin(self, workers: Workers) -> None:
        fields: dict[str, Any] = {} if self.text.startswith("input") else {"tools": [{"type": "web_search"}]}
        if self.conversation is not None:
            fields["conversation"] = self.conversation
        self.id = await workers.begin(self.text, **fields)


@dataclass
class Figures:
    """Over all trials."""

    acknowledged: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    turns: Counter[str] = field(default_factory=Counter[str])
    gone_on: int = 0
    longest_s: float = 0

    def __str__(self) -> str:
        turns = f"{self.gone_on} of them after a lost call, turns of conversations {dict(self.turns)}"
        return (
            f"seed {SEED}: {self.acknowledged} acknowledged, 0 lost, 0 stuck; {dict(self.ended)}, {turns}; "
            f"all ended within {self.longest_s:.1f} s"
        )


async def under_load(
    workers: Workers, dice: random.Random, strike: Callable[[psutil.Process], None]
) -> tuple[list[Asked], float]:
    """Begin some responses and strike a worker at some moment; also the time of that."""
    requests = [Asked(f"{word} {n}") for n, word in enumerate(("input",) * 5 + ("search", "meet", "tell"))]
    for text in ("input in a conversation", "search in a conversation"):
        conversation = await workers.ask("POST", "/conversations", json={})
        requests.append(Asked(text, conversation.json()["id"]))
    begun = [asyncio.create_task(each.begin(workers)) for each in requests]
    if dice.random() < 0.8:  # else some have not even been heard
        await asyncio.wait(begun)
    await asyncio.sleep(dice.uniform(0, 3))
    targets = workers.processes()
    if targets:
        with suppress(psutil.NoSuchProcess):
            strike(dice.choice(targets))
    struck_at = time.monotonic()
    await asyncio.gather(*begun)
    return requests, struck_at


async def all_end(workers: Workers, requests: Sequence[Asked], figures: Figures, since: float) -> list[dict[str, Any]]:
    """Every one that was acknowledged ends in time, and its log and its conversation are whole."""
    begun = [each for each in requests if each.id is not None]
    ended = await asyncio.gather(*(workers.ended(str(each.id), BOUND_S) for each in begun))
    figures.longest_s = max(figures.longest_s, time.monotonic() - since)
    figures.acknowledged += len(begun)
    for each, response in zip(begun, ended, strict=True):
        figures.ended[response["status"]] += 1
        lost = any(item["type"] == "web_search_call" and item["status"] == "failed" for item in response["output"])
        figures.gone_on += lost and response["status"] == "completed"
        check_log(await workers.log(response["id"]), response)
        answer = await workers.ask("GET", f"/responses/{response['id']}/input_items")
        assert answer.json()["data"][0]["content"][0]["text"] == each.text
    endings = {response["id"]: response for response in ended}
    for each in requests:
        if each.conversation is not None:
            await is_free_and_whole(workers, each.conversation, endings.get(each.id or ""), figures)
    return ended


async def is_free_and_whole(
    workers: Workers, conversation: str, response: dict[str, Any] | None, figures: Figures
) -> None:
    """Items can be added to the conversation again, and it holds the turn as the response ended, or nothing of it."""
    path = f"/conversations/{conversation}/items"
    item = {"type": "message", "role": "user", "content": "after"}
    async with asyncio.timeout(BOUND_S):  # one that was never acknowledged may have the turn for as long as a lease
        while (added := await workers.ask("POST", path, json={"items": [item]})).status_code == 409:  # noqa: ASYNC110  # another process sets no event
            await asyncio.sleep(0.2)
    assert added.status_code == 200, added.text
    items: list[dict[str, Any]] = (await workers.ask("GET", f"{path}?order=asc&limit=100")).json()["data"]
    texts = [each["content"][0]["text"] for each in items if each.get("role") == "user"]
    turns = items[1 : len(items) - texts.count("after")] if len(texts) > texts.count("after") else []
    figures.turns["whole" if turns else "nothing"] += 1
    assert len(texts) <= 1 + texts.count("after")
    if response is not None:
        assert turns == (response["output"] if response["status"] == "completed" else [])
    else:
        assert not turns or turns[-1]["status"] == "completed"


def is_locked(store: dict[str, Any]) -> bool:
    """Return true if the stopped process holds the SQLite file's only lock: until then no other can write."""
    if store["provider"] != "sqlite":
        return False
    with closing(sqlite3.connect(store["path"], timeout=0.3, isolation_level=None)) as probe:
        try:
            probe.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


async def test_a_killed_or_stopped_worker_loses_no_response_and_blocks_none(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    """A worker that was stopped for longer than its leases live can write nothing when it goes on."""
    print(f"seed {SEED}")
    dice, figures = random.Random(SEED), Figures()
    async with worker_processes(tmp_path, shared_store) as workers:
        for _ in range(TRIALS):
            requests, struck_at = await under_load(workers, dice, psutil.Process.kill)
            await all_end(workers, requests, figures, struck_at)
        for _ in range(max(1, TRIALS // 2)):
            await stop_one(workers, dice, figures, shared_store)
    print(f"{TRIALS} killed, half as many stopped over {shared_store['provider']}, {figures}")
    assert figures.ended["completed"] or TRIALS == 1


async def stop_one(workers: Workers, dice: random.Random, figures: Figures, store: dict[str, Any]) -> None:
    """Stop a worker until all has ended elsewhere, and raise unless nothing of that changes when it goes on."""
    stopped: list[psutil.Process] = []

    def stop(process: psutil.Process) -> None:
        process.suspend()
        while is_locked(store):
            process.resume()
            process.suspend()
        stopped.append(process)

    requests, struck_at = await under_load(workers, dice, stop)
    ended = await all_end(workers, requests, figures, struck_at)
    logs = [await workers.log(response["id"]) for response in ended]
    for process in stopped:
        process.resume()
    await asyncio.sleep(2)
    for response, log in zip(ended, logs, strict=True):
        assert await workers.log(response["id"]) == log
        assert (await workers.ask("GET", f"/responses/{response['id']}")).json() == response


async def test_another_worker_goes_on_when_one_is_drained(shared_store: dict[str, Any], tmp_path: Path) -> None:
    async with (
        worker_processes(tmp_path, shared_store, workers=1, lease_s=UNLOSABLE_LEASE_S) as other,
        worker_processes(tmp_path, shared_store, workers=1, lease_s=UNLOSABLE_LEASE_S) as leaving,
    ):
        words = ("input",) * 6 + ("search", "meet", "wait", "tell")
        requests = [Asked(f"{word} {n}") for n, word in enumerate(words)]
        await asyncio.gather(*(each.begin(leaving) for each in requests))
        assert all(each.id is not None for each in requests)
        leaving.parent.send_signal(signal.SIGTERM)
        figures = Figures()
        await all_end(other, requests, figures, time.monotonic())
        assert (figures.ended, figures.gone_on) == ({"completed": 10}, 0)
