"""Workers that are killed while they execute batches, on each shared store: every line has exactly one result, and only
one that was running in two killed workers, the second time alone, may fail for that.

STACK_KILL_TRIALS says how many workers are killed in the long forms (12 by default), STACK_KILL_LINES how many lines
the large batch has (3,000), STACK_KILL_SEED what is drawn; the seed is printed.
"""

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAIError
from openai.types import Batch

from tests.support.sdk.batch_files import batch_line, create_batch, read_results
from tests.support.sdk.client import sdk_client
from tests.support.servers.worker_processes import Workers, worker_processes

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "12"))
LINES = int(os.environ.get("STACK_KILL_LINES", "3000"))
SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
STEP_KILLS = {"validating": 2, "finalizing": 1}
"""A batch that has cost three workers in one of these steps fails. One more is killed as it begins to finalize."""
ENDED = ("completed", "failed", "expired", "cancelled")
SECTIONS: dict[str, Any] = {
    "inference": {"provider": "scripted", "turns": [[{"wait_s": 0.1}, {"text": ["done "] * 5}]]},
    "files": {"provider": "kv"},
    "batches": {"provider": "leased", "max_running": 8, "lease_s": 1, "poll_s": 0.1},
}


async def ask_until_answered(call: Any) -> Any:
    """Return the result of the call, made again while a worker that dies takes it along."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except OpenAIError:
                await asyncio.sleep(0.1)


async def run_under_kills(workers: Workers, dice: random.Random, line_count: int, kill_count: int) -> int:
    """Run a batch, and kill workers one after the other while it runs; return how many were killed. No more of them
    than a batch may cost are killed while it is validated, and while its files are written."""
    lines = [batch_line(f"line {number}") for number in range(line_count)]
    lines[line_count // 2]["body"]["temperature"] = 17
    async with sdk_client(workers.url) as client:
        batch: Batch = await ask_until_answered(lambda: create_batch(client, lines))
        batch_id, kills = batch.id, Counter[str]()
        async with asyncio.timeout(180 + 20 * kill_count):
            while batch.status not in ENDED:
                await asyncio.sleep(dice.uniform(0.05, 0.5))
                batch = await ask_until_answered(lambda: client.batches.retrieve(batch_id))
                processes = workers.processes()
                is_enough = kills.total() >= kill_count or kills[batch.status] >= STEP_KILLS.get(
                    batch.status, kill_count
                )
                if processes and batch.status not in ENDED and not is_enough:
                    dice.choice(processes).kill()
                    kills[batch.status] += 1
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        output = await ask_until_answered(lambda: read_results(client, batch.output_file_id))
        errors = await ask_until_answered(lambda: read_results(client, batch.error_file_id))
        expected = [line["custom_id"] for line in lines]
        failed = [line["custom_id"] for line in errors]
        lost = [line["custom_id"] for line in errors if line["error"] and line["error"]["code"] == "worker_lost"]
        assert set(failed) == {expected[line_count // 2], *lost}
        assert len(lost) <= max(0, kills.total() - 1)
        assert failed == [each for each in expected if each in failed]
        assert [line["custom_id"] for line in output] == [each for each in expected if each not in failed]
        assert batch.request_counts.model_dump() == {
            "total": line_count,
            "completed": len(output),
            "failed": len(failed),
        }
        assert len({line["response"]["body"]["id"] for line in output}) == len(output)
        files = (await ask_until_answered(lambda: client.files.list(purpose="batch_output"))).data
        assert {batch.output_file_id, batch.error_file_id} <= {file.id for file in files}
        return kills.total()


@pytest.mark.timeout(120)
async def test_lines_of_a_killed_worker_are_executed_by_another(shared_store: dict[str, Any], tmp_path: Path) -> None:
    async with worker_processes(tmp_path, shared_store, more=SECTIONS) as workers:
        assert await run_under_kills(workers, random.Random(SEED), 64, 1) == 1


@pytest.mark.long
@pytest.mark.timeout(120 + 30 * TRIALS)
async def test_no_line_is_lost_or_doubled_by_many_kills(shared_store: dict[str, Any], tmp_path: Path) -> None:
    print(f"seed {SEED}")
    dice, kills, batches, began_at = random.Random(SEED), 0, 0, time.monotonic()
    async with worker_processes(tmp_path, shared_store, workers=4, more=SECTIONS) as workers:
        while kills < TRIALS:
            kills += await run_under_kills(workers, dice, dice.randint(60, 300), dice.randint(1, 4))
            batches += 1
    provider = shared_store["provider"]
    print(f"{kills} killed over {provider} in {batches} batches, nothing lost, {time.monotonic() - began_at:.0f} s")


@pytest.mark.long
@pytest.mark.timeout(120 + 30 * TRIALS)
async def test_no_line_of_a_large_batch_is_lost_or_doubled(shared_store: dict[str, Any], tmp_path: Path) -> None:
    print(f"seed {SEED}")
    model = {"provider": "scripted", "turns": [[{"text": ["done "] * 5}]]}
    more = {**SECTIONS, "inference": model}
    began_at = time.monotonic()
    async with worker_processes(tmp_path, shared_store, workers=4, more=more) as workers:
        before = memory_mib(workers)
        kills = await run_under_kills(workers, random.Random(SEED), LINES, TRIALS)
        after = memory_mib(workers)
    print(f"{LINES} lines over {shared_store['provider']}, {kills} killed, {time.monotonic() - began_at:.0f} s")
    print(f"nothing lost; {before} MiB before, {after} MiB after")


def memory_mib(workers: Workers) -> list[int]:
    """Return the resident memory of each worker."""
    return [process.memory_info().rss >> 20 for process in workers.processes()]
