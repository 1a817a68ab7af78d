"""The SQLite file behind the `SQLite` store: its schema, and what runs on the thread that owns the connection.

Every statement gives up the interpreter lock several times, and while the event loop is busy each return of it may
cost milliseconds. So a batch is a handful of statements however many calls it holds: one for the versions that its
writes expect, one for many rows to put, one for many to delete.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import ABSENT, Entry, Op, Put

APPLICATION_ID = 0x52537461
SCHEMA_VERSION = 1
DAMAGE_CHECK_S = 1.0
WAL_SIZE_LIMIT_BYTES = 64 * 1024 * 1024
MAX_SELECT_KEYS = 256
MAX_PUT_ROWS = 64
SWEEP_ROWS = 500

COUNTER_KEY = b""
"""The row whose version is the last one given out: beside the others, so that reading and writing it costs nothing."""

SCHEMA = (
    "CREATE TABLE entries (key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, version INTEGER NOT NULL, expires REAL)",
    "CREATE INDEX entries_by_expiry ON entries (expires) WHERE expires IS NOT NULL",
    "INSERT INTO entries VALUES (x'', x'', 0, NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
LIVE_CONDITION = "(expires IS NULL OR expires > ?)"

SqliteRow = tuple[bytes, bytes, int, float | None]
_RequestT = TypeVar("_RequestT")
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class SqliteWrite:
    """One call's changes, by encoded key: all or none."""

    ops: dict[bytes, Op]
    durable: bool


class Database:
    """The open file. Everything here blocks, belongs to one thread, and raises sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection, now: Callable[[], float]) -> None:
        self._db = connection
        self._now = now
        self._synchronous = ""

    def prepare(self, max_bytes: int | None, busy_timeout_s: float) -> None:
        """Make an empty file ours, or see that it is. Raises ConfigError and changes nothing when it is not."""
        give_up = time.monotonic() + busy_timeout_s
        while True:
            try:
                return self._prepare(max_bytes)
            except sqlite3.OperationalError as exc:
                # The switch to WAL does not wait for a lock as other statements do: processes starting together meet.
                if not _is_busy(exc) or time.monotonic() > give_up:
                    raise
                time.sleep(0.01)

    def write(self, writes: Sequence[SqliteWrite]) -> list[list[int] | StoreUnavailable | None]:
        """Apply each write or none of it, all in one transaction; one that fails takes no other with it."""
        return self._run_each(self._write, writes)

    def get(self, requests: Sequence[Sequence[bytes]]) -> list[list[Entry | None] | StoreUnavailable]:
        """The entries of each request's keys; a damaged row fails only the requests that want it."""
        return self._run_each(self._get, requests)

    def scan(self, low: bytes, high: bytes, limit: int, *, reverse: bool) -> list[tuple[str, Entry]]:
        """Entries from `low` up to, but without, `high`."""
        chosen = "SELECT key, value, version FROM entries WHERE key >= ? AND key < ? AND " + LIVE_CONDITION  # noqa: S608 - no input in it
        ordered = f"{chosen} ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?"
        rows = self._db.execute(ordered, (low, high, self._now(), limit))
        return [(key.decode(), Entry(value, version)) for key, value, version in rows]

    def sweep(self) -> int:
        """Delete up to SWEEP_ROWS expired rows; returns how many."""
        self._set_synchronous("NORMAL")
        return self._db.execute(
            "DELETE FROM entries WHERE rowid IN (SELECT rowid FROM entries WHERE expires <= ? LIMIT ?)",
            (self._now(), SWEEP_ROWS),
        ).rowcount

    def _prepare(self, max_bytes: int | None) -> None:
        self._db.execute("BEGIN")  # another process may be creating the schema: see none of it or all
        try:
            schema = self._select_int("PRAGMA user_version")
            owner = self._select_int("PRAGMA application_id")
            tables = self._select_int("SELECT count(*) FROM sqlite_schema")
        finally:
            self._end_transaction()
        if schema or owner or tables:
            if owner != APPLICATION_ID:
                raise ConfigError("it belongs to another program; choose another path")
            if schema != SCHEMA_VERSION:
                raise ConfigError(f"its schema is {schema}, this version knows {SCHEMA_VERSION}; upgrade the stack")
            self._check_damage()
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_SIZE_LIMIT_BYTES}")
        if max_bytes is not None:
            self._db.execute(f"PRAGMA max_page_count = {max_bytes // self._select_int('PRAGMA page_size')}")
        if not schema:
            self._create()

    def _select_int(self, statement: str) -> int:
        return int(self._db.execute(statement).fetchone()[0])

    def _create(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if not self._select_int("PRAGMA user_version"):  # another process may have been faster
                for statement in SCHEMA:
                    self._db.execute(statement)
            self._db.execute("COMMIT")
        finally:
            self._end_transaction()

    def _check_damage(self) -> None:
        """Read what can be read in DAMAGE_CHECK_S: a small file whole, of a large one its beginning."""
        alarm = threading.Timer(DAMAGE_CHECK_S, self._db.interrupt)
        alarm.start()
        try:
            verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            verdict = "ok"
        finally:
            alarm.cancel()
            alarm.join()
        if verdict != "ok":
            raise ConfigError(f"it is damaged ({verdict}); restore it from a copy, or choose another path")

    def _set_synchronous(self, level: str) -> None:
        if level != self._synchronous:
            self._db.execute(f"PRAGMA synchronous = {level}")
            self._synchronous = level

    def _end_transaction(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _run_each(
        self, run: Callable[[Sequence[_RequestT]], list[_ResultT]], requests: Sequence[_RequestT]
    ) -> list[_ResultT | StoreUnavailable]:
        try:
            return [*run(requests)]
        except sqlite3.Error as exc:
            if len(requests) == 1 or _is_busy(exc):
                return [sqlite_error_to_unavailable(exc)] * len(requests)
        return [answer for request in requests for answer in self._run_each(run, [request])]

    def _write(self, writes: Sequence[SqliteWrite]) -> list[list[int] | None]:
        self._set_synchronous("FULL" if any(write.durable for write in writes) else "NORMAL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            now = self._now()
            expected = {key for write in writes for key, op in write.ops.items() if op.expect is not None}
            changes = BatchChanges(self._versions([COUNTER_KEY, *expected], now), now)
            answers = [changes.add(write.ops) for write in writes]
            if any(answers):
                self._delete(changes.deletes)
                self._put([*changes.puts.values(), (COUNTER_KEY, b"", changes.version, None)])
                self._db.execute("COMMIT")
        finally:
            self._end_transaction()
        return answers

    def _versions(self, keys: Sequence[bytes], now: float) -> dict[bytes, int]:
        return {key: version for key, _, version in self._select("key, NULL, version", keys, now)}

    def _get(self, requests: Sequence[Sequence[bytes]]) -> list[list[Entry | None]]:
        keys = list({key: None for request in requests for key in request})
        if len(keys) > MAX_SELECT_KEYS:
            self._db.execute("BEGIN")
        try:
            rows = self._select("key, value, version", keys, self._now())
            entries = {key: Entry(value, version) for key, value, version in rows}
        finally:
            self._end_transaction()
        return [[entries.get(key) for key in request] for request in requests]

    def _select(self, columns: str, keys: Sequence[bytes], now: float) -> Iterator[tuple[bytes, bytes, int]]:
        for some in _chunks(keys, MAX_SELECT_KEYS):
            # Filled up to a power of two with NULL, which equals no key: few statements, so they stay prepared.
            marks = 1 << (len(some) - 1).bit_length()
            statement = f"SELECT {columns} FROM entries WHERE key IN ({_placeholders('?', marks)}) AND {LIVE_CONDITION}"  # noqa: S608 - no input in it
            yield from self._db.execute(statement, (*some, *[None] * (marks - len(some)), now))

    def _put(self, rows: Sequence[SqliteRow]) -> None:
        for some in _chunks(rows, MAX_PUT_ROWS):
            self._db.execute(
                f"INSERT INTO entries (key, value, version, expires) VALUES {_placeholders('(?, ?, ?, ?)', len(some))}"  # noqa: S608 - no input in it
                " ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = excluded.version,"
                " expires = excluded.expires",
                [cell for row in some for cell in row],
            )

    def _delete(self, keys: set[bytes]) -> None:
        for some in _chunks(list(keys), MAX_SELECT_KEYS):
            self._db.execute(f"DELETE FROM entries WHERE key IN ({_placeholders('?', len(some))})", some)  # noqa: S608 - no input in it


class BatchChanges:
    """What a batch of writes comes to: each sees those before it. `deletes` first, then `puts`."""

    def __init__(self, versions: dict[bytes, int], now: float) -> None:
        self._versions = versions
        self._now = now
        self.version = versions[COUNTER_KEY]
        self.puts: dict[bytes, SqliteRow] = {}
        self.deletes: set[bytes] = set()

    def add(self, ops: dict[bytes, Op]) -> list[int] | None:
        """The new versions, or None and no change when an `expect` does not hold."""
        for key, op in ops.items():
            if op.expect is not None and op.expect != self._versions.get(key, ABSENT):
                return None
        self.version += 1
        return [self._change(key, op) for key, op in ops.items()]

    def _change(self, key: bytes, op: Op) -> int:
        if isinstance(op, Put):
            expires = None if op.ttl_s is None else self._now + op.ttl_s
            self.puts[key] = (key, op.value, self.version, expires)
            self._versions[key] = self.version
        else:
            self.puts.pop(key, None)
            self.deletes.add(key)
            self._versions.pop(key, None)
        return self._versions.get(key, ABSENT)


def sqlite_error_to_unavailable(exc: sqlite3.Error) -> StoreUnavailable:
    """The error as a client may see it: SQLite's own sentences name no path and no data."""
    error = StoreUnavailable(f"The store cannot do that now: {exc}.")
    error.__cause__ = exc
    return error


def _is_busy(exc: sqlite3.Error) -> bool:
    # Errors that Python's module makes itself have no code, and the low byte is the kind of error.
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _placeholders(placeholder: str, count: int) -> str:
    return ", ".join([placeholder] * count)


_ItemT = TypeVar("_ItemT")


def _chunks(items: Sequence[_ItemT], size: int) -> Iterator[Sequence[_ItemT]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
