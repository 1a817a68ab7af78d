"""A stack under load whose store hangs, is busy or is full: what needs it is refused soon, the rest goes on.

STACK_OUTAGE_S says for how long the store hangs (1 s by default), STACK_BUSY_S how long it is busy; the figures are
printed.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.worker_processes import Workers, worker_processes

OUTAGE_S = float(os.environ.get("STACK_OUTAGE_S", "1"))
BUSY_S = float(os.environ.get("STACK_BUSY_S", "1"))
RATE = 50
SOON_S = 5.0
ECHO = {"inference": {"provider": "scripted"}}
pytestmark = pytest.mark.timeout(180 + 4 * OUTAGE_S + 2 * BUSY_S)


class Load:
    """Requests at a steady rate; what came of them, by what they asked for, and how long each took."""

    def __init__(self, url: str, *kinds: str) -> None:
        self._url = url
        self._kinds = kinds
        self.came: Counter[str] = Counter()
        self.took_s: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def ask(self, http: aiohttp.ClientSession, kind: str) -> str:
        body = {"model": "scripted", "input": "hi there", "store": kind == "stored"}
        began = time.monotonic()
        async with http.post(f"{self._url}/v1/responses", json=body) as answer:
            fields = await answer.json()
        self.took_s[kind].append(time.monotonic() - began)
        if answer.status != 200:
            assert "locked" not in fields["error"]["message"]
            assert (answer.status, fields["error"]["code"], "retry-after" in answer.headers) == (
                503,
                "storage_unavailable",
                True,
            )
        return f"{kind} {answer.status}"

    async def run(self, seconds: float) -> None:
        """Ask for so long, and wait for all answers."""
        loop = asyncio.get_running_loop()
        timeout, began = aiohttp.ClientTimeout(20), loop.time()
        tasks: list[asyncio.Task[str]] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            while loop.time() < began + seconds:
                tasks.append(asyncio.create_task(self.ask(http, self._kinds[len(tasks) % len(self._kinds)])))
                await asyncio.sleep(max(0, began + len(tasks) / RATE - loop.time()))
            self.came.update(await asyncio.gather(*tasks))

    def p99_ms(self, kind: str) -> float:
        return sorted(self.took_s[kind])[int(len(self.took_s[kind]) * 0.99)] * 1e3


@asynccontextmanager
async def hanging(server: RedisServer | PostgresServer) -> AsyncGenerator[None]:
    await asyncio.to_thread(server.pause)
    try:
        yield
    finally:
        await asyncio.to_thread(server.resume)


async def rides_out(workers: Workers, server: RedisServer | PostgresServer) -> None:
    """Half of the load needs the store, half does not; then the store comes back."""
    await Load(workers.url, "stored", "not").run(1)
    before = workers.parent.memory_info().rss
    load = Load(workers.url, "stored", "not")
    async with hanging(server):
        await load.run(OUTAGE_S)
    back = time.monotonic()
    again = Load(workers.url, "stored")
    async with asyncio.timeout(SOON_S):
        while again.came["stored 200"] == 0:
            await again.run(1 / RATE)
    grown_mib = (workers.parent.memory_info().rss - before) / 2**20
    stored_ms, other_ms = load.p99_ms("stored"), load.p99_ms("not")
    print(
        f"{OUTAGE_S:g} s of {type(server).__name__} hanging: {dict(load.came)}, p99 {stored_ms:.0f} ms stored, "
        f"{other_ms:.0f} ms not; {grown_mib:+.1f} MiB; healthy after {time.monotonic() - back:.2f} s"
    )
    assert set(load.came) == {"stored 503", "not 200"}
    assert max(load.took_s["stored"]) < SOON_S
    assert grown_mib < 50


async def test_while_redis_hangs_what_needs_no_store_goes_on(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with worker_processes(
            tmp_path, {"provider": "redis", "url": server.url}, workers=1, more=ECHO
        ) as workers:
            await rides_out(workers, server)


async def test_while_postgres_hangs_what_needs_no_store_goes_on(tmp_path: Path) -> None:
    with PostgresServer() as server:
        store = {"provider": "postgres", "url": server.url}
        async with worker_processes(tmp_path, store, workers=1, more=ECHO) as workers:
            await rides_out(workers, server)


async def test_two_workers_on_one_file_never_get_a_lock_error(tmp_path: Path) -> None:
    store: dict[str, Any] = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with worker_processes(tmp_path, store, workers=2, more=ECHO) as workers:
        load, other = Load(workers.url, "stored"), Load(workers.url, "stored")
        await asyncio.gather(load.run(BUSY_S), other.run(BUSY_S))
    came = load.came + other.came
    print(f"{BUSY_S:g} s of 2 x {RATE} writes/s: {dict(came)}, p99 {load.p99_ms('stored'):.0f} ms")
    assert set(came) == {"stored 200"}
