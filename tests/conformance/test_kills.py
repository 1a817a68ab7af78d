"""Workers that are killed, stopped and drained while they make background responses, on each shared store.

STACK_KILL_TRIALS says how many times (once by default), STACK_KILL_SEED what is drawn; the seed is printed.
"""

import asyncio
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worker_processes import Workers, check_log, worker_processes

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "1"))
SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
BOUND_S = 20.0
pytestmark = pytest.mark.timeout(120 + 40 * TRIALS)


async def under_load(workers: Workers, dice: random.Random, strike: Callable[[psutil.Process], None]) -> list[str]:
    """Begin some responses, strike a worker at some moment, and return the ids that were acknowledged."""
    begun = [asyncio.create_task(workers.begin(f"input {each}")) for each in range(10)]
    await asyncio.sleep(dice.uniform(0, 1.5))
    targets = workers.processes()
    if targets:
        with suppress(psutil.NoSuchProcess):
            strike(dice.choice(targets))
    return [each for each in await asyncio.gather(*begun) if each is not None]


async def all_end(workers: Workers, ids: list[str]) -> list[dict[str, Any]]:
    """Every one of them ends in time, and its log is whole."""
    ended = await asyncio.gather(*(workers.ended(each, BOUND_S) for each in ids))
    for response in ended:
        check_log(await workers.log(response["id"]), response)
        answer = await workers.ask("GET", f"/responses/{response['id']}/input_items")
        assert answer.json()["data"][0]["content"][0]["text"].startswith("input ")
    return ended


def is_locked(store: dict[str, Any]) -> bool:
    """Whether whoever was stopped holds the SQLite file's only lock: as long as it does, nobody can write at all."""
    if store["provider"] != "sqlite":
        return False
    with closing(sqlite3.connect(store["path"], timeout=0.3, isolation_level=None)) as probe:
        try:
            probe.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


async def test_whatever_worker_is_killed_nothing_is_lost_or_stuck(shared_store: dict[str, Any], tmp_path: Path) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    outcomes: list[str] = []
    async with worker_processes(tmp_path, shared_store) as workers:
        for _ in range(TRIALS):
            ids = await under_load(workers, dice, psutil.Process.kill)
            outcomes += [response["status"] for response in await all_end(workers, ids)]
    print({status: outcomes.count(status) for status in set(outcomes)})
    assert "completed" in outcomes


async def test_a_worker_that_was_stopped_for_too_long_can_write_nothing(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    async with worker_processes(tmp_path, shared_store) as workers:
        for _ in range(max(1, TRIALS // 2)):
            stopped: list[psutil.Process] = []

            def stop(process: psutil.Process, stopped: list[psutil.Process] = stopped) -> None:
                process.suspend()
                while is_locked(shared_store):
                    process.resume()
                    process.suspend()
                stopped.append(process)

            ids = await under_load(workers, dice, stop)
            ended = await all_end(workers, ids)
            logs = [await workers.log(each) for each in ids]
            for process in stopped:
                process.resume()
            await asyncio.sleep(2)
            for response, log in zip(ended, logs, strict=True):
                assert await workers.log(response["id"]) == log
                assert (await workers.ask("GET", f"/responses/{response['id']}")).json() == response


async def test_another_worker_goes_on_when_one_is_drained(shared_store: dict[str, Any], tmp_path: Path) -> None:
    async with (
        worker_processes(tmp_path, shared_store, workers=1) as other,
        worker_processes(tmp_path, shared_store, workers=1) as leaving,
    ):
        ids = [each for each in await asyncio.gather(*(leaving.begin(f"input {n}") for n in range(10))) if each]
        assert len(ids) == 10
        leaving.parent.send_signal(signal.SIGTERM)
        ended = await all_end(other, ids)
        assert {response["status"] for response in ended} == {"completed"}
