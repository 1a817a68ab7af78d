"""Failures that only a database server has: hanging, dying, others' locks, many processes at once, foreign schemas."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress

import asyncpg
import pytest

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import ABSENT, Delete, Put
from providers.common.net.hosts import split_hosts
from providers.kv_store.postgres import Postgres
from tests.support.servers.forked_process import forked_process
from tests.support.servers.postgres_server import PASSWORD, PostgresServer

BOUND_S = 30
PROCESSES = 3
INCREMENTS = 40

COUNTERS = f"""
import asyncio, sys
from apis.storage.kv_store import ABSENT, Put
from providers.common.net.hosts import split_hosts
from providers.kv_store.postgres import Postgres

async def increment(store, names):
    while True:
        entries = await store.get_many(names)
        ops = [
            Put(name, b"%d" % (int(entry.value) + 1 if entry else 1), expect=entry.version if entry else ABSENT)
            for name, entry in zip(names, entries)
        ]
        if await store.write(ops, durable=False) is not None:
            return

async def main():
    store = Postgres(Postgres.Config(url=sys.argv[1], namespace="counters", timeout_s=20))
    await store.start()
    names = [["a", "b"], ["b", "a"], ["b", "c"], ["c", "a"]]
    await asyncio.gather(*[increment(store, names[i % 4]) for i in range({INCREMENTS})])
    await store.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresServer]:
    with PostgresServer() as cluster:
        yield cluster


@pytest.fixture
def server(cluster: PostgresServer) -> PostgresServer:
    cluster.resume()
    cluster.start()
    return cluster


@pytest.fixture
async def admin(server: PostgresServer) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """A connection of its own to the store's server, which holds nothing of earlier tests."""
    admin = await asyncpg.connect(server.url)
    await admin.execute("DROP SCHEMA IF EXISTS stack CASCADE")
    yield admin
    admin.terminate()


@pytest.fixture
async def store(server: PostgresServer, admin: object) -> AsyncIterator[Postgres]:
    store = Postgres(config(server.url))
    await store.start()
    yield store
    await store.close()


def config(url: str, **others: object) -> Postgres.Config:
    return Postgres.Config.model_validate({"url": url, **others})


async def fails_within(seconds: float, store: Postgres) -> None:
    """Assert that every kind of call is unavailable in time, and that no error shows the password."""
    began = time.monotonic()
    calls = [call for _ in range(30) for call in (store.get("a"), store.put("a", b""), store.scan(""), store.sweep())]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - began < seconds
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert not any(PASSWORD in f"{answer} {answer.__cause__!r}" for answer in answers if isinstance(answer, Exception))


async def test_a_hung_server_is_unavailable_in_time_and_its_late_answers_reach_no_call(
    server: PostgresServer, store: Postgres
) -> None:
    keys = [f"k{i}" for i in range(100)]
    await store.write([Put(key, key.encode()) for key in keys])
    server.pause()
    await fails_within(2.5, store)
    await fails_within(2.5, store)  # and so is one that cannot be connected to
    server.resume()
    async with asyncio.timeout(5):
        entries = await asyncio.gather(*[store.get(key) for key in keys])
    assert [entry and entry.value for entry in entries] == [key.encode() for key in keys]


async def test_a_host_that_hangs_keeps_the_store_from_no_other_host(
    server: PostgresServer, admin: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """A url may name several hosts, as for a fail-over: the one that accepts writes is used, wherever it is."""
    [url] = split_hosts(server.url)
    working = url.rpartition("@")[2].partition("/")[0]

    def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hung.append(writer)

    hung: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as listener:
        hanging = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for hosts in (f"{hanging},{working}", f"{working},{hanging}"):
            store = Postgres(config(server.url.replace(working, hosts)))
            await store.start()
            version = await store.put("a", b"")
            await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            for _ in range(
                2
            ):  # reads and writes have a connection each, and a call or the loop notices that it is gone
                with suppress(StoreUnavailable):
                    version = await store.put("a", b"")
                with suppress(StoreUnavailable):
                    await store.get("a")
            entry = await store.get("a")
            assert entry is not None
            assert entry.version == version
            assert await store.put("a", b"") > version
            await store.close()
        assert hung
        for writer in hung:
            writer.close()


def test_a_url_names_several_hosts() -> None:
    assert split_hosts("postgresql://u:p%40@a:1,[::1]:2,c/db?sslmode=disable") == [
        f"postgresql://u:p%40@{host}/db?sslmode=disable" for host in ("a:1", "[::1]:2", "c")
    ]
    assert split_hosts("postgresql://a?x=1,2") == ["postgresql://a?x=1,2"]


async def test_closing_does_not_wait_for_a_hung_server(server: PostgresServer, admin: object) -> None:
    store = Postgres(config(server.url))
    await store.start()
    await asyncio.gather(store.put("a", b""), store.get("a"), store.scan(""))
    server.pause()
    call = asyncio.create_task(store.put("b", b""))
    await asyncio.sleep(0)
    began = time.monotonic()
    await store.close()
    assert time.monotonic() - began < 4
    with pytest.raises(StoreUnavailable):
        await call


async def test_a_killed_server_is_unavailable_at_once_and_then_as_before(
    server: PostgresServer, store: Postgres
) -> None:
    version = await store.put("kept", b"1")
    server.kill()
    await fails_within(1, store)
    await asyncio.to_thread(server.start)
    entry = await store.get("kept")
    assert entry is not None
    assert entry.version == version
    assert await store.put("kept", b"2") > version


async def test_a_server_that_came_back_unnoticed_is_as_before(server: PostgresServer, store: Postgres) -> None:
    await asyncio.gather(store.put("a", b"1"), store.get("a"), store.scan(""))
    server.kill()
    await asyncio.to_thread(server.start)
    assert await store.get("a") is not None
    assert len(await store.scan("")) == 1
    assert await store.write([Delete("a")]) == [ABSENT]


async def test_a_store_starts_before_its_server(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    store = Postgres(config(server.url))
    with caplog.at_level(logging.WARNING):
        await store.start()
    assert "cannot be reached yet" in caplog.text
    assert PASSWORD not in caplog.text
    await fails_within(1, store)
    await asyncio.to_thread(server.start)
    assert await store.put("a", b"1") > 0
    await store.close()


async def test_processes_that_start_at_once_lose_no_increment_and_never_lock_each_other_out(
    server: PostgresServer, admin: object
) -> None:
    async with AsyncExitStack() as running, asyncio.timeout(BOUND_S):
        begun = [running.enter_async_context(forked_process(COUNTERS, server.url, stderr=2)) for _ in range(PROCESSES)]
        processes = await asyncio.gather(*begun)
        codes = await asyncio.gather(*[process.wait() for process in processes])
    assert codes == [0] * PROCESSES
    store = Postgres(config(server.url, namespace="counters"))
    await store.start()
    records = {key: int(entry.value) for key, entry in await store.scan("")}
    await store.close()
    quarter = PROCESSES * INCREMENTS // 4
    assert records == {"a": 3 * quarter, "b": 3 * quarter, "c": 2 * quarter}


async def test_calls_of_one_batch_see_those_before_them(store: Postgres) -> None:
    [first] = await store.write([Put("a", b"0")]) or []
    answers = await asyncio.gather(
        store.write([Put("a", b"1", expect=first), Put("b", b"1")]),
        store.write([Put("a", b"2", expect=first)]),
        store.write([Delete("b"), Put("c", b"3")]),
        store.write([Put("b", b"4", expect=ABSENT)]),
        store.write([Delete("c", expect=ABSENT)]),
    )
    assert [answer is not None for answer in answers] == [True, False, True, True, False]
    assert [(key, entry.value) for key, entry in await store.scan("")] == [("a", b"1"), ("b", b"4"), ("c", b"3")]


async def test_a_lock_held_too_long_is_unavailable_and_then_forgotten(
    store: Postgres, admin: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    version = await store.put("a", b"1")
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute("SELECT FROM stack.entries FOR UPDATE")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.put("a", b"2")
    assert time.monotonic() - began < 2.5
    entry = await store.get("a")
    await transaction.rollback()
    assert entry is not None
    assert entry.value == b"1"
    assert await store.put("a", b"2") > version


async def test_a_sweep_passes_over_what_a_writer_holds(
    store: Postgres, admin: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    await store.write([Put("held", b"", ttl_s=1e-6), Put("free", b"", ttl_s=1e-6), Put("lives", b"")])
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute("SELECT FROM stack.entries WHERE key = 'held' FOR UPDATE")
    assert await store.sweep() == 1
    await transaction.rollback()
    assert await store.sweep() == 1


async def test_only_durable_writes_wait_for_the_disk(
    store: Postgres, admin: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    await admin.execute("""
        CREATE TABLE stack.seen (setting text);
        CREATE FUNCTION stack.see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO stack.seen VALUES (current_setting('synchronous_commit'));
            RETURN NULL;
        END $$;
        CREATE TRIGGER see AFTER INSERT ON stack.entries EXECUTE FUNCTION stack.see();
    """)
    await store.put("a", b"", durable=False)
    await store.put("b", b"")
    await store.put("c", b"", durable=False)
    assert [row[0] for row in await admin.fetch("SELECT setting FROM stack.seen")] == ["off", "on", "off"]


@pytest.mark.parametrize(("old", "new"), [(PASSWORD, "wr0ng"), ("/postgres", "/nowhere"), ("stack:", "nobody:")])
async def test_what_the_server_refuses_is_a_config_error(server: PostgresServer, old: str, new: str) -> None:
    url = server.url.replace(old, new)
    with pytest.raises(ConfigError, match="refuses") as caught:
        await Postgres(config(url)).start()
    assert PASSWORD not in str(caught.value)
    assert "wr0ng" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://:s3cret@host", "nonsense", "postgresql://:s3cret@host:s3cret/db"])
async def test_a_bad_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://") as caught:
        await Postgres(config(url)).start()
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__!r}"


@pytest.mark.parametrize("namespace", ["", "Stack", 'a"b', "a b", "x" * 64])
def test_a_namespace_is_a_plain_name(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        config("postgresql://host/db", namespace=namespace)


@pytest.mark.parametrize("version", [2, 99])
async def test_a_schema_of_another_version_is_refused(
    server: PostgresServer, admin: "asyncpg.Connection[asyncpg.Record]", version: int
) -> None:
    store = Postgres(config(server.url))
    await store.start()
    await admin.execute("UPDATE stack.about SET version = $1", version)
    with pytest.raises(StoreUnavailable, match=f"version {version}"):
        await store.put("a", b"")  # the first call of a connection that is opened now
    await store.close()
    with pytest.raises(ConfigError, match=f"version {version}"):
        await Postgres(config(server.url)).start()


@pytest.mark.parametrize("table", ["about (name text)", "entries (name text)"])
async def test_the_schema_of_another_program_is_left_alone(
    server: PostgresServer, admin: "asyncpg.Connection[asyncpg.Record]", table: str
) -> None:
    await admin.execute(f"CREATE SCHEMA stack CREATE TABLE {table}")
    with pytest.raises(ConfigError, match="another program"):
        await Postgres(config(server.url)).start()
    assert await admin.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'stack'") == 1


async def test_a_user_without_rights_needs_a_schema_that_is_its_own(
    server: PostgresServer, admin: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    await admin.execute("DROP ROLE IF EXISTS guest")
    await admin.execute(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    store = Postgres(config(server.url.replace("//stack", "//guest")))
    with pytest.raises(ConfigError, match="may not use or create"):
        await store.start()
    await admin.execute("CREATE SCHEMA stack AUTHORIZATION guest")
    await store.start()
    assert await store.put("a", b"1") > 0
    await store.close()
    await admin.execute("DROP OWNED BY guest; DROP ROLE guest")


async def test_closing_what_never_started_is_fine() -> None:
    store = Postgres(config("postgresql://127.0.0.1:1/db"))
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("a")
