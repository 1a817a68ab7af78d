"""Backends for the conformance suites: each hands out started providers and closes all of them afterwards."""

import itertools
import sqlite3
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis as Client

from apis.storage.kv_store import KVStore
from providers.kv_store.memory import Memory
from providers.kv_store.postgres import Postgres
from providers.kv_store.redis import Redis
from providers.kv_store.sqlite import SQLite
from tests.conformance.kv_store import Backend
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.redis_group import RedisGroup, redis_cluster
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.s3_server import CREDENTIALS, S3Server


class Clock:
    """A wall clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0

    def __call__(self) -> float:
        return self.seconds

    async def elapse(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
async def memory_backend() -> Backend:
    clock = Clock()
    store = Memory(Memory.Config())
    store.now = clock

    async def open_store() -> KVStore:
        return store

    return Backend(open_store, clock.elapse)


@pytest.fixture
async def sqlite_backend(tmp_path: Path) -> AsyncIterator[Backend]:
    clock = Clock()
    async with AsyncExitStack() as stores:

        async def open_store() -> KVStore:
            store = SQLite(SQLite.Config(path=str(tmp_path / "store.db")))
            store.now = clock
            await store.start()
            stores.push_async_callback(store.close)
            return store

        async def overwrite(key: str, change: Callable[[bytes], bytes]) -> None:
            with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
                [stored] = db.execute("SELECT value FROM entries WHERE key = ?", (key.encode(),)).fetchone()
                db.execute("UPDATE entries SET value = ? WHERE key = ?", (change(stored), key.encode()))

        yield Backend(open_store, clock.elapse, overwrite)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


numbers = itertools.count()


@asynccontextmanager
async def redis_stores(config: Redis.Config, url: str, stored_prefix: str) -> AsyncGenerator[Backend]:
    """Yield a backend of stores over one Redis, whose server at `url` has the entries below `stored_prefix`."""
    async with AsyncExitStack() as stores:
        client = await stores.enter_async_context(Client.from_url(url))  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped

        async def open_store() -> KVStore:
            store = Redis(config)
            await store.start()
            stores.push_async_callback(store.close)
            return store

        async def elapse(seconds: float) -> None:
            # Redis itself says when its clock has moved on: no client ever pushes to this list.
            await client.blpop([f"{stored_prefix}nothing"], timeout=seconds)  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType] - typed for both clients

        async def overwrite(key: str, change: Callable[[bytes], bytes]) -> None:
            stored = await client.get(f"{stored_prefix}e:{key}")
            assert isinstance(stored, bytes)
            await client.set(f"{stored_prefix}e:{key}", stored[:8] + change(stored[8:]))  # pyright: ignore[reportUnknownMemberType] - as above

        yield Backend(open_store, elapse, overwrite)


@pytest.fixture
async def redis_backend(redis_server: RedisServer) -> AsyncIterator[Backend]:
    prefix = f"test{next(numbers)}:"
    config = Redis.Config(url=SecretStr(redis_server.url), prefix=prefix, timeout_s=5, connect_timeout_s=5)
    async with redis_stores(config, redis_server.url, prefix) as backend:
        yield backend


@pytest.fixture(scope="session")
def cluster_of_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisGroup]:
    with redis_cluster(tmp_path_factory.mktemp("cluster"), node_timeout_s=30) as group:
        yield group


@pytest.fixture
async def redis_cluster_backend(cluster_of_redis: RedisGroup) -> AsyncIterator[Backend]:
    """A store in a cluster of three masters with a replica each."""
    prefix = f"test{next(numbers)}:"
    fields = {"prefix": prefix, "timeout_s": 5, "connect_timeout_s": 5, **cluster_of_redis.fields}
    stored_prefix = f"{{{prefix}}}"
    url = cluster_of_redis.find_master(stored_prefix).url
    async with redis_stores(Redis.Config.model_validate(fields), url, stored_prefix) as backend:
        yield backend


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
async def postgres_backend(postgres_server: PostgresServer) -> AsyncIterator[Backend]:
    config = Postgres.Config(
        url=SecretStr(postgres_server.url), namespace=f"test{next(numbers)}", timeout_s=5, connect_timeout_s=5
    )
    async with AsyncExitStack() as stores:
        client = await asyncpg.connect(postgres_server.url)
        stores.push_async_callback(client.close)

        async def open_store() -> KVStore:
            store = Postgres(config)
            await store.start()
            stores.push_async_callback(store.close)
            return store

        async def elapse(seconds: float) -> None:
            await client.execute("SELECT pg_sleep($1)", seconds)  # the server itself says when its clock has moved on

        async def overwrite(key: str, change: Callable[[bytes], bytes]) -> None:
            entries = f'"{config.namespace}".entries'
            stored = await client.fetchval(f"SELECT value FROM {entries} WHERE key = $1", key.encode())
            await client.execute(f"UPDATE {entries} SET value = $1 WHERE key = $2", change(stored), key.encode())

        yield Backend(open_store, elapse, overwrite)


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that speaks the protocol of S3, with credentials for it in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return s3_process


PATIENT: Final = {"timeout_s": 10, "connect_timeout_s": 10}
"""No test of `shared_store` is about a store that is slow: on a busy machine each is."""


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The run config's section of a store that processes can share."""
    if request.param == "sqlite":
        return {"provider": "sqlite", "path": str(tmp_path / "store.db"), "busy_timeout_s": 10}
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return {"provider": "redis", "url": server.url, "prefix": f"shared{next(numbers)}:", **PATIENT}
    postgres: PostgresServer = request.getfixturevalue("postgres_server")
    return {"provider": "postgres", "url": postgres.url, "namespace": f"shared{next(numbers)}", **PATIENT}


KILLS: Final = (
    "test_kills",
    "test_batch_kills",
    "test_poison_work",
    "test_promises_kept",
    "test_session_kills",
    "test_steering_kills",
    "test_steps",
    "test_subagent_kills",
)
"""Modules that kill whole deployments, which takes ten seconds a trial."""
EVERY_STORE: Final = ("test_kv_store_bytes",)
"""Modules about what each store promises."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the kill trials over other stores than SQLite, and each other test over all stores but one, which is
    not the same one for all tests: what a store promises is tested over each of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        store = params.get("shared_store") or params.get("backend")
        module = item.path.stem
        if store is None or module in EVERY_STORE or item.path.parent != Path(__file__).parent:
            continue
        if module in KILLS:
            if store != "sqlite":
                item.add_marker(pytest.mark.long)
        else:
            cases.setdefault(item.nodeid.replace(str(store), ""), []).append(item)
    for name, of_stores in cases.items():
        chosen = zlib.crc32(name.encode()) % len(of_stores)
        for item in of_stores[:chosen] + of_stores[chosen + 1 :]:
            item.add_marker(pytest.mark.long)
