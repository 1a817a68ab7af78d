"""Prints what a store costs: calls a second, the process's CPU per call, and latency. `pytest -s -m bench`."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from apis.storage.kv_store import KVStore, Put
from providers.kv_store.postgres import Postgres
from providers.kv_store.redis import Redis
from providers.kv_store.sqlite import SQLite
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.redis_server import RedisServer

pytestmark = pytest.mark.bench

SECONDS = 2.0
VALUE = os.urandom(1024)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "redis", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KVStore]:
    store: KVStore
    match request.param:
        case "sqlite":
            store = SQLite(SQLite.Config(path=str(tmp_path / "store.db")))
        case "redis":
            store = Redis(Redis.Config(url=SecretStr(request.getfixturevalue("redis_url")), timeout_s=10))
        case _:
            store = Postgres(Postgres.Config(url=SecretStr(request.getfixturevalue("postgres_url")), timeout_s=10))
    await store.start()
    yield store
    await store.close()


async def measure(what: str, call: Callable[[int], Awaitable[object]], callers: int) -> None:
    """Let `callers` make one call after the other for a while, and print what it came to."""
    numbers, took_s = itertools.count(), list[float]()
    cpu_s, began = time.process_time(), time.perf_counter()

    async def repeat() -> None:
        while (start := time.perf_counter()) < began + SECONDS:
            await call(next(numbers))
            took_s.append(time.perf_counter() - start)

    await asyncio.gather(*[repeat() for _ in range(callers)])
    cpu_us = (time.process_time() - cpu_s) / len(took_s) * 1e6
    rate = len(took_s) / (time.perf_counter() - began)
    took_s.sort()
    p50, p99 = (took_s[int(len(took_s) * share)] * 1000 for share in (0.5, 0.99))
    print(
        f"\n{what}, {callers} callers: {rate:,.0f}/s, CPU {cpu_us:.0f} us, p50 {p50:.2f} ms, p99 {p99:.2f} ms", end=""
    )


@pytest.mark.parametrize("callers", [1, 16, 64])
@pytest.mark.parametrize("durable", [True, False])
async def test_puts_of_1_kib(store: KVStore, callers: int, durable: bool) -> None:
    await measure(
        f"{type(store).__name__}: put, durable={durable}",
        lambda i: store.put(f"key{i}", VALUE, durable=durable),
        callers,
    )


@pytest.mark.parametrize("callers", [1, 16, 64])
async def test_get_many_of_three(store: KVStore, callers: int) -> None:
    await store.write([Put(f"key{i}", VALUE) for i in range(3000)])
    await measure(
        f"{type(store).__name__}: get_many(3)",
        lambda i: store.get_many([f"key{(i + n) % 3000}" for n in range(3)]),
        callers,
    )


@pytest.mark.parametrize("callers", [1, 16, 64])
async def test_put_and_then_get(store: KVStore, callers: int) -> None:
    async def put_and_get(i: int) -> None:
        await store.put(f"key{i}", VALUE)
        await store.get(f"key{i}")

    await measure(f"{type(store).__name__}: put and get", put_and_get, callers)
