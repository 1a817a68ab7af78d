"""Failures that only a server has: hanging, dying, coming back, running out of memory, being another one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import Delete, Put
from providers.kv_store.redis import Redis
from tests.support.servers.redis_server import RedisServer

BOUND_S = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, "--requirepass", "s3cret") as server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[Redis]:
    store = Redis(config(server))
    await store.start()
    yield store
    await store.close()


def config(server: RedisServer, *, password: str = "s3cret", database: str = "0") -> Redis.Config:
    url = server.url.replace("redis://", f"redis://:{password}@").removesuffix("0") + database
    return Redis.Config(url=SecretStr(url))


async def fails_within(seconds: float, store: Redis) -> None:
    """Assert that every kind of call is unavailable in time, and that no error shows the password."""
    began = time.monotonic()
    calls = [call for _ in range(30) for call in (store.get("a"), store.put("a", b""), store.scan(""), store.sweep())]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - began < seconds
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert not any("s3cret" in f"{answer} {answer.__cause__!r}" for answer in answers if isinstance(answer, Exception))


async def test_a_hung_server_is_unavailable_in_time_and_its_late_answers_reach_no_call(
    server: RedisServer, store: Redis
) -> None:
    keys = [f"k{i}" for i in range(100)]
    await store.write([Put(key, key.encode()) for key in keys])
    server.pause()
    await fails_within(2, store)
    await asyncio.gather(*[store.get(key) for key in keys], return_exceptions=True)
    server.resume()
    async with asyncio.timeout(5):
        entries = await asyncio.gather(*[store.get(key) for key in keys])
    assert [entry and entry.value for entry in entries] == [key.encode() for key in keys]


async def test_a_killed_server_is_unavailable_at_once_and_then_as_before(server: RedisServer, store: Redis) -> None:
    version = await store.put("kept", b"1")
    server.kill()
    await fails_within(1, store)
    await asyncio.to_thread(server.start)
    entry = await store.get("kept")
    assert entry is not None
    assert entry.version == version
    assert await store.put("kept", b"2") > version


async def test_a_store_starts_before_its_server(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    store = Redis(config(server))
    with caplog.at_level(logging.WARNING):
        await store.start()
    assert "cannot be reached yet" in caplog.text
    assert "s3cret" not in caplog.text
    await fails_within(1, store)
    await asyncio.to_thread(server.start)
    assert await store.put("a", b"1") > 0
    await store.close()


async def fill(store: Redis) -> int:
    """Write pairs until Redis says that it is full; returns how many pairs it took."""
    for i in range(1000):
        try:
            await store.write([Delete("none"), Put(f"k{i:04}", b"x" * 20_000), Put(f"l{i:04}", b"")])
        except StoreUnavailable as exc:
            assert "OutOfMemory" in exc.message  # noqa: PT017 - the loop is what is tested
            return i
    raise AssertionError("never full")


async def test_a_server_out_of_memory_refuses_writes_and_goes_on_reading(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "3mb") as server:
        store = Redis(Redis.Config(url=SecretStr(server.url)))
        await store.start()
        stored = await fill(store)
        records = [key for key, _ in await store.scan("", limit=5000)]
        assert len(records) == 2 * stored  # none was half written
        assert await store.write([Delete(key) for key in records[: stored // 2]]) is not None
        assert await store.put("fits", b"1") > 0
        await store.close()


@pytest.mark.parametrize(("password", "database"), [("wrong", "0"), ("s3cret", "99")])
async def test_what_the_server_refuses_is_a_config_error(server: RedisServer, password: str, database: str) -> None:
    with pytest.raises(ConfigError, match="refuses") as caught:
        await Redis(config(server, password=password, database=database)).start()
    assert password not in str(caught.value)


@pytest.mark.parametrize("url", ["http://:s3cret@host", "nonsense", "redis://:s3cret@host:port/0"])
async def test_a_bad_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://") as caught:
        await Redis(Redis.Config(url=SecretStr(url))).start()
    assert "s3cret" not in str(caught.value)


async def test_closing_what_never_started_is_fine() -> None:
    store = Redis(Redis.Config(url=SecretStr("redis://127.0.0.1:1/0")))
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("a")


async def test_a_server_that_lost_its_scripts_is_served_as_before(server: RedisServer, store: Redis) -> None:
    await store.put("a", b"1")
    server.kill()
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*[store.put(f"k{i}", b"") for i in range(100)])
    assert len(await store.scan("k")) == 100
