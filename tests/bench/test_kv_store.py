"""Prints what a store costs: calls a second, the process's CPU per call, and latency. `pytest -s -m bench`."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from apis.kv_store import Put
from providers.kv_store.sqlite import SQLite

pytestmark = pytest.mark.bench

SECONDS = 2.0
VALUE = os.urandom(1024)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLite]:
    store = SQLite(SQLite.Config(path=str(tmp_path / "store.db")))
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
async def test_puts_of_1_kib(store: SQLite, callers: int, durable: bool) -> None:
    await measure(f"put, durable={durable}", lambda i: store.put(f"key{i}", VALUE, durable=durable), callers)


@pytest.mark.parametrize("callers", [1, 16, 64])
async def test_get_many_of_three(store: SQLite, callers: int) -> None:
    await store.write([Put(f"key{i}", VALUE) for i in range(3000)])
    await measure("get_many(3)", lambda i: store.get_many([f"key{(i + n) % 3000}" for n in range(3)]), callers)
