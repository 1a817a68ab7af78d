"""A store whose primary server is killed under load, and whose replica is promoted: nothing acknowledged is lost.

The replication is real. Requests are answered or refused with 503, workers find the promoted server by themselves, and
every line of a batch has exactly one result. STACK_FAIL_OVERS says how many times (once by default).
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.test_batch_kills import ask_until_answered
from tests.support.sdk.batch_files import ENDED, batch_line, create_batch, read_results
from tests.support.sdk.client import TLS, sdk_client
from tests.support.servers.postgres_server import PostgresServer, StandbyServer
from tests.support.servers.redis_group import RedisGroup, redis_cluster, redis_sentinels
from tests.support.servers.worker_processes import Workers, check_log, worker_processes
from tests.support.waiting import until

FAIL_OVERS = int(os.environ.get("STACK_FAIL_OVERS", "1"))
BOUND_S = 60.0
LINES = 400
SECTIONS: dict[str, Any] = {
    "files": {"provider": "kv"},
    "batches": {"provider": "leased", "max_running": 8, "lease_s": 2, "poll_s": 0.1},
    "inference": {"provider": "scripted", "turns": [[{"text": "a "}, {"wait_s": 0.3}, {"text": ["b "] * 20}]]},
    "responses": {"provider": "loop", "background": {"lease_s": 10, "poll_s": 0.1, "max_waiting": 500}},
}
pytestmark = [pytest.mark.long, pytest.mark.timeout(120 + 180 * FAIL_OVERS)]


@dataclass
class Load:
    """Requests one after the other from a few clients, and what was acknowledged."""

    workers: Workers
    stored: list[str] = field(default_factory=list[str])
    background: list[str] = field(default_factory=list[str])
    statuses: Counter[int] = field(default_factory=Counter[int])
    ended: Counter[str] = field(default_factory=Counter[str])
    longest_s: float = 0.0
    refused_from: float = 0.0
    refused_to: float = 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.stored)} stored and {len(self.background)} background responses acknowledged, 0 lost, "
            f"{dict(self.ended)}; answers {dict(self.statuses)}, "
            f"refused for {self.refused_to - self.refused_from:.1f} s, longest request {self.longest_s:.1f} s"
        )

    async def run(self, stop: asyncio.Event, *, background: bool) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60, verify=TLS) as client:
            body = {"model": "scripted", "input": "input", "background": background}
            while not stop.is_set():
                began = time.monotonic()
                answer = await client.post(f"{self.workers.url}/v1/responses", json=body)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    (self.background if background else self.stored).append(answer.json()["id"])
                else:
                    self.note_refusal(answer)
                    await asyncio.sleep(0.1)

    def note_refusal(self, answer: httpx.Response) -> None:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable"), answer.text
        assert answer.headers["retry-after"]
        self.refused_to = time.monotonic()
        self.refused_from = self.refused_from or self.refused_to


async def fail_over_under_load(workers: Workers, switch: Callable[[], Awaitable[None]]) -> Load:
    """Switch the server of the store while clients create responses and a batch runs, and check what was
    acknowledged."""
    load, stop = Load(workers), asyncio.Event()
    lines = [batch_line(f"line {number}") for number in range(LINES)]
    async with sdk_client(workers.url) as client:
        batch = await create_batch(client, lines)
        batch_id = batch.id
        loading = [asyncio.create_task(load.run(stop, background=number % 2 == 0)) for number in range(6)]
        async with asyncio.timeout(BOUND_S):
            while not (batch.request_counts and batch.request_counts.completed > LINES // 10):
                await asyncio.sleep(0.1)
                batch = await client.batches.retrieve(batch.id)
        await switch()
        acknowledged = len(load.stored), len(load.background)
        await until(
            lambda: len(load.stored) >= acknowledged[0] + 10 and len(load.background) >= acknowledged[1] + 10,
            within_s=BOUND_S,
        )
        stop.set()
        await asyncio.gather(*loading)
        for response_id in load.stored:
            assert (await workers.ask("GET", f"/responses/{response_id}")).json()["status"] == "completed"
        for response_id in load.background:
            response = await workers.ended(response_id, BOUND_S)
            # one whose last events were not replicated fails, as one of a killed worker does
            assert response["status"] == "completed" or "before it was done" in response["error"]["message"], response
            load.ended[response["status"]] += 1
            check_log(await workers.log(response_id), response)
        async with asyncio.timeout(2 * BOUND_S):
            while batch.status not in ENDED:
                await asyncio.sleep(0.2)
                batch = await ask_until_answered(lambda: client.batches.retrieve(batch_id))
        assert batch.status == "completed", batch
        errors = await ask_until_answered(partial(read_results, client, batch.error_file_id))
        assert errors == []
        output = await ask_until_answered(partial(read_results, client, batch.output_file_id))
        assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
        assert len({line["response"]["body"]["id"] for line in output}) == LINES
    return load


async def test_a_promoted_standby_has_everything_that_was_acknowledged(tmp_path: Path) -> None:
    for _ in range(FAIL_OVERS):
        with PostgresServer() as primary, StandbyServer(primary) as standby:
            hosts = f"{primary.host},{standby.host}"
            url = f"{primary.url.replace(primary.host, hosts)}?target_session_attrs=read-write"
            store = {"provider": "postgres", "url": url}

            async def switch(primary: PostgresServer = primary, standby: StandbyServer = standby) -> None:
                await asyncio.to_thread(primary.kill)
                await asyncio.sleep(1)  # as long as a watcher needs to notice
                await asyncio.to_thread(standby.promote)

            async with worker_processes(tmp_path, store, more=SECTIONS) as workers:
                load = await fail_over_under_load(workers, switch)
            print(f"postgres: {load}")
            assert load.statuses[503]


@pytest.mark.parametrize("kind", ["sentinels", "cluster"])
async def test_a_promoted_replica_of_redis_has_everything_that_was_acknowledged(kind: str, tmp_path: Path) -> None:
    """Sentinels or the cluster promote a replica by themselves; `min_replicas` is the number of them all."""
    for number in range(FAIL_OVERS):
        folder = tmp_path / f"{kind}{number}"
        folder.mkdir()
        with redis_sentinels(folder) if kind == "sentinels" else redis_cluster(folder) as group:
            min_replicas = 2 if kind == "sentinels" else 1
            store = {"provider": "redis", "min_replicas": min_replicas, "timeout_s": 2, **group.fields}

            # a fail-over leaves too few replicas until the killed server is back, as a replica of the promoted one
            async def switch_and_return(group: RedisGroup = group) -> None:
                master = group.find_master("{stack:}version")
                await asyncio.to_thread(master.kill)
                await asyncio.sleep(5)
                await asyncio.to_thread(master.start)

            async with worker_processes(tmp_path, store, more=SECTIONS) as workers:
                load = await fail_over_under_load(workers, switch_and_return)
            print(f"redis {kind}: {load}")
            assert load.statuses[503]
