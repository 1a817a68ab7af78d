"""Prints how long clients wait while a batch runs, and without one, in turns within one run. `pytest -s -m bench`.

STACK_ROUNDS says how many turns of each kind (6 by default). On a machine that others use, only the ratio means
something.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.support.sdk.batch_files import ENDED, batch_line, create_batch
from tests.support.servers.worker_processes import worker_processes

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
ROUNDS = int(os.environ.get("STACK_ROUNDS", "6"))
TURN_S = 5.0
LINES = 3000
SECTIONS: dict[str, Any] = {
    "inference": {"provider": "scripted", "turns": [[{"wait_s": 0.1}, {"text": ["done "] * 20}]]},
    "files": {"provider": "kv"},
}


async def measure_clients(url: str) -> list[float]:
    """Let four clients send requests for a while; returns the seconds that each took, without the model's own."""
    latencies_s: list[float] = []
    until = time.monotonic() + TURN_S

    async def send() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            while time.monotonic() < until:
                began = time.perf_counter()
                body = {"model": "scripted", "input": "hi"}
                (await client.post(f"{url}/v1/responses", json=body)).raise_for_status()
                latencies_s.append(time.perf_counter() - began)
                await asyncio.sleep(0.05)

    await asyncio.gather(*(send() for _ in range(4)))
    return latencies_s


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000


async def test_clients_while_a_batch_runs(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    alone: list[float] = []
    during: list[float] = []
    executed = 0
    async with (
        worker_processes(tmp_path, store, workers=1, more=SECTIONS) as workers,
        AsyncOpenAI(base_url=f"{workers.url}/v1", api_key="none", timeout=120) as client,
    ):
        for _ in range(ROUNDS):
            alone += await measure_clients(workers.url)
            batch = await create_batch(client, [batch_line(f"{n}", store=False) for n in range(LINES)])
            while (batch := await client.batches.retrieve(batch.id)).status != "in_progress":  # noqa: ASYNC110 - a server sets no event
                await asyncio.sleep(0.05)
            during += await measure_clients(workers.url)
            batch = await client.batches.cancel(batch.id)
            while (batch := await client.batches.retrieve(batch.id)).status not in ENDED:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)
            executed += batch.request_counts.completed if batch.request_counts else 0
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        without, with_batch = percentile(alone, share), percentile(during, share)
        print(
            f"{name}: {without:.0f} ms alone, {with_batch:.0f} ms while a batch runs, ratio {with_batch / without:.2f}"
        )
    print(f"{len(alone)} and {len(during)} requests, {executed} lines executed meanwhile")
