"""The HTTP/1.1 that asking a model's server takes: connections that are used again, a request out, its Answer.

No proxies, redirects, cookies or decompression.
"""

import asyncio
import functools
import math
import socket
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

from aiohappyeyeballs import (
    start_connection,  # pyright: ignore[reportUnknownVariableType]  # of the sockets' addresses, which are of many kinds
)

from providers.inference.http.connection import HttpConnection, HttpError

HAPPY_EYEBALLS_DELAY_S: Final = 0.25
_CLOSE_LOOP_ITERATIONS: Final = 10
"""Iterations of the event loop that `close` waits at most for the transports to report that they are closed."""


class HttpConnectTimeout(HttpError):
    """No connection was established within the limit."""


class Origin(NamedTuple):
    """Scheme, host and port of a URL."""

    tls: bool
    host: str
    port: int


class HttpClient:
    """Connection pool. Idle connections are reused for `idle_s` seconds; with 0 each connection serves one request. A
    running event loop is required."""

    def __init__(self, *, idle_s: float = 4) -> None:
        # Shorter than uvicorn's five seconds, so that a request does not meet a connection that the server is closing.
        self._idle_s = idle_s
        self._idle_connections: dict[Origin, dict[HttpConnection, float]] = {}
        self._origins: dict[HttpConnection, Origin] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._is_closed = False

    async def send(
        self, method: str, url: str, headers: bytes, body: bytes | None, connect_timeout_s: float
    ) -> HttpConnection:
        """Send a request and return its connection once status and headers have arrived; the caller must `release` it.
        `headers` are complete lines.

        Raises HttpConnectTimeout and HttpError. The only time limit is `connect_timeout_s`, for a new connection.
        """
        origin, host, target = parse_url(url)
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        close = b"" if self._idle_s else b"Connection: close\r\n"
        head = b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b%b\r\n" % (method.encode(), target, host, headers, length, close)
        connection = self._take_idle_connection(origin) or await self._connect(origin, connect_timeout_s)
        try:
            await connection.send_request(head, body or b"")
            del body
            while not connection.status:
                connection.raise_if_failed()
                await connection.wait_for_data(math.inf)
        except BaseException:
            connection.abort()
            raise
        return connection

    def release(self, connection: HttpConnection) -> None:
        """Return the connection to the pool if its response was read completely; close it otherwise."""
        if not (connection.is_reusable and self._idle_s) or self._is_closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.reset()
        self._idle_connections.setdefault(self._origins[connection], {})[connection] = loop.time()
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._idle_s, self._close_idle_connections)

    async def close(self) -> None:
        """Close every connection; a caller that still reads from one gets HttpError."""
        self._is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in tuple(self._origins):
            connection.abort()
        for _ in range(_CLOSE_LOOP_ITERATIONS):
            if not self._origins:
                break
            await asyncio.sleep(0)

    def _take_idle_connection(self, origin: Origin) -> HttpConnection | None:
        idle = self._idle_connections.get(origin)
        now = asyncio.get_running_loop().time()
        while idle:
            connection, since = idle.popitem()
            if now - since < self._idle_s and not connection.is_closing:
                return connection
            connection.abort()
        return None

    def _close_idle_connections(self) -> None:
        loop = asyncio.get_running_loop()
        old = loop.time() - self._idle_s
        for idle in self._idle_connections.values():
            for connection in [connection for connection, since in idle.items() if since <= old]:
                del idle[connection]
                connection.abort()
        self._idle_connections = {origin: idle for origin, idle in self._idle_connections.items() if idle}
        self._sweep_timer = (
            loop.call_later(self._idle_s, self._close_idle_connections) if self._idle_connections else None
        )

    def _forget_connection(self, connection: HttpConnection) -> None:
        """Remove a lost connection from the pool."""
        origin = self._origins.pop(connection, None)
        if origin is not None:
            self._idle_connections.get(origin, {}).pop(connection, None)

    async def _connect(self, origin: Origin, connect_timeout_s: float) -> HttpConnection:
        if self._is_closed:
            raise HttpError("The client is closed.")
        try:
            async with asyncio.timeout(connect_timeout_s):
                connection = await self._open_connection(origin)
        except TimeoutError as exc:
            raise HttpConnectTimeout(f"{origin.host} could not be reached in time.") from exc
        except (OSError, ValueError) as exc:  # ValueError: the host is not a valid name
            raise HttpError(f"{origin.host} could not be reached.") from exc
        self._origins[connection] = origin
        return connection

    async def _open_connection(self, origin: Origin) -> HttpConnection:
        loop = asyncio.get_running_loop()
        if origin.tls and self._ssl_context is None:
            self._ssl_context = await asyncio.to_thread(ssl.create_default_context)
        addresses = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        sock = await start_connection(addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, interleave=1, loop=loop)
        try:
            _, connection = await loop.create_connection(
                lambda: HttpConnection(self._forget_connection),
                sock=sock,
                ssl=self._ssl_context if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        except BaseException:
            sock.close()
            raise
        return connection


def headers_to_bytes(headers: Mapping[str, str]) -> bytes:
    """Return the headers as lines. Raises ValueError for characters that would break out of a line."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any(not line.isprintable() for line in lines):
        raise ValueError("a header holds a character that no header may hold")
    return "".join(f"{line}\r\n" for line in lines).encode()


@functools.lru_cache(maxsize=256)
def parse_url(url: str) -> tuple[Origin, bytes, bytes]:
    """Return the origin, the Host header and the request target of a URL. Raises ValueError for an invalid one."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host = parts.hostname or ""
    host = host if host.isascii() else host.encode("idna").decode()
    named = f"[{host}]" if ":" in host else host
    named = named if parts.port is None else f"{named}:{parts.port}"
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    target = f"{target}?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else target
    return Origin(tls, host, parts.port or (443 if tls else 80)), named.encode(), target.encode()
