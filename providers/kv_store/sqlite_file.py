"""The SQLite file of the `SQLite` store: its schema, and the work of the thread that owns the connection.

Every statement gives up the interpreter lock several times, and while the event loop is busy each return of it may
cost milliseconds. So a batch is a handful of statements however many calls it holds: one for the versions that its
writes expect, one for many rows to put, one for many to delete.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from apis.errors import ConfigError, StackError, StorageCorrupt, StoreUnavailable
from apis.storage.database_file import DatabaseFile
from apis.storage.kv_store import ABSENT, MEASURE_ROWS, Entry, Op, Put
from providers.kv_store.checksum import EntryDecoder, add_checksum
from providers.kv_store.clock import StoreClock
from providers.kv_store.sqlite_checkpoints import WAL_SIZE_LIMIT_BYTES, WalCheckpoints

_log = logging.getLogger(__name__)

APPLICATION_ID = 0x52537461
SCHEMA_VERSION = 3
"""The version of the table, the checksums and the stored records together."""
DAMAGE_CHECK_S = 1.0
WAL_PAGES = 1000
"""A small write that leaves more pages in the log copies them into the file."""
LARGE_WRITE_BYTES = 1024 * 1024
MAX_SELECT_KEYS = 256
MAX_PUT_ROWS = 64
SWEEP_ROWS = 500

COUNTER_KEY = b""
"""The key of the row with the last version, and as its value the state of the clock: in the same table, so that it is
read and written with the other rows."""

SCHEMA = (
    "CREATE TABLE entries (key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, version INTEGER NOT NULL, expires REAL)",
    "CREATE INDEX entries_by_expiry ON entries (expires) WHERE expires IS NOT NULL",
    "INSERT INTO entries VALUES (x'', x'', 0, NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
LIVE_CONDITION = "(expires IS NULL OR expires > ?)"

# without one, the module asks each value for two methods that it does not have, at ten times the cost
sqlite3.register_adapter(bytes, bytes)

SqliteRow = tuple[bytes, bytes, int, float | None]
_RequestT = TypeVar("_RequestT")
_ResultT = TypeVar("_ResultT")


class SqliteWrite(msgspec.Struct, frozen=True):
    """The changes of one call, by encoded key: all or none are applied."""

    ops: dict[bytes, Op]
    durable: bool

    @property
    def is_large(self) -> bool:
        """True if the disk takes so long to write the values that other calls notice it."""
        return sum(len(op.value) for op in self.ops.values() if isinstance(op, Put)) > LARGE_WRITE_BYTES


class Database:
    """The open file. All methods block, run on one thread, and raise sqlite3.Error."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        now: Callable[[], float],
        file: DatabaseFile,
        checkpoints: WalCheckpoints,
    ) -> None:
        self._db = connection
        self._now = now
        self._file = file
        self._checkpoints = checkpoints
        self._synchronous = ""
        self._decoder = EntryDecoder()

    def prepare(self, max_bytes: int | None, busy_timeout_s: float) -> None:
        """Create the schema in an empty file, or check it. Raises ConfigError, and changes nothing then."""
        deadline = time.monotonic() + busy_timeout_s
        while True:
            try:
                self._prepare(max_bytes)
                self._file.remember()
                return
            except sqlite3.OperationalError as exc:
                # the switch to WAL does not wait for locks as other statements do, and processes may start together
                if not _is_busy(exc) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def write(self, writes: Sequence[SqliteWrite]) -> list[list[int] | StackError | None]:
        """Apply each write or none of it, all in one transaction; one that fails does not affect the others."""
        self._file.require(is_write=True)
        return self._run_each(self._write, writes)

    def get(self, requests: Sequence[Sequence[bytes]]) -> list[list[Entry | None] | StackError]:
        """Return the entries of each request's keys; a damaged row fails only the requests that read it."""
        self._file.require(is_write=False)
        return self._run_each(self._get, requests)

    def scan(
        self, key_range: tuple[bytes, bytes], limit: int, *, reverse: bool, max_bytes: int | None
    ) -> list[tuple[str, Entry]]:
        """Return the entries of a range of keys, from the first, inclusive, to the last, exclusive."""
        self._file.require(is_write=False)
        selection = "SELECT key, value, version FROM entries WHERE key >= ? AND key < ? AND " + LIVE_CONDITION  # noqa: S608 - no input in it
        statement = f"{selection} ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?"
        entries: list[tuple[str, Entry]] = []
        size = 0
        rows = self._db.execute(statement, (*key_range, self._now(), limit))
        try:
            for key, stored, version in rows:
                entries.append((key.decode(errors="replace"), self._decoder.decode(key, stored, version)))
                size += len(stored)
                if max_bytes is not None and size > max_bytes:
                    break
        finally:
            rows.close()
        return entries

    def measure(self, low: bytes, high: bytes) -> tuple[int, str]:
        """Return the bytes of the first MEASURE_ROWS entries of the range and the last of their keys, or ''."""
        size, last_key = self._db.execute(
            "SELECT total(size), max(key) FROM (SELECT key, length(key) + length(value) AS size FROM entries"
            " WHERE key >= ? AND key < ? ORDER BY key LIMIT ?)",
            (low, high, MEASURE_ROWS),
        ).fetchone()
        return int(size), "" if last_key is None else last_key.decode()

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
                raise ConfigError(
                    f"its schema is {schema}, and this version of the stack knows {SCHEMA_VERSION}; "
                    "choose another path, or the version of the stack that wrote it"
                )
            self._check_damage()
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_SIZE_LIMIT_BYTES}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        # a transaction stays in memory until it is committed: else a value of many megabytes is written piece by piece
        # while it is inserted, which takes twice as long
        self._db.execute("PRAGMA cache_spill = 0")
        if max_bytes is not None:
            self._db.execute(f"PRAGMA max_page_count = {max_bytes // self._select_int('PRAGMA page_size')}")
        if not schema:
            self._create()
        if isinstance(self._now, StoreClock):
            self._select_state([], self._now())

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
    ) -> list[_ResultT | StackError]:
        try:
            return [*run(requests)]
        except sqlite3.Error as exc:
            if len(requests) == 1 or _is_busy(exc):
                return [sqlite_error_to_stack_error(exc)] * len(requests)
        return [answer for request in requests for answer in self._run_each(run, [request])]

    def _write(self, writes: Sequence[SqliteWrite]) -> list[list[int] | None]:
        self._set_synchronous("FULL" if any(write.durable for write in writes) else "NORMAL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            expected = {key for write in writes for key, op in write.ops.items() if op.expect is not None}
            versions = self._select_state([*expected], self._now())
            changes = BatchChanges(versions, self._now())
            answers = [changes.add(write.ops) for write in writes]
            if any(answers):
                self._delete(changes.deletes)
                self._put([*changes.puts.values(), (COUNTER_KEY, self._clock_state(), changes.version, None)])
                self._commit(sum(len(stored) for _, stored, _, _ in changes.puts.values()))
        finally:
            self._end_transaction()
        return answers

    def _commit(self, value_bytes: int) -> None:
        if value_bytes <= LARGE_WRITE_BYTES or self._checkpoints.is_late():
            self._db.execute("COMMIT")
            return
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        try:
            self._db.execute("COMMIT")
        finally:
            self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        self._checkpoints.begin()

    def _select_state(self, keys: Sequence[bytes], now: float) -> dict[bytes, int]:
        """Return the versions of the keys and of COUNTER_KEY, and adopt the state of the clock."""
        versions: dict[bytes, int] = {}
        columns = "key, CASE WHEN key = x'' THEN value END, version"
        for key, clock_state, version in self._select(columns, [COUNTER_KEY, *keys], now):
            versions[key] = version
            if key == COUNTER_KEY and isinstance(self._now, StoreClock):
                self._now.adopt(clock_state)
        return versions

    def _clock_state(self) -> bytes:
        return self._now.encode() if isinstance(self._now, StoreClock) else b""

    def _get(self, requests: Sequence[Sequence[bytes]]) -> list[list[Entry | None]]:
        keys = list({key: None for request in requests for key in request})
        if len(keys) > MAX_SELECT_KEYS:
            self._db.execute("BEGIN")
        try:
            rows = self._select("key, value, version", keys, self._now())
            entries = {key: self._decoder.decode(key, stored, version) for key, stored, version in rows}
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
            self.puts[key] = (key, add_checksum(key, op.value), self.version, expires)
            self._versions[key] = self.version
        else:
            self.puts.pop(key, None)
            self.deletes.add(key)
            self._versions.pop(key, None)
        return self._versions.get(key, ABSENT)


def sqlite_error_to_stack_error(exc: sqlite3.Error) -> StackError:
    """Return the error for a client: SQLite's own messages contain no path and no data."""
    if _primary_code(exc) == sqlite3.SQLITE_CORRUPT:
        _log.error("the database file is damaged: %s", exc)
        error: StackError = StorageCorrupt(f"The store is damaged: {exc}.")
    else:
        error = StoreUnavailable(f"The store cannot do that now: {exc}.")
    error.__cause__ = exc
    return error


def _is_busy(exc: sqlite3.Error) -> bool:
    return _primary_code(exc) == sqlite3.SQLITE_BUSY


def _primary_code(exc: sqlite3.Error) -> int:
    # errors of Python's own module have no code; the low byte is the primary result code
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF


def _placeholders(placeholder: str, count: int) -> str:
    return ", ".join([placeholder] * count)


_ItemT = TypeVar("_ItemT")


def _chunks(items: Sequence[_ItemT], size: int) -> Iterator[Sequence[_ItemT]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
