"""Session: one connection to PostgreSQL, opened when it is needed and terminated when a call is late."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import asyncpg

from apis.errors import ConfigError, StoreUnavailable
from providers.common.net.postgres_hosts import LOGIN_ERRORS, PostgresHosts
from providers.kv_store.postgres_schema import SESSION_SETTINGS, prepare_schema

log = logging.getLogger(__name__)

CONNECTION_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)

PostgresRow = asyncpg.Record


class PostgresSession:
    """A connection for one call at a time. A failed call is not repeated, and the next one opens a new connection.

    A late or cancelled call terminates the connection without a cancel request, which a server that hangs would not
    process: the server ends a statement by itself after `timeout_s`, and the outcome is unknown.
    """

    def __init__(self, url: str, schema: str, *, timeout_s: float, connect_timeout_s: float) -> None:
        self._schema = schema
        self._connect_timeout_s = connect_timeout_s
        self._deadline_s = timeout_s + connect_timeout_s
        statement_timeout = f"{max(1, round(timeout_s * 1000))}ms"
        self._hosts = PostgresHosts(url, {**SESSION_SETTINGS, "statement_timeout": statement_timeout})
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None

    async def open(self) -> None:
        """Connect, unless the server is unreachable now: then a later call does. Raises ConfigError."""
        try:
            await self._ensure_connection(self._deadline())
        except ValueError:
            # the error may quote parts of the password in the url
            raise ConfigError(
                "The PostgreSQL url must be postgresql://, with a host and a port that are such."
            ) from None
        except LOGIN_ERRORS as exc:
            raise ConfigError(
                f"PostgreSQL refuses the url's user, password or database: {type(exc).__name__}."
            ) from exc
        except CONNECTION_ERRORS as exc:
            log.warning("PostgreSQL cannot be reached yet (%s); calls fail until it can.", type(exc).__name__)

    async def close(self) -> None:
        """Close the connection, within `connect_timeout_s`. A later call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=self._connect_timeout_s)
            except CONNECTION_ERRORS:
                connection.terminate()

    async def fetch(self, statement: str, *arguments: object) -> list[PostgresRow]:
        """Return the rows of `statement`, executed in a transaction of its own.

        Raises StoreUnavailable, at most `timeout_s` + `connect_timeout_s` after the call.
        """
        deadline = self._deadline()
        try:
            connection = await self._ensure_connection(deadline)
            with _terminate_at(deadline, connection):
                return await connection.fetch(statement, *arguments)
        except ConfigError as exc:
            raise StoreUnavailable(str(exc)) from exc
        except CONNECTION_ERRORS as exc:
            self._hosts.avoid_last()
            # only the type: PostgreSQL's messages may quote stored values
            raise StoreUnavailable(f"PostgreSQL cannot do that now ({type(exc).__name__}).") from exc

    async def _ensure_connection(self, deadline: float) -> "asyncpg.Connection[asyncpg.Record]":
        if self._connection is None or self._connection.is_closed():
            connection = await self._hosts.connect(self._connect_timeout_s)
            with _terminate_at(deadline, connection):
                await prepare_schema(connection, self._schema)
            self._connection = connection
        return self._connection

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._deadline_s


@contextmanager
def _terminate_at(deadline: float, connection: "asyncpg.Connection[asyncpg.Record]") -> Generator[None]:
    """Terminate the connection if the context does not end by `deadline`, or ends with an exception."""
    timer = asyncio.get_running_loop().call_at(deadline, connection.terminate)
    try:
        yield
    except BaseException:
        connection.terminate()
        raise
    finally:
        timer.cancel()
