"""PostgresHosts: the hosts of one url, of which one accepts writes, and a connection to that one.

asyncpg tries the hosts of a url one after the other, within one time-out: a host that hangs would keep it from all
others. Here each host has a url and an attempt of its own, all at the same time.
"""

import asyncio
from collections.abc import Mapping
from typing import Final, TypeAlias

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from providers.common.net.hosts import first_success, split_hosts

LOGIN_ERRORS: Final = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)

PostgresConnection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


class PostgresHosts:
    """The hosts of a url such as postgresql://user:password@a:5432,b:5432/name. `avoid_last` is called when the host of
    the last connection has failed: the next attempt prefers the others, one of which may have been promoted."""

    def __init__(self, url: str, settings: Mapping[str, str]) -> None:
        self._urls = split_hosts(url)
        self._settings = dict(settings)
        self._last_url = ""
        self._avoided_url = ""

    def avoid_last(self) -> None:
        self._avoided_url = self._last_url

    async def connect(self, timeout_s: float) -> PostgresConnection:
        """Return a connection to the first host that accepts writes.

        The host to be avoided is tried when the others have failed, or after a quarter of the time. Raises the error of
        a host: one that refuses the user before one that cannot be reached, which raises TimeoutError or OSError.
        """
        if len(self._urls) == 1:
            return await self._open(self._urls[0], timeout_s)
        others = {self._begin(url, timeout_s): url for url in self._urls if url != self._avoided_url}
        attempts = dict(others)
        if self._avoided_url:
            attempts[asyncio.create_task(self._open_after([*others], timeout_s))] = self._avoided_url
        first = None
        try:
            first = await first_success(attempts, fatal=LOGIN_ERRORS)
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            for attempt in attempts:
                if attempt is not first and not attempt.cancelled() and attempt.exception() is None:
                    attempt.result().terminate()
        self._last_url, self._avoided_url = attempts[first], ""
        return first.result()

    def _begin(self, url: str, timeout_s: float) -> "asyncio.Task[PostgresConnection]":
        return asyncio.create_task(self._open(url, timeout_s))

    async def _open_after(
        self, others: "list[asyncio.Task[PostgresConnection]]", timeout_s: float
    ) -> PostgresConnection:
        await asyncio.wait(others, timeout=timeout_s / 4)
        return await self._open(self._avoided_url, timeout_s * 3 / 4)

    async def _open(self, url: str, timeout_s: float) -> PostgresConnection:
        return await asyncpg.connect(
            url,
            timeout=timeout_s,
            server_settings=self._settings,
            target_session_attrs=SessionAttribute.read_write,
        )
