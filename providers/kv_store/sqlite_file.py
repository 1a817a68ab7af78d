"""The SQLite file of the `SQLite` store: its schema, and the work of the thread that owns the connection.

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
"""The key of the row with the last version: in the same table, so that it is read and written with the other rows."""

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
    """The changes of one call, by encoded key: all or none are applied."""

    ops: dict[bytes, Op]
    durable: bool


class Database:
    """The open file. All methods block, run on one thread, and raise sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection, now: Callable[[], float]) -> None:
        self._db = connection
        self._now = now
        self._synchronous = ""

    def prepare(self, max_bytes: int | None, busy_timeout_s: float) -> None:
        """Create the schema in an empty file, or check it. Raises ConfigError, and changes nothing then."""
        deadline = time.monotonic() + busy_timeout_s
        while True:
            try:
                return self._prepare(max_bytes)
            except sqlite3.OperationalError as exc:
                # the switch to WAL does not wait for locks as other statements do, and processes may start together
                if not _is_busy(exc) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def write(self, writes: Sequence[SqliteWrite]) -> list[list[int] | StoreUnavailable | None]:
        """Apply each write or none of it, all in one transaction; one that fails does not affect the others."""
        return self._run_each(self._write, writes)

    def get(self, requests: Sequence[Sequence[bytes]]) -> list[list[Entry | None] | StoreUnavailable]:
        """Return the entries of each request's keys; a damaged row fails only the requests that read it."""
        return self._run_each(self._get, requests)

    def scan(self, low: bytes, high: bytes, limit: int, *, reverse: bool) -> list[tuple[str, Entry]]:
        """Return the entries from `low`, inclusive, to `high`, exclusive."""
        selection = "SELECT key, value, version FROM entries WHERE key >= ? AND key < ? AND " + LIVE_CONDITION  # noqa: S608 - no input in it
        statement = f"{selection} ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?"
        rows = self._db.execute(statement, (low, high, self._now(), limit))
        return [(key.decode(), Entry(value, version)) for key, value, version in rows]

    def sweep(self) -> int:
        """Delete up to SWEEP_ROWS expired rows; returns their number."""
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
        """Check as much of the file as DAMAGE_CHECK_S allows: all of a small one, the beginning of a large one."""
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
        for batch in _chunks(keys, MAX_SELECT_KEYS):
            # padded to a power of two with NULL, which equals no key: few different statements stay prepared
            marks = 1 << (len(batch) - 1).bit_length()
            statement = f"SELECT {columns} FROM entries WHERE key IN ({_placeholders('?', marks)}) AND {LIVE_CONDITION}"  # noqa: S608 - no input in it
            yield from self._db.execute(statement, (*batch, *[None] * (marks - len(batch)), now))

    def _put(self, rows: Sequence[SqliteRow]) -> None:
        for batch in _chunks(rows, MAX_PUT_ROWS):
            self._db.execute(
                f"INSERT INTO entries (key, value, version, expires) VALUES {_placeholders('(?, ?, ?, ?)', len(batch))}"  # noqa: S608 - no input in it
                " ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = excluded.version,"
                " expires = excluded.expires",
                [cell for row in batch for cell in row],
            )

    def _delete(self, keys: set[bytes]) -> None:
        for batch in _chunks(list(keys), MAX_SELECT_KEYS):
            self._db.execute(f"DELETE FROM entries WHERE key IN ({_placeholders('?', len(batch))})", batch)  # noqa: S608 - no input in it


class BatchChanges:
    """The combined changes of a batch of writes, each of which sees the earlier ones: `deletes` first, then `puts`."""

    def __init__(self, versions: dict[bytes, int], now: float) -> None:
        self._versions = versions
        self._now = now
        self.version = versions[COUNTER_KEY]
        self.puts: dict[bytes, SqliteRow] = {}
        self.deletes: set[bytes] = set()

    def add(self, ops: dict[bytes, Op]) -> list[int] | None:
        """Return the new versions, or None without a change if an `expect` does not hold."""
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
    """Return the error for a client: SQLite's own messages contain no path and no data."""
    error = StoreUnavailable(f"The store cannot do that now: {exc}.")
    error.__cause__ = exc
    return error


def _is_busy(exc: sqlite3.Error) -> bool:
    # errors of Python's own module have no code; the low byte is the primary result code
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _placeholders(placeholder: str, count: int) -> str:
    return ", ".join([placeholder] * count)


_ItemT = TypeVar("_ItemT")


def _chunks(items: Sequence[_ItemT], size: int) -> Iterator[Sequence[_ItemT]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
