"""Workers that are killed between the acceptance of steering input and the response that reads it, on each store.

STACK_KILL_TRIALS says how many times (once by default), STACK_KILL_SEED what is drawn; the seed is printed.
"""

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.sdk.client import sdk_client
from tests.support.servers.worker_processes import Workers, check_log, worker_processes

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "1"))
SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
BOUND_S = 20.0
TEXTS = ("dogs", "and birds")
pytestmark = pytest.mark.timeout(120 + 40 * TRIALS)


async def steered(workers: Workers, number: int, dice: random.Random) -> tuple[str, str]:
    """The ids of a response that was steered twice, and of the one that is to follow it."""
    while True:
        response_id = await workers.begin(f"search {number}", tools=[{"type": "web_search"}])
        assert response_id is not None
        await asyncio.sleep(dice.uniform(0, 1))
        async with sdk_client(workers.url) as client, client.responses.connect() as connection:
            events: list[Any] = []
            for text in TEXTS:
                await connection.response.steer(previous_response_id=response_id, input=text)
                events.append(await connection.recv())
        if [event.type for event in events] == ["response.steer.accepted"] * 2:
            (key,) = {event.steer.id[len("steer_") :][:44] for event in events}
            return response_id, f"resp_{key}"
        # it was faster: another one
        assert events[-1].error.code in ("response_already_completed", "response_not_active"), events


async def is_read_once(workers: Workers, response_id: str, successor_id: str, endings: Counter[str]) -> None:
    """The response has ended; one response follows it, with all that was sent, and ends too."""
    response = await workers.ended(response_id, BOUND_S)
    endings[response["status"]] += 1
    check_log(await workers.log(response_id), response)
    assert response["status"] in ("completed", "incomplete"), response
    successor = await workers.ended(successor_id, BOUND_S)
    assert (successor["status"], successor["previous_response_id"]) == ("completed", response_id)
    check_log(await workers.log(successor_id), successor)
    items = (await workers.ask("GET", f"/responses/{successor_id}/input_items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == [*TEXTS]
    tree = (await workers.ask("GET", f"/responses/{response_id}/tree")).json()["data"]
    assert [row["id"] for row in tree] == [response_id, successor_id]


async def test_all_input_is_read_once_although_workers_are_killed(shared_store: dict[str, Any], tmp_path: Path) -> None:
    print(f"seed {SEED}")
    dice, endings = random.Random(SEED), Counter[str]()
    async with worker_processes(tmp_path, shared_store) as workers:
        for trial in range(TRIALS):
            pairs = await asyncio.gather(*(steered(workers, 10 * trial + number, dice) for number in range(4)))
            await asyncio.sleep(dice.uniform(0, 1.5))
            for process in workers.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.gather(*(is_read_once(workers, *pair, endings) for pair in pairs))
    print(f"{TRIALS} kills over {shared_store['provider']}: {dict(endings)}")
