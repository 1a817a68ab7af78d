"""Workers that are killed while clients repeat their idempotency keys and webhooks are delivered, on each store.

STACK_KILL_TRIALS says how many times (once by default), STACK_KILL_SEED what is drawn; the seed is printed.
"""

import asyncio
import os
import random
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.servers.webhook_receiver import receiving
from tests.support.servers.worker_processes import Workers, worker_processes

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "1"))
SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
BOUND_S = 30.0
KEYS = 8
pytestmark = pytest.mark.timeout(120 + 60 * TRIALS)


async def ask(workers: Workers, key: str, **fields: Any) -> httpx.Response:
    """Send a create again until it is answered, as an SDK does it: also where an error asks the client to try again."""
    body = {"model": "scripted", "input": f"input {key}", **fields}
    async with asyncio.timeout(60):
        while True:
            answer = await workers.ask("POST", "/responses", json=body, headers={"Idempotency-Key": key})
            if answer.status_code == 200:
                return answer
            assert answer.status_code in (409, 500, 502, 503), answer.text
            await asyncio.sleep(0.2)


async def test_a_key_is_one_response_and_one_webhook_although_workers_are_killed(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    async with receiving() as receiver:
        statuses = cycle([200, 500, 200])
        receiver.answer = lambda: next(statuses)
        background = {"lease_s": 1.5, "poll_s": 0.1}
        more = {
            "responses": {"provider": "loop", "background": background},
            "webhooks": {"provider": "kv", "receivers": [receiver.hook(retry_s=0.2, timeout_s=1)], "lease_s": 1.5},
        }
        response_ids: set[str] = set()
        async with worker_processes(tmp_path, shared_store, more=more) as workers:
            for trial in range(TRIALS):
                ids = await one_trial(workers, dice, f"{trial}-{SEED}")
                response_ids |= ids
                await asyncio.gather(*(workers.ended(each, BOUND_S) for each in ids))
                await receiver.hear_of(ids, BOUND_S)
        deliveries = receiver.list_deliveries()
    # the webhook of a response that was made twice would be here, too
    assert {response_id for _, response_id in deliveries} == response_ids
    assert len({webhook_id for webhook_id, _ in deliveries}) == len(response_ids)
    print(f"{len(response_ids)} responses, told {len(deliveries)} times")


async def one_trial(workers: Workers, dice: random.Random, name: str) -> set[str]:
    """Everybody asks twice at once, and a worker dies meanwhile; the ids that were answered, one for each key."""
    keys = [f"{name}-{number}" for number in range(KEYS)]
    asking = [asyncio.create_task(ask(workers, key, background=True)) for key in keys for _ in range(2)]
    await asyncio.sleep(dice.uniform(0, 0.5))
    if processes := workers.processes():
        with suppress(psutil.NoSuchProcess):
            dice.choice(processes).kill()
    answers = await asyncio.gather(*asking)
    ids = [answer.json()["id"] for answer in answers]
    assert ids[::2] == ids[1::2]
    again = await asyncio.gather(*(ask(workers, key, background=True) for key in keys))
    assert [answer.json()["id"] for answer in again] == ids[::2]
    return set(ids)
