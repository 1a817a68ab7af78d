"""The SQLite file behind `SQLiteVec`: its schema, and what runs on the thread that owns the connection.

Python's own sqlite3 is often built without extensions, so apsw brings an SQLite of its own. Each store has its own
table of words: what is rare in it is not for other stores to say.
"""

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import apsw
import orjson
import sqlite_vec  # pyright: ignore[reportMissingTypeStubs] - it has no types

from apis.errors import ConfigError
from apis.vector_index import Chunk, Found, Search, Value
from providers.vector_index.filters import to_sql
from providers.vector_index.tokenize import words

P = ParamSpec("P")
T = TypeVar("T")
APPLICATION_ID: Final = 0x52537476
SCHEMA_VERSION: Final = 1
_STEPS: Final = 10_000
"""Instructions of SQLite's machine between two looks at the clock."""
_SCHEMA: Final = f"""
CREATE TABLE stores (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE chunks (
  id INTEGER PRIMARY KEY, store INTEGER NOT NULL, file TEXT NOT NULL, number INTEGER NOT NULL,
  attributes TEXT NOT NULL, vector BLOB NOT NULL, UNIQUE (store, file, number)
);
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_CHOSEN: Final = "SELECT c.file, c.number, t.text, c.attributes"


class IndexFile:
    """The open file. Everything here blocks, belongs to one thread, and raises apsw.Error."""

    def __init__(self, path: str, busy_s: float, *, writes: bool) -> None:
        """Open the file, made where it is absent. Raises ConfigError for what is not ours."""
        # Its types say what Python 3.11 cannot: buffers. Rows are of any type anyhow.
        self._db: Any = apsw.Connection(path)
        try:
            self._db.set_busy_timeout(round(busy_s * 1000))
            self._db.enable_load_extension(True)
            self._db.load_extension(sqlite_vec.loadable_path())
            self._db.enable_load_extension(False)
            self._wait_prepare(time.monotonic() + busy_s)
        except BaseException:
            self._db.close()
            raise
        self._writes = writes
        self._until = math.inf
        self._db.set_progress_handler(lambda: time.monotonic() > self._until, _STEPS)

    def close(self) -> None:
        self._db.set_progress_handler(None)
        self._db.close()

    def interrupt(self) -> None:
        """End what runs. The one thing here that any thread may do."""
        self._db.interrupt()

    def within(
        self, until: float, work: Callable[Concatenate["IndexFile", P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do it in one transaction, or nothing: what is not done at `until` (monotonic) is interrupted."""
        self._until = until
        # Never from reading to writing: what another process wrote in between would make that fail.
        self._db.execute("BEGIN IMMEDIATE" if self._writes else "BEGIN")
        try:
            answer = work(self, *args, **kwargs)
            self._db.execute("COMMIT")
            return answer
        finally:
            if self._db.in_transaction:
                self._until = math.inf
                self._db.execute("ROLLBACK")

    def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
        store_id = self._store(store)
        if store_id is None:
            store_id = self._number("INSERT INTO stores (name) VALUES (?) RETURNING id", store)
            self._db.execute(
                f"CREATE VIRTUAL TABLE words_{store_id} USING fts5(text, content='', contentless_delete=1, "
                "tokenize='porter unicode61 remove_diacritics 2')"
            )
        for chunk in chunks:
            same = (store_id, chunk.file, chunk.number)
            self._remove(store_id, "SELECT id FROM chunks WHERE store = ? AND file = ? AND number = ?", *same)
            chunk_id = self._number(
                "INSERT INTO chunks (store, file, number, attributes, vector) VALUES (?, ?, ?, ?, ?) RETURNING id",
                *(*same, _to_json(chunk.attributes), _blob(chunk.vector)),
            )
            self._db.execute("INSERT INTO texts VALUES (?, ?)", (chunk_id, chunk.text))
            self._db.execute(f"INSERT INTO words_{store_id} (rowid, text) VALUES (?, ?)", (chunk_id, chunk.text))  # noqa: S608 - a number of ours

    def set_attributes(self, store: str, file: str, attributes: Mapping[str, Value]) -> None:
        bound = (_to_json(attributes), self._store(store), file)
        self._db.execute("UPDATE chunks SET attributes = ? WHERE store = ? AND file = ?", bound)

    def delete(self, store: str, file: str | None) -> None:
        store_id = self._store(store)
        if store_id is None:
            return
        if file is not None:
            self._remove(store_id, "SELECT id FROM chunks WHERE store = ? AND file = ?", store_id, file)
            return
        self._db.execute("DELETE FROM texts WHERE id IN (SELECT id FROM chunks WHERE store = ?)", (store_id,))
        self._db.execute("DELETE FROM chunks WHERE store = ?", (store_id,))
        self._db.execute("DELETE FROM stores WHERE id = ?", (store_id,))
        self._db.execute(f"DROP TABLE words_{store_id}")

    def search_vector(self, search: Search, vector: Sequence[float]) -> list[Found]:
        """A vector of zeros has no cosine: SQLite says NULL, and 0 is meant."""
        blob = _blob(vector)
        dialect = _Bound([blob, self._store(search.store), len(blob)])
        where = _where(search, dialect)
        rows = self._db.execute(
            f"{_CHOSEN}, s.score FROM (SELECT id, file, number, attributes,"  # noqa: S608 - values are bound
            " coalesce(max(-1.0, 1 - vec_distance_cosine(vector, ?)), 0.0) AS score FROM chunks AS c"
            f" WHERE store = ? AND length(vector) = ?{where}"
            " ORDER BY score DESC, file, number LIMIT ?) AS s"
            " JOIN chunks AS c USING (id) JOIN texts AS t USING (id) ORDER BY s.score DESC, c.file, c.number",
            [*dialect.values, search.limit],
        )
        return [_found(*row) for row in rows]

    def search_keywords(self, search: Search, text: str) -> list[Found]:
        store_id = self._store(search.store)
        # Quoted words without signs in them are no syntax.
        query = " OR ".join(f'"{word}"' for word in words(text))
        if store_id is None or not query:
            return []
        dialect = _Bound([query])
        where = _where(search, dialect)
        rows = self._db.execute(
            f"{_CHOSEN}, -bm25(words_{store_id}) AS score FROM words_{store_id} AS w"
            " JOIN chunks AS c ON c.id = w.rowid JOIN texts AS t ON t.id = w.rowid"
            f" WHERE words_{store_id} MATCH ?{where} ORDER BY score DESC, c.file, c.number LIMIT ?",
            [*dialect.values, search.limit],
        )
        return [_found(*row) for row in rows]

    def _wait_prepare(self, until: float) -> None:
        while True:
            try:
                return self._prepare()
            except apsw.BusyError:
                # The switch to WAL does not wait for a lock as other statements do: processes starting together meet.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _prepare(self) -> None:
        self._db.execute("BEGIN")  # another process may be creating the schema: see none of it or all
        schema = self._number("PRAGMA user_version")
        owner = self._number("PRAGMA application_id")
        tables = self._number("SELECT count(*) FROM sqlite_schema")
        self._db.execute("COMMIT")
        if (schema or owner or tables) and owner != APPLICATION_ID:
            raise ConfigError("it belongs to another program; choose another path")
        if schema not in (0, SCHEMA_VERSION):
            raise ConfigError(f"its schema is {schema}, this version knows {SCHEMA_VERSION}; upgrade the stack")
        self._db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON")
        if not schema:
            self._db.execute("BEGIN IMMEDIATE")
            # Another process may have been faster.
            if not self._number("PRAGMA user_version"):
                self._db.execute(_SCHEMA)
            self._db.execute("COMMIT")

    def _store(self, name: str) -> int | None:
        row = self._db.execute("SELECT id FROM stores WHERE name = ?", (name,)).fetchone()
        return None if row is None else int(row[0])

    def _number(self, statement: str, *bound: Any) -> int:
        row = self._db.execute(statement, bound).fetchone()
        assert row is not None  # a pragma, a count or a RETURNING always has one
        return int(row[0])

    def _remove(self, store_id: int, chosen: str, *bound: Any) -> None:
        for (chunk_id,) in self._db.execute(chosen, bound).fetchall():
            self._db.execute(f"DELETE FROM words_{store_id} WHERE rowid = ?", (chunk_id,))  # noqa: S608 - a number of ours
            self._db.execute("DELETE FROM texts WHERE id = ?", (chunk_id,))
            self._db.execute("DELETE FROM chunks WHERE id = ?", (chunk_id,))


class _Bound:
    """SQLite's way to compare attributes; `values` are those bound so far, in their order."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def equal(self, key: str, value: Value) -> str:
        return self._any(key, _types(value), "=", value)

    def ordered(self, key: str, sign: str, value: str | float) -> str:
        return self._any(key, _types(value), sign, value)

    def _any(self, key: str, types: str, sign: str, value: Value) -> str:
        self.values += [key, value]
        return (
            "EXISTS (SELECT 1 FROM json_each(c.attributes) AS a"  # noqa: S608 - signs and types are ours, values are bound
            f" WHERE a.key = ? AND a.type IN ({types}) AND a.value {sign} ?)"
        )


def _types(value: Value) -> str:
    if isinstance(value, bool):
        return "'true', 'false'"
    return "'text'" if isinstance(value, str) else "'integer', 'real'"


def _where(search: Search, dialect: _Bound) -> str:
    return f" AND {to_sql(search.filters, dialect)}" if search.filters is not None else ""


def _blob(vector: Sequence[float]) -> bytes:
    return array("f", vector).tobytes()


def _to_json(attributes: Mapping[str, Value]) -> str:
    return orjson.dumps(dict(attributes)).decode()


def _found(file: Any, number: Any, text: Any, attributes: Any, score: Any) -> Found:
    return Found(file, number, text, orjson.loads(attributes), float(score))
