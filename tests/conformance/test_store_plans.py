"""No call of a store reads a whole table: the plans of SQLite, and the rows that PostgreSQL says it has read."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import SecretStr

from apis.storage.kv_store import Delete, KVStore, Put
from providers.kv_store.postgres import Postgres
from providers.kv_store.sqlite import SQLite
from tests.support.servers.postgres_server import PostgresServer

ROWS = 3000


async def call_everything(store: KVStore) -> None:
    """Make each kind of call; none of them is about more than 25 rows."""
    await store.write([Put("a/0001", b"new", 60, None), Delete("a/0002"), Put("b", b"", None, 0)])
    assert len(await store.get_many([f"a/{number:04d}" for number in range(1000, 1020)])) == 20
    for bounds in ({"after": "a/1000"}, {"before": "a/1000", "reverse": True}, {"max_bytes": 100_000}):
        options: dict[str, Any] = bounds
        assert len(await store.scan("a/", limit=20, **options)) == 20
    await store.measure("a/29")
    await store.sweep()


async def test_sqlite_searches_with_an_index_for_each_statement(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLite(SQLite.Config(path=str(path), survives_power_loss=False))
    await store.start()
    statements: list[str] = []
    await store.write([Put(f"a/{number:04d}", b"x", 60) for number in range(ROWS)])
    await store._run(lambda database: database._db.set_trace_callback(statements.append))  # pyright: ignore[reportPrivateUsage] - its own statements are looked at
    await call_everything(store)
    await store.close()
    read = [text for text in statements if text.startswith(("SELECT", "DELETE")) and "entries" in text]
    assert {text.split()[0] for text in read} == {"SELECT", "DELETE"}
    with closing(sqlite3.connect(path)) as database:
        for text in read:
            plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {text}")]
            on_table = [step for step in plan if "entries" in step]
            assert on_table, plan
            assert all(step.startswith("SEARCH") for step in on_table), (text, plan)
            assert not any("TEMP B-TREE" in step for step in plan), (text, plan)


async def test_postgres_reads_no_more_rows_than_a_call_is_about(postgres_server: PostgresServer) -> None:
    config = Postgres.Config(
        url=SecretStr(postgres_server.url), namespace=f"plans{time.time_ns()}", timeout_s=10, connect_timeout_s=10
    )
    store = Postgres(config)
    await store.start()
    await store.write([Put(f"a/{number:04d}", b"x", 60) for number in range(ROWS)])
    await store.close()  # which lets the server count what was read
    before = await read_statistics(postgres_server, config.namespace)
    store = Postgres(config)
    await store.start()
    await call_everything(store)
    await store.close()
    after = await read_statistics(postgres_server, config.namespace)
    assert after["seq_tup_read"] == before["seq_tup_read"]
    assert 0 < after["idx_tup_read"] - before["idx_tup_read"] < 300  # of which `measure` reads 100


async def read_statistics(server: PostgresServer, namespace: str) -> "asyncpg.Record":
    """Return the rows that the server says it has read of the table and its indexes, once it has counted all: a session
    adds its counts when it ends."""
    admin = await asyncpg.connect(server.url)
    try:
        async with asyncio.timeout(30):
            while await admin.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'responses-stack'"
            ):
                await admin.execute("SELECT pg_sleep(0.02)")
        rows = await admin.fetch(
            "SELECT t.seq_tup_read, (SELECT sum(i.idx_tup_read) FROM pg_stat_user_indexes AS i"
            " WHERE i.schemaname = t.schemaname) AS idx_tup_read FROM pg_stat_user_tables AS t"
            " WHERE t.schemaname = $1 AND t.relname = 'entries'",
            namespace,
        )
    finally:
        await admin.close()
    [row] = rows
    return row
