"""The schema of the `Postgres` store: its tables, the function that writes, and their creation."""

from typing import Final

import asyncpg

from apis.errors import ConfigError

SCHEMA_VERSION: Final = 3
"""The version of the tables, the checksums and the stored records together."""

# Two writers never change one key at the same time: each takes, in one order, the locks of the stripes of its keys,
# even of absent ones, and only then reads. So it reads committed rows, and writers cannot deadlock.
# `round` orders the calls of a batch that name the same key: a round sees the earlier ones. All rows of a round have
# one version, because no key is in it twice. A sequence never returns a number twice, even after a rollback.
CREATE_SQL: Final = """
DO $create$ BEGIN
  PERFORM pg_advisory_xact_lock(1381192801);
  IF to_regclass('"{schema}".about') IS NOT NULL THEN RETURN; END IF;
  IF to_regnamespace('"{schema}"') IS NULL THEN CREATE SCHEMA "{schema}"; END IF;
  CREATE TABLE "{schema}".entries (
    key bytea PRIMARY KEY, value bytea NOT NULL, version bigint NOT NULL, expires timestamptz
  );
  CREATE INDEX entries_by_expiry ON "{schema}".entries (expires) WHERE expires IS NOT NULL;
  CREATE SEQUENCE "{schema}".versions;
  CREATE FUNCTION "{schema}".write(
    calls int[], rounds int[], keys bytea[], vals bytea[], lives float8[], expects bigint[], durable bool,
    OUT given bigint, OUT refused int[]
  ) RETURNS SETOF record LANGUAGE plpgsql AS $write$
  DECLARE
    moment timestamptz;
  BEGIN
    IF NOT durable THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
    PERFORM pg_advisory_xact_lock('"{schema}".entries'::regclass::oid::int, stripe) FROM (
      SELECT DISTINCT get_byte(sha256(key), 0) & 63 AS stripe FROM unnest(keys) AS key ORDER BY stripe
    ) AS stripes;
    moment := clock_timestamp();
    FOR turn IN 1 .. (SELECT max(round) FROM unnest(rounds) AS round) LOOP
      SELECT coalesce(array_agg(op.call), '{{}}') INTO refused
        FROM unnest(calls, rounds, keys, expects) AS op (call, round, key, expect)
        LEFT JOIN "{schema}".entries AS old
          ON old.key = op.key AND (old.expires IS NULL OR old.expires > moment)
        WHERE op.round = turn AND op.expect <> coalesce(old.version, 0);
      given := nextval('"{schema}".versions');
      INSERT INTO "{schema}".entries (key, value, version, expires)
        SELECT op.key, op.value, given, moment + make_interval(secs => op.life)
        FROM unnest(calls, rounds, keys, vals, lives) AS op (call, round, key, value, life)
        WHERE op.round = turn AND op.value IS NOT NULL AND op.call <> ALL (refused)
        ON CONFLICT (key) DO UPDATE
          SET value = excluded.value, version = excluded.version, expires = excluded.expires;
      DELETE FROM "{schema}".entries AS old
        USING unnest(calls, rounds, keys, vals) AS op (call, round, key, value)
        WHERE old.key = op.key AND op.round = turn AND op.value IS NULL AND op.call <> ALL (refused);
      RETURN NEXT;
    END LOOP;
  END $write$;
  CREATE TABLE "{schema}".about (version int NOT NULL);
  INSERT INTO "{schema}".about VALUES ({version});
END $create$
"""

WRITE_SQL: Final = 'SELECT given, refused FROM "{schema}".write($1, $2, $3, $4, $5, $6, $7)'

GET_SQL: Final = """
SELECT key, value, version FROM "{schema}".entries WHERE key = ANY ($1) AND (expires IS NULL OR expires > now())
"""

SCAN_SQL: Final = """
SELECT key, value, version FROM "{schema}".entries
WHERE key >= $1 AND key < $2 AND (expires IS NULL OR expires > now()) ORDER BY key {order} LIMIT $3
"""

# octet_length does not load the value; the window sums in the order of the index, so nothing is sorted
SCAN_BYTES_SQL: Final = """
SELECT key, value, version FROM (
  SELECT key, value, version, octet_length(value) AS size,
    sum(octet_length(value)) OVER (ORDER BY key {order} ROWS UNBOUNDED PRECEDING) AS total
  FROM "{schema}".entries
  WHERE key >= $1 AND key < $2 AND (expires IS NULL OR expires > now()) ORDER BY key {order} LIMIT $3
) AS page WHERE total - size <= $4 ORDER BY key {order}
"""

MEASURE_SQL: Final = """
SELECT key, octet_length(key) + octet_length(value) FROM "{schema}".entries
WHERE key >= $1 AND key < $2 ORDER BY key LIMIT $3
"""

# rows locked by a writer are skipped: the writer may be renewing them
SWEEP_SQL: Final = """
WITH expired AS MATERIALIZED (
  SELECT key FROM "{schema}".entries WHERE expires <= now() ORDER BY expires LIMIT $1 FOR UPDATE SKIP LOCKED
), deleted AS (
  DELETE FROM "{schema}".entries AS old USING expired WHERE old.key = expired.key RETURNING 1
)
SELECT count(*) FROM deleted
"""

SESSION_SETTINGS: Final = {
    "application_name": "responses-stack",
    "default_transaction_isolation": "read committed",
    "synchronous_commit": "on",
    # a plan is cached while the table grows to millions of rows, so it must never be one for a small table
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_sort": "off",
    "jit": "off",  # the settings above raise the cost of a plan enough to start it, which takes 100 ms
}
"""Server settings of every connection."""


async def prepare_schema(connection: "asyncpg.Connection[asyncpg.Record]", schema: str) -> None:
    """Create the schema if it is absent, or check its version; processes that start together wait for a lock.

    Raises ConfigError if the schema cannot be used, and changes nothing then.
    """
    try:
        version = await _read_version(connection, schema)
        if version is None:
            await connection.execute(CREATE_SQL.format(schema=schema, version=SCHEMA_VERSION))
            version = await _read_version(connection, schema)
    except asyncpg.InsufficientPrivilegeError as exc:
        raise ConfigError(
            f"The url's user may not use or create the PostgreSQL schema {schema!r}: {exc}. Create it for that user."
        ) from exc
    except asyncpg.SyntaxOrAccessError as exc:
        raise ConfigError(
            f"The PostgreSQL schema {schema!r} belongs to another program ({exc}); choose another."
        ) from exc
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"The PostgreSQL schema {schema!r} has version {version}, and this version of the stack knows "
            f"{SCHEMA_VERSION}. Choose another `namespace`, or the version of the stack that wrote it."
        )


async def _read_version(connection: "asyncpg.Connection[asyncpg.Record]", schema: str) -> int | None:
    try:
        return await connection.fetchval(f'SELECT version FROM "{schema}".about')  # noqa: S608 - a checked name
    except asyncpg.UndefinedTableError:
        return None
