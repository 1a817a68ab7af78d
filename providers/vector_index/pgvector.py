"""PgVector: a VectorIndex in a PostgreSQL database with the extension pgvector."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import asyncpg
import orjson
from pydantic import Field, SecretStr

from apis.documents.vector_index import AttributeValue, Chunk, ScoredChunk, Search, VectorIndex
from apis.errors import ConfigError, StoreUnavailable
from apis.provider import Provider
from providers.common.net.postgres_hosts import PostgresConnection, PostgresHosts
from providers.vector_index.filters import filter_to_sql
from providers.vector_index.tokenize import text_to_words

T = TypeVar("T")
log = logging.getLogger(__name__)

_DATABASE_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
_MAX_CONNECTIONS: Final = 4
_SESSION_SETTINGS: Final = {"search_path": "public", "application_name": "stack"}
_CREATE_SQL: Final = """
DO $create$ BEGIN
  PERFORM pg_advisory_xact_lock(1381192802);
  CREATE SCHEMA IF NOT EXISTS "{schema}";
  CREATE EXTENSION IF NOT EXISTS vector WITH SCHEMA public;
  CREATE TABLE IF NOT EXISTS "{schema}".chunks (
    store text COLLATE "C" NOT NULL, file text COLLATE "C" NOT NULL, number int NOT NULL,
    text text NOT NULL, attributes jsonb NOT NULL, vector public.vector NOT NULL,
    words tsvector GENERATED ALWAYS AS (to_tsvector('english', text)) STORED,
    PRIMARY KEY (store, file, number)
  );
  CREATE INDEX IF NOT EXISTS chunks_by_word ON "{schema}".chunks USING gin (words);
END $create$
"""
_UPSERT_SQL: Final = """
INSERT INTO {chunks} (store, file, number, text, attributes, vector)
VALUES ($1, $2, $3, $4, $5::text::jsonb, $6::text::vector)
ON CONFLICT (store, file, number)
DO UPDATE SET text = excluded.text, attributes = excluded.attributes, vector = excluded.vector
"""
# The length is compared first, because vectors of different lengths have no cosine; that of a vector of zeros is NaN,
# and 0 is returned.
_VECTOR_SEARCH_SQL: Final = """
SELECT file, number, text, attributes::text, CASE WHEN vector_dims(vector) = vector_dims($2::text::vector)
  THEN coalesce(nullif(1 - (vector <=> $2::text::vector), 'NaN'), 0)::float4 END AS score
FROM {chunks} AS c WHERE store = $1 AND vector_dims(vector) = vector_dims($2::text::vector){where}
ORDER BY score DESC, file, number LIMIT {limit}
"""
# PostgreSQL's rank counts how often a word is in a chunk, but not how rare it is in the store.
_KEYWORD_SEARCH_SQL: Final = """
WITH terms AS (
  SELECT DISTINCT to_tsquery('english', word) AS query FROM unnest($2::text[]) AS word
), weighed AS MATERIALIZED (
  SELECT query, ln(1 + (
    (SELECT count(*) FROM {chunks} WHERE store = $1) - matches.chunks + 0.5
  ) / (matches.chunks + 0.5)) AS weight
  FROM terms, LATERAL (SELECT count(*) AS chunks FROM {chunks} WHERE store = $1 AND words @@ query) AS matches
  WHERE numnode(query) > 0 AND matches.chunks > 0
)
SELECT file, number, text, attributes::text, sum(weight * ts_rank(words, query, 1))::float8 AS score
FROM {chunks} AS c JOIN weighed ON words @@ query WHERE store = $1{where}
GROUP BY store, file, number ORDER BY score DESC, file, number LIMIT {limit}
"""


class PgVector(VectorIndex):
    """An index for any number of machines. Searches are exact scans of the store; English words match by their stems.

    The extension must exist, or the database's user must have the right to create it.
    """

    class Config(Provider.Config):
        """`url` is postgresql:// and may hold a password and name several hosts (`@a:5432,b:5432/`): the index uses the
        one that accepts writes, and after a fail-over the one that was promoted. `namespace` is the schema that holds
        all tables.

        `timeout_s` bounds the wait for a connection, and then its use.
        """

        url: SecretStr
        namespace: str = Field(default="stack_vectors", pattern=r"^[a-z_][a-z0-9_]{0,62}$")
        timeout_s: float = Field(default=30.0, gt=0, le=600)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._has_schema = False
        # qualified: sessions opened while the schema is created may lack it in their search path
        self._chunks_table = f'"{config.namespace}".chunks'

    async def start(self) -> None:
        config = self._config
        try:
            hosts = PostgresHosts(config.url.get_secret_value(), _SESSION_SETTINGS)

            async def connect(*_arguments: object, **_options: object) -> PostgresConnection:
                return await hosts.connect(config.timeout_s)

            self._pool = await asyncpg.create_pool(connect=connect, min_size=0, max_size=_MAX_CONNECTIONS)
            async with self._acquire_connection(self._pool) as connection:
                await self._create_schema(connection)
        except (ValueError, asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError):
            # the error may quote parts of the password in the url
            await self.close()
            raise ConfigError("PostgreSQL refuses the url, or it is none: postgresql://user@host/database.") from None
        except (
            asyncpg.FeatureNotSupportedError,
            asyncpg.UndefinedFileError,
            asyncpg.InsufficientPrivilegeError,
        ) as exc:
            await self.close()
            raise ConfigError(
                "The database has no extension 'vector', or its user may not create it, or the schema "
                f"{config.namespace}. Install pgvector and run CREATE EXTENSION vector."
            ) from exc
        except _DATABASE_ERRORS as exc:
            log.warning("PostgreSQL cannot be reached yet (%s); calls fail until it can.", type(exc).__name__)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()

    async def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
        rows = [
            (store, c.file, c.number, c.text, _attributes_to_json(c.attributes), _vector_to_literal(c.vector))
            for c in chunks
        ]
        statement = _UPSERT_SQL.format(chunks=self._chunks_table)
        await self._run_transaction(lambda connection: connection.executemany(statement, rows))

    async def set_attributes(self, store: str, file: str, attributes: Mapping[str, AttributeValue]) -> None:
        statement = f"UPDATE {self._chunks_table} SET attributes = $3::text::jsonb WHERE store = $1 AND file = $2"  # noqa: S608 - a checked name
        await self._run_transaction(
            lambda connection: connection.execute(statement, store, file, _attributes_to_json(attributes))
        )

    async def delete(self, store: str, file: str | None = None) -> None:
        statement = f"DELETE FROM {self._chunks_table} WHERE store = $1 AND ($2::text IS NULL OR file = $2)"  # noqa: S608 - a checked name
        await self._run_transaction(lambda connection: connection.execute(statement, store, file))

    async def search_vector(self, search: Search, vector: Sequence[float]) -> list[ScoredChunk]:
        return await self._search(_VECTOR_SEARCH_SQL, search, _vector_to_literal(vector))

    async def search_keywords(self, search: Search, text: str) -> list[ScoredChunk]:
        return await self._search(_KEYWORD_SEARCH_SQL, search, text_to_words(text))

    async def _search(self, statement: str, search: Search, search_value: object) -> list[ScoredChunk]:
        dialect = _PostgresDialect([search.store, search_value])
        where = "" if search.filters is None else f" AND {filter_to_sql(search.filters, dialect)}"
        query = statement.format(chunks=self._chunks_table, where=where, limit=int(search.limit))
        rows = await self._run_transaction(lambda connection: connection.fetch(query, *dialect.bound_values))
        return [
            ScoredChunk(file, number, text, orjson.loads(attributes), score)
            for file, number, text, attributes, score in rows
        ]

    async def _run_transaction(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self._pool is None:
            raise StoreUnavailable("The vector index is closed.")
        try:
            async with self._acquire_connection(self._pool) as connection:
                if not self._has_schema:
                    await self._create_schema(connection)
                async with connection.transaction():
                    return await work(connection)
        except _DATABASE_ERRORS as exc:
            if isinstance(exc, asyncpg.ReadOnlySQLTransactionError):
                await self._pool.expire_connections()  # their host was the primary before
            # only the type: PostgreSQL's messages may quote stored values
            raise StoreUnavailable(f"The vector index cannot do that now ({type(exc).__name__}).") from exc

    @asynccontextmanager
    async def _acquire_connection(self, pool: "asyncpg.Pool[asyncpg.Record]") -> AsyncGenerator[Any]:
        """Yield a connection that is terminated when it is late or the context fails: a cancel request to a server that
        hangs would hang too."""
        connection: Any = await pool.acquire(timeout=self._config.timeout_s)
        timer = asyncio.get_running_loop().call_later(self._config.timeout_s, connection.terminate)
        try:
            yield connection
        except BaseException:
            connection.terminate()
            raise
        finally:
            timer.cancel()
            await pool.release(connection)

    async def _create_schema(self, connection: Any) -> None:
        await connection.execute(_CREATE_SQL.format(schema=self._config.namespace))
        self._has_schema = True


class _PostgresDialect:
    """Comparisons of attributes in PostgreSQL; `bound_values` are the parameters so far, in their order."""

    def __init__(self, bound_values: list[Any]) -> None:
        self.bound_values = bound_values

    def render_equality(self, key: str, value: AttributeValue) -> str:
        attribute, parameter = self._bind(key, orjson.dumps(value).decode())
        return f"coalesce({attribute} = {parameter}::text::jsonb, FALSE)"

    def render_order(self, key: str, operator: str, value: str | float) -> str:
        """Return a CASE, because only it guarantees the order of evaluation."""
        attribute, parameter = self._bind(key, value)
        kind = "string" if isinstance(value, str) else "number"
        text = attribute.replace("->", "->>")
        compared = (
            f'{text} COLLATE "C" {operator} {parameter}::text'
            if kind == "string"
            else f"({text})::float8 {operator} {parameter}::float8"
        )
        return f"(CASE WHEN jsonb_typeof({attribute}) = '{kind}' THEN {compared} ELSE FALSE END)"

    def _bind(self, key: str, value: object) -> tuple[str, str]:
        self.bound_values += [key, value]
        return f"(c.attributes -> ${len(self.bound_values) - 1}::text)", f"${len(self.bound_values)}"


def _vector_to_literal(vector: Sequence[float]) -> str:
    return f"[{','.join(map(repr, map(float, vector)))}]"


def _attributes_to_json(attributes: Mapping[str, AttributeValue]) -> str:
    return orjson.dumps(dict(attributes)).decode()
