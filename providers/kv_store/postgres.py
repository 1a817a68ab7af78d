"""Postgres: a KVStore for several machines, kept by a database. Calls that wait together travel together."""

import asyncio
from collections.abc import Sequence
from typing import Final

from pydantic import Field, SecretStr

from apis.errors import StoreUnavailable
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from providers.kv_store.batcher import Lane
from providers.kv_store.checks import encode_key, encode_ops, scan_range
from providers.kv_store.postgres_schema import GET, SCAN, SWEEP, WRITE
from providers.kv_store.postgres_session import Row, Session

SWEEP_ROWS: Final = 500

Write = tuple[dict[bytes, Op], bool]
"""One call's changes, by encoded key, and whether they are to be durable."""

Statement = tuple[str, *tuple[object, ...]]


class Postgres(KVStore):
    """One PostgreSQL database of version 12 or later; where the url names several hosts, the one that is primary.

    Each process holds up to three connections: for reads, for writes, and for scans and sweeps, which may take longer.
    A pooler in between must lend whole sessions. Keys expire by the server's clock.
    """

    class Config(Provider.Config):
        """`url` is postgresql:// and may hold a password. `namespace` is the database's schema that holds everything;
        it is made where it is absent.

        A call gives up `timeout_s` + `connect_timeout_s` after it was made.
        """

        url: SecretStr
        namespace: str = Field(default="stack", pattern=r"^[a-z_][a-z0-9_]{0,62}$")
        timeout_s: float = Field(default=1.0, gt=0, le=60)
        connect_timeout_s: float = Field(default=1.0, gt=0, le=60)

    def __init__(self, config: Config) -> None:
        deadline_s = config.timeout_s + config.connect_timeout_s
        self._open = False
        self._reader, self._writer, self._walker = (
            Session(
                config.url.get_secret_value(),
                config.namespace,
                timeout_s=config.timeout_s,
                connect_timeout_s=config.connect_timeout_s,
            )
            for _ in range(3)
        )
        self._get, self._scan_up, self._scan_down, self._write, self._sweep = (
            statement.format(schema=config.namespace, order=order)
            for statement, order in ((GET, ""), (SCAN, "ASC"), (SCAN, "DESC"), (WRITE, ""), (SWEEP, ""))
        )
        self._reads = Lane(self._read_batch, timeout_s=deadline_s)
        self._writes = Lane(self._write_batch, timeout_s=deadline_s)
        self._walks = Lane(self._walk, timeout_s=deadline_s, most=1)

    async def start(self) -> None:
        await self._reader.open()
        self._open = True

    async def close(self) -> None:
        await asyncio.gather(*[lane.finish() for lane in (self._reads, self._writes, self._walks)])
        self._open = False
        await asyncio.gather(*[session.close() for session in (self._reader, self._writer, self._walker)])

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        encoded = [encode_key(key) for key in keys]
        return await self._reads.submit(encoded) if encoded else []

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        encoded = encode_ops(ops)
        return await self._writes.submit((encoded, durable)) if encoded else []

    async def scan(
        self, prefix: str, *, after: str = "", before: str = "", limit: int = 1000, reverse: bool = False
    ) -> list[tuple[str, Entry]]:
        low, high = scan_range(prefix, after, before, limit)
        rows = await self._walks.submit((self._scan_down if reverse else self._scan_up, low, high, limit))
        return [(key.decode(), Entry(value, version)) for key, value, version in rows]

    async def sweep(self) -> int:
        swept = 0
        while (some := (await self._walks.submit((self._sweep, SWEEP_ROWS)))[0][0]) == SWEEP_ROWS:
            swept += some
        return swept + some

    async def _read_batch(self, requests: Sequence[list[bytes]]) -> list[list[Entry | None]]:
        keys = list({key: None for request in requests for key in request})
        rows = await self._fetch(self._reader, self._get, keys)
        entries = {key: Entry(value, version) for key, value, version in rows}
        return [[entries.get(key) for key in request] for request in requests]

    async def _write_batch(self, writes: Sequence[Write]) -> list[list[int] | None]:
        rounds = _rounds([ops for ops, _ in writes])
        cells = [
            (call, rounds[call], key, *_op_to_cells(op))
            for call, (ops, _) in enumerate(writes)
            for key, op in ops.items()
        ]
        durable = any(durable for _, durable in writes)
        answers = await self._fetch(self._writer, self._write, *zip(*cells, strict=True), durable)
        return [_versions(call, ops, answers[rounds[call] - 1]) for call, (ops, _) in enumerate(writes)]

    async def _walk(self, statements: Sequence[Statement]) -> list[list[Row]]:
        return [await self._fetch(self._walker, *statement) for statement in statements]

    async def _fetch(self, session: Session, statement: str, *arguments: object) -> list[Row]:
        if not self._open:
            raise StoreUnavailable("The store is closed.")
        return await session.fetch(statement, *arguments)


def _rounds(calls: Sequence[dict[bytes, Op]]) -> list[int]:
    """The round of each call, from 1: after the rounds of all calls before it that name one of its keys."""
    last: dict[bytes, int] = {}
    rounds: list[int] = []
    for ops in calls:
        rounds.append(1 + max(last.get(key, 0) for key in ops))
        last.update(dict.fromkeys(ops, rounds[-1]))
    return rounds


def _op_to_cells(op: Op) -> tuple[bytes | None, float | None, int | None]:
    return (op.value, op.ttl_s, op.expect) if isinstance(op, Put) else (None, None, op.expect)


def _versions(call: int, ops: dict[bytes, Op], answer: Row) -> list[int] | None:
    version, refused = answer
    return None if call in refused else [version if isinstance(op, Put) else ABSENT for op in ops.values()]
