"""RedisMaster: the one server that holds a store: a single server, the master that sentinels name, or the master of the
store's slot in a cluster.

After a fail-over the next call finds the promoted server.
"""

import asyncio
from typing import Any, Final, cast
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio import Redis as Client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.maint_notifications import MaintNotificationsConfig

from apis.errors import ConfigError
from providers.common.net.hosts import first_success, replace_hosts, split_hosts

MOVED_ERRORS: Final = (
    *(MovedError, AskError, TryAgainError, ClusterDownError),
    *(ReadOnlyError, MasterDownError, BusyLoadingError),
)
"""Errors that say that the store is on another server now, or will soon be."""


class RedisMaster:
    """The connection to the master. `sentinel` is the master's name where the url's hosts are sentinels; with `cluster`
    they are nodes of a cluster, and the master is the one of the slot of `prefix`."""

    def __init__(self, url: str, prefix: bytes, *, cluster: bool, sentinel: str, options: dict[str, Any]) -> None:
        self._url = url
        self._prefix = prefix
        self._cluster = cluster
        self._sentinel = sentinel
        self._options = {
            **options,
            "health_check_interval": 15,
            "retry": Retry(NoBackoff(), 0),
            # if enabled, redis-py does not replace a connection that the server has closed or that has an unread
            # answer, and ignores the time-outs above
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        self._client: Client | None = None

    async def connect(self) -> Client:
        """Return the client of the master, after finding out which server that is where it is not known.

        Raises RedisError, OSError or TimeoutError while there is none, and ConfigError where the server is of another
        kind than the config says.
        """
        if self._client is None:
            client = self._open(await self._find_url())
            try:
                await self._check(client)
            except BaseException:
                await _close(client)
                raise
            self._client = client
        return self._client

    async def forget(self) -> None:
        """Close the connection; the next call finds out where the master is."""
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    def _open(self, url: str, **options: object) -> Client:
        try:
            pool = ConnectionPool.from_url(url, **{**self._options, **options})  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
        except ValueError as exc:
            raise ConfigError("The Redis url must be redis://, rediss:// or unix://, with a host and a port.") from exc
        return Client(connection_pool=pool)

    async def _find_url(self) -> str:
        urls = split_hosts(self._url)
        if not self._cluster and not self._sentinel:
            if len(urls) > 1:
                raise ConfigError(
                    "A Redis url with several hosts needs `cluster: true`, or `sentinel` with the name of the master."
                )
            return self._url
        attempts = [asyncio.create_task(self._ask(url)) for url in urls]
        try:
            host, port = (await first_success(attempts, fatal=(ConfigError,))).result()
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
        return replace_hosts(self._url, f"{f'[{host}]' if ':' in host else host}:{port}")

    async def _ask(self, url: str) -> tuple[str, int]:
        """Return the host and port of the master, as the server of `url` knows it."""
        client = self._open(url, **({"username": None, "password": None, "db": 0} if self._sentinel else {}))
        try:
            if self._sentinel:
                return await self._ask_sentinel(client)
            return await self._ask_node(client, url)
        finally:
            closing = asyncio.create_task(_close(client))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:  # another host was faster
                await asyncio.wait({closing})
                raise

    async def _ask_sentinel(self, client: Client) -> tuple[str, int]:
        try:
            address = await _command(client, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._sentinel)
        except ResponseError as exc:
            raise ConfigError("A host of the Redis url is no sentinel, which `sentinel` says.") from exc
        if address is None:
            raise ConfigError(f"The Redis sentinels know no master '{self._sentinel}'.")
        return _decode(address[0]), int(address[1])

    async def _ask_node(self, client: Client, url: str) -> tuple[str, int]:
        slot = key_slot(self._prefix)
        try:
            slots = await _command(client, "CLUSTER", "SLOTS")
        except ResponseError as exc:
            raise ConfigError("This Redis is no cluster: leave `cluster` out.") from exc
        for low, high, (host, port, *_), *_ in slots:
            if low <= slot <= high:
                # a node that does not know its own address says none
                return _decode(host) or urlsplit(url).hostname or "", port
        raise RedisError("the cluster has no node for the slot")

    async def _check(self, client: Client) -> None:
        """Raise where the server is no master, or is of another kind than the config says."""
        info: Any = await client.info("cluster")  # pyright: ignore[reportUnknownMemberType] - as above
        if bool(info.get("cluster_enabled")) is not self._cluster:
            raise ConfigError(
                "This Redis is no cluster: leave `cluster` out."
                if self._cluster
                else "This Redis is a cluster: set `cluster: true`, and all keys of the store are in one slot of it."
            )
        if self._sentinel or self._cluster:
            role = await _command(client, "ROLE")
            if _decode(role[0]) != "master":
                raise RedisError("the server is no master yet")


async def _command(client: Client, *words: str) -> Any:
    return cast("Any", await client.execute_command(*words))  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped


def _decode(text: bytes | str | None) -> str:
    return text.decode() if isinstance(text, bytes) else text or ""


async def _close(client: Client) -> None:
    await client.aclose()
    await client.connection_pool.disconnect()
