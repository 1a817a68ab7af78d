"""Postgres: a KVStore for several machines, in a PostgreSQL database. Waiting calls are sent as one batch."""

import asyncio
from collections.abc import Sequence
from typing import Final

from pydantic import Field, SecretStr

from apis.errors import StoreUnavailable
from apis.storage.kv_store import ABSENT, MEASURE_ROWS, Entry, KVStore, Op, Put
from providers.kv_store.batcher import Batcher, BatchTasks
from providers.kv_store.checks import build_quota, encode_key, encode_ops, scan_range
from providers.kv_store.checksum import EntryDecoder, add_checksum
from providers.kv_store.postgres_schema import (
    GET_SQL,
    MEASURE_SQL,
    SCAN_BYTES_SQL,
    SCAN_SQL,
    SWEEP_SQL,
    WRITE_SQL,
)
from providers.kv_store.postgres_session import PostgresRow, PostgresSession

SWEEP_ROWS: Final = 500

PostgresWrite = tuple[dict[bytes, Op], bool]
"""The changes of one call by encoded key, and True if they are to be durable."""

Statement = tuple[str, *tuple[object, ...]]


class Postgres(KVStore):
    """A store in one PostgreSQL database of version 12 or later. A url may name several hosts (`@a:5432,b:5432/`): the
    store uses the one that accepts writes, and after a fail-over the one that was promoted. What a durable write stored
    outlives a fail-over where the primary replicates synchronously (`synchronous_standby_names`).

    Each process has up to three connections: for reads, for writes, and for scans and sweeps, which may take longer.
    A pooler in between must use session mode. Keys expire by the server's clock.
    """

    spans_machines = True

    class Config(KVStore.Config):
        """`url` is postgresql:// and may hold a password. `namespace` is the database schema that holds all
        tables; it is created if it is absent.

        A call fails `timeout_s` + `connect_timeout_s` after it began.
        """

        url: SecretStr
        namespace: str = Field(default="stack", pattern=r"^[a-z_][a-z0-9_]{0,62}$")
        timeout_s: float = Field(default=1.0, gt=0, le=60)
        connect_timeout_s: float = Field(default=1.0, gt=0, le=60)

    def __init__(self, config: Config) -> None:
        deadline_s = config.timeout_s + config.connect_timeout_s
        self._is_open = False
        self._decoder = EntryDecoder()
        self._read_session, self._write_session, self._scan_session = (
            PostgresSession(
                config.url.get_secret_value(),
                config.namespace,
                timeout_s=config.timeout_s,
                connect_timeout_s=config.connect_timeout_s,
            )
            for _ in range(3)
        )
        self.quota = build_quota(self, config.max_tenant_bytes)
        self._schema = config.namespace
        self._get_sql, self._write_sql, self._measure_sql, self._sweep_sql = (
            statement.format(schema=config.namespace) for statement in (GET_SQL, WRITE_SQL, MEASURE_SQL, SWEEP_SQL)
        )
        self._read_batcher = Batcher(BatchTasks(self._read_batch), timeout_s=deadline_s)
        self._write_batcher = Batcher(BatchTasks(self._write_batch), timeout_s=deadline_s)
        self._scan_batcher = Batcher(BatchTasks(self._scan_batch), timeout_s=deadline_s, max_batch=1)

    async def start(self) -> None:
        await self._read_session.open()
        self._is_open = True

    async def close(self) -> None:
        if self.quota is not None:
            await self.quota.close()
        await asyncio.gather(
            *[batcher.drain() for batcher in (self._read_batcher, self._write_batcher, self._scan_batcher)]
        )
        self._is_open = False
        await asyncio.gather(
            *[session.close() for session in (self._read_session, self._write_session, self._scan_session)]
        )

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        encoded = [encode_key(key) for key in keys]
        return await self._read_batcher.submit(encoded) if encoded else []

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        encoded = encode_ops(ops)
        if not encoded:
            return []
        versions = await self._write_batcher.submit((encoded, durable))
        if versions is not None:
            self.count_write(ops)
        return versions

    async def scan(
        self,
        prefix: str,
        *,
        after: str = "",
        before: str = "",
        limit: int = 1000,
        reverse: bool = False,
        max_bytes: int | None = None,
    ) -> list[tuple[str, Entry]]:
        low, high = scan_range(prefix, after, before, limit)
        sql = (SCAN_SQL if max_bytes is None else SCAN_BYTES_SQL).format(
            schema=self._schema, order="DESC" if reverse else "ASC"
        )
        bound = () if max_bytes is None else (max_bytes,)
        rows = await self._scan_batcher.submit((sql, low, high, limit, *bound))
        return [(key.decode(), self._decoder.decode(key, stored, version)) for key, stored, version in rows]

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        low, high = scan_range(prefix, after, "", MEASURE_ROWS)
        rows = await self._scan_batcher.submit((self._measure_sql, low, high, MEASURE_ROWS))
        return sum(size for _, size in rows), rows[-1][0].decode() if rows else ""

    async def sweep(self) -> int:
        swept = 0
        while (count := (await self._scan_batcher.submit((self._sweep_sql, SWEEP_ROWS)))[0][0]) == SWEEP_ROWS:
            swept += count
        return swept + count

    async def _read_batch(self, requests: Sequence[list[bytes]]) -> list[list[Entry | None]]:
        keys = list({key: None for request in requests for key in request})
        rows = await self._fetch(self._read_session, self._get_sql, keys)
        entries = {key: self._decoder.decode(key, stored, version) for key, stored, version in rows}
        return [[entries.get(key) for key in request] for request in requests]

    async def _write_batch(self, writes: Sequence[PostgresWrite]) -> list[list[int] | None]:
        rounds = _assign_rounds([ops for ops, _ in writes])
        cells = [
            (call, rounds[call], key, *_op_to_cells(key, op))
            for call, (ops, _) in enumerate(writes)
            for key, op in ops.items()
        ]
        durable = any(durable for _, durable in writes)
        rows = await self._fetch(self._write_session, self._write_sql, *zip(*cells, strict=True), durable)
        return [_row_to_versions(call, ops, rows[rounds[call] - 1]) for call, (ops, _) in enumerate(writes)]

    async def _scan_batch(self, statements: Sequence[Statement]) -> list[list[PostgresRow]]:
        return [await self._fetch(self._scan_session, *statement) for statement in statements]

    async def _fetch(self, session: PostgresSession, statement: str, *arguments: object) -> list[PostgresRow]:
        if not self._is_open:
            raise StoreUnavailable("The store is closed.")
        return await session.fetch(statement, *arguments)


def _assign_rounds(calls: Sequence[dict[bytes, Op]]) -> list[int]:
    """Return the round of each call, from 1: after the rounds of all earlier calls that name one of its keys."""
    last: dict[bytes, int] = {}
    rounds: list[int] = []
    for ops in calls:
        rounds.append(1 + max(last.get(key, 0) for key in ops))
        last.update(dict.fromkeys(ops, rounds[-1]))
    return rounds


def _op_to_cells(key: bytes, op: Op) -> tuple[bytes | None, float | None, int | None]:
    return (add_checksum(key, op.value), op.ttl_s, op.expect) if isinstance(op, Put) else (None, None, op.expect)


def _row_to_versions(call: int, ops: dict[bytes, Op], row: PostgresRow) -> list[int] | None:
    version, refused = row
    return None if call in refused else [version if isinstance(op, Put) else ABSENT for op in ops.values()]
