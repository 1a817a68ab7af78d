"""The SQLite file of `SQLiteVec`: its schema, and the work of the thread that owns the connection.

Python's own sqlite3 is often built without extensions, so apsw brings an SQLite of its own. Each store has its own
keyword table, so that the rarity of a word does not depend on other stores.
"""

import math
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import apsw
import orjson
import sqlite_vec  # pyright: ignore[reportMissingTypeStubs] - it has no types

from apis.documents.vector_index import AttributeValue, Chunk, ScoredChunk, Search
from apis.errors import ConfigError
from apis.storage.database_file import DatabaseFile
from providers.vector_index.filters import filter_to_sql
from providers.vector_index.tokenize import text_to_words

P = ParamSpec("P")
T = TypeVar("T")
APPLICATION_ID: Final = 0x52537476
SCHEMA_VERSION: Final = 1
_IDENTITY_PREFIX: Final = "~file/"
"""Begins the name of the row that holds the id of the file; no tenant's name begins with a tilde."""
_PROGRESS_INSTRUCTIONS: Final = 10_000
"""Instructions of SQLite's virtual machine between two checks of the deadline."""
_SCHEMA_SQL: Final = f"""
CREATE TABLE stores (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE chunks (
  id INTEGER PRIMARY KEY, store INTEGER NOT NULL, file TEXT NOT NULL, number INTEGER NOT NULL,
  attributes TEXT NOT NULL, vector BLOB NOT NULL, UNIQUE (store, file, number)
);
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_SELECT_SQL: Final = "SELECT c.file, c.number, t.text, c.attributes"


class IndexFile:
    """The open file. All methods block, run on one thread, and raise apsw.Error."""

    def __init__(self, path: str, busy_timeout_s: float, *, is_writer: bool) -> None:
        """Open the file, and create it if it is absent. Raises ConfigError for a file of another program."""
        self._file = DatabaseFile(path)
        if is_writer:  # which is opened first
            self._file.prepare()
        # its type annotations need a newer Python (buffers), and rows are of any type
        self._db: Any = apsw.Connection(path)
        try:
            self._db.set_busy_timeout(round(busy_timeout_s * 1000))
            self._db.enable_load_extension(True)
            self._db.load_extension(sqlite_vec.loadable_path())
            self._db.enable_load_extension(False)
            self._prepare_with_retries(time.monotonic() + busy_timeout_s)
            self._file.remember()
        except BaseException:
            self._db.close()
            raise
        self._is_writer = is_writer
        self._deadline = math.inf
        self._db.set_progress_handler(lambda: time.monotonic() > self._deadline, _PROGRESS_INSTRUCTIONS)

    def close(self) -> None:
        self._db.set_progress_handler(None)
        self._db.close()

    def interrupt(self) -> None:
        """Interrupt the running statement. Any thread may call this method, unlike the others."""
        self._db.interrupt()

    def run_transaction(
        self, deadline: float, work: Callable[Concatenate["IndexFile", P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` in one transaction, which is interrupted and rolled back at `deadline` (monotonic). Raises
        StoreUnavailable if the file was deleted or replaced."""
        self._file.require(is_write=self._is_writer)
        self._deadline = deadline
        # an upgrade from reading to writing would fail after a write of another process
        self._db.execute("BEGIN IMMEDIATE" if self._is_writer else "BEGIN")
        try:
            result = work(self, *args, **kwargs)
            self._db.execute("COMMIT")
            return result
        finally:
            if self._db.in_transaction:
                self._deadline = math.inf
                self._db.execute("ROLLBACK")

    def load_identity(self) -> str:
        """Return the random id of the file, and create it if it has none yet. Copies of the file have it, too."""
        find = "SELECT name FROM stores WHERE name GLOB ?"
        for name in self._db.execute(find, (f"{_IDENTITY_PREFIX}*",)):
            return str(name[0])
        identity = f"{_IDENTITY_PREFIX}{secrets.token_hex(16)}"
        self._db.execute("INSERT INTO stores (name) VALUES (?)", (identity,))
        return identity

    def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
        store_id = self._find_store_id(store)
        if store_id is None:
            store_id = self._query_int("INSERT INTO stores (name) VALUES (?) RETURNING id", store)
            self._db.execute(
                f"CREATE VIRTUAL TABLE words_{store_id} USING fts5(text, content='', contentless_delete=1, "
                "tokenize='porter unicode61 remove_diacritics 2')"
            )
        for chunk in chunks:
            key = (store_id, chunk.file, chunk.number)
            self._delete_chunks(store_id, "SELECT id FROM chunks WHERE store = ? AND file = ? AND number = ?", *key)
            chunk_id = self._query_int(
                "INSERT INTO chunks (store, file, number, attributes, vector) VALUES (?, ?, ?, ?, ?) RETURNING id",
                *key,
                _attributes_to_json(chunk.attributes),
                _vector_to_blob(chunk.vector),
            )
            self._db.execute("INSERT INTO texts VALUES (?, ?)", (chunk_id, chunk.text))
            self._db.execute(f"INSERT INTO words_{store_id} (rowid, text) VALUES (?, ?)", (chunk_id, chunk.text))  # noqa: S608 - a number of ours

    def set_attributes(self, store: str, file: str, attributes: Mapping[str, AttributeValue]) -> None:
        parameters = (_attributes_to_json(attributes), self._find_store_id(store), file)
        self._db.execute("UPDATE chunks SET attributes = ? WHERE store = ? AND file = ?", parameters)

    def delete(self, store: str, file: str | None) -> None:
        store_id = self._find_store_id(store)
        if store_id is None:
            return
        if file is not None:
            self._delete_chunks(store_id, "SELECT id FROM chunks WHERE store = ? AND file = ?", store_id, file)
            return
        self._db.execute("DELETE FROM texts WHERE id IN (SELECT id FROM chunks WHERE store = ?)", (store_id,))
        self._db.execute("DELETE FROM chunks WHERE store = ?", (store_id,))
        self._db.execute("DELETE FROM stores WHERE id = ?", (store_id,))
        self._db.execute(f"DROP TABLE words_{store_id}")

    def search_vector(self, search: Search, vector: Sequence[float]) -> list[ScoredChunk]:
        # SQLite returns NULL as the cosine of a vector of zeros, and 0 is returned
        blob = _vector_to_blob(vector)
        dialect = _SqliteDialect([blob, self._find_store_id(search.store), len(blob)])
        where = _render_where(search, dialect)
        rows = self._db.execute(
            f"{_SELECT_SQL}, s.score FROM (SELECT id, file, number, attributes,"  # noqa: S608 - values are bound
            " coalesce(max(-1.0, 1 - vec_distance_cosine(vector, ?)), 0.0) AS score FROM chunks AS c"
            f" WHERE store = ? AND length(vector) = ?{where}"
            " ORDER BY score DESC, file, number LIMIT ?) AS s"
            " JOIN chunks AS c USING (id) JOIN texts AS t USING (id) ORDER BY s.score DESC, c.file, c.number",
            [*dialect.bound_values, search.limit],
        )
        return [_row_to_hit(*row) for row in rows]

    def search_keywords(self, search: Search, text: str) -> list[ScoredChunk]:
        store_id = self._find_store_id(search.store)
        # quoted words without punctuation contain no query syntax
        query = " OR ".join(f'"{word}"' for word in text_to_words(text))
        if store_id is None or not query:
            return []
        dialect = _SqliteDialect([query])
        where = _render_where(search, dialect)
        rows = self._db.execute(
            f"{_SELECT_SQL}, -bm25(words_{store_id}) AS score FROM words_{store_id} AS w"
            " JOIN chunks AS c ON c.id = w.rowid JOIN texts AS t ON t.id = w.rowid"
            f" WHERE words_{store_id} MATCH ?{where} ORDER BY score DESC, c.file, c.number LIMIT ?",
            [*dialect.bound_values, search.limit],
        )
        return [_row_to_hit(*row) for row in rows]

    def _prepare_with_retries(self, deadline: float) -> None:
        while True:
            try:
                return self._prepare()
            except apsw.BusyError:
                # the switch to WAL does not wait for locks as other statements do, and processes may start together
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _prepare(self) -> None:
        self._db.execute("BEGIN")  # another process may be creating the schema: see none of it or all
        schema = self._query_int("PRAGMA user_version")
        owner = self._query_int("PRAGMA application_id")
        tables = self._query_int("SELECT count(*) FROM sqlite_schema")
        self._db.execute("COMMIT")
        if (schema or owner or tables) and owner != APPLICATION_ID:
            raise ConfigError("it belongs to another program; choose another path")
        if schema not in (0, SCHEMA_VERSION):
            raise ConfigError(f"its schema is {schema}, this version knows {SCHEMA_VERSION}; upgrade the stack")
        self._db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON")
        if not schema:
            self._db.execute("BEGIN IMMEDIATE")
            # another process may have been faster
            if not self._query_int("PRAGMA user_version"):
                self._db.execute(_SCHEMA_SQL)
            self._db.execute("COMMIT")

    def _find_store_id(self, name: str) -> int | None:
        row = self._db.execute("SELECT id FROM stores WHERE name = ?", (name,)).fetchone()
        return None if row is None else int(row[0])

    def _query_int(self, statement: str, *parameters: Any) -> int:
        row = self._db.execute(statement, parameters).fetchone()
        assert row is not None  # a pragma, a count or a RETURNING always has one
        return int(row[0])

    def _delete_chunks(self, store_id: int, select_sql: str, *parameters: Any) -> None:
        for (chunk_id,) in self._db.execute(select_sql, parameters).fetchall():
            self._db.execute(f"DELETE FROM words_{store_id} WHERE rowid = ?", (chunk_id,))  # noqa: S608 - a number of ours
            self._db.execute("DELETE FROM texts WHERE id = ?", (chunk_id,))
            self._db.execute("DELETE FROM chunks WHERE id = ?", (chunk_id,))


class _SqliteDialect:
    """Comparisons of attributes in SQLite; `bound_values` are the parameters so far, in their order."""

    def __init__(self, bound_values: list[Any]) -> None:
        self.bound_values = bound_values

    def render_equality(self, key: str, value: AttributeValue) -> str:
        return self._render_exists(key, _json_types(value), "=", value)

    def render_order(self, key: str, operator: str, value: str | float) -> str:
        return self._render_exists(key, _json_types(value), operator, value)

    def _render_exists(self, key: str, json_types: str, operator: str, value: AttributeValue) -> str:
        self.bound_values += [key, value]
        return (
            "EXISTS (SELECT 1 FROM json_each(c.attributes) AS a"  # noqa: S608 - signs and types are ours, values are bound
            f" WHERE a.key = ? AND a.type IN ({json_types}) AND a.value {operator} ?)"
        )


def _json_types(value: AttributeValue) -> str:
    if isinstance(value, bool):
        return "'true', 'false'"
    return "'text'" if isinstance(value, str) else "'integer', 'real'"


def _render_where(search: Search, dialect: _SqliteDialect) -> str:
    return f" AND {filter_to_sql(search.filters, dialect)}" if search.filters is not None else ""


def _vector_to_blob(vector: Sequence[float]) -> bytes:
    return array("f", vector).tobytes()


def _attributes_to_json(attributes: Mapping[str, AttributeValue]) -> str:
    return orjson.dumps(dict(attributes)).decode()


def _row_to_hit(file: Any, number: Any, text: Any, attributes: Any, score: Any) -> ScoredChunk:
    return ScoredChunk(file, number, text, orjson.loads(attributes), float(score))
