"""HTTP/1.1 client of the token path: a connection pool over httptools, with proxies.

It exists because it is fast: reading one chunk of a stream takes 1.2 us, against 10.1 with httpx and 2.3 with aiohttp
when chunks arrive as fast as possible, and 31 us against 93 and 36 when they arrive at the pace of a model. Requests
that are not on the token path use httpx2. Redirects and cookies are not supported.
"""

import asyncio
import math
import re
import socket
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import Final

from aiohappyeyeballs import (
    start_connection,  # pyright: ignore[reportUnknownVariableType]  # of the sockets' addresses, which are of many kinds
)

from apis.certificates import trusted_certificates
from providers.common.net.http.connection import HttpConnection, HttpError
from providers.common.net.http.route import Origin, Proxy, ProxyError, ProxyRules, authority, parse_url

HAPPY_EYEBALLS_DELAY_S: Final = 0.25
_CLOSE_LOOP_ITERATIONS: Final = 10
"""Iterations of the event loop that `close` waits at most for the transports to report that they are closed."""
MAX_TUNNEL_RESPONSE_BYTES: Final = 64 * 1024
"""Bytes of a proxy's response to CONNECT; a longer one is an error."""
_TUNNEL_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class HttpConnectError(HttpError):
    """No connection could be opened."""


class HttpConnectTimeout(HttpConnectError):
    """No connection was established within the limit."""


class HttpClient:
    """Connection pool. Idle connections are reused for `idle_s` seconds; with 0 each connection serves one request. A
    running event loop is required. Connections are direct unless `proxies` name a proxy for the origin."""

    def __init__(self, *, idle_s: float = 4, proxies: ProxyRules | None = None) -> None:
        # Shorter than uvicorn's five seconds, so that a request does not meet a connection that the server is closing.
        self._idle_s = idle_s
        self._proxy_rules = proxies or ProxyRules()
        self._proxies: dict[Origin, Proxy | None] = {}
        self._idle_connections: dict[Origin, dict[HttpConnection, float]] = {}
        self._origins: dict[HttpConnection, Origin] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._is_closed = False

    async def send(
        self,
        method: str,
        url: str,
        headers: bytes,
        body: bytes | None,
        connect_timeout_s: float,
        deadline: float = math.inf,
    ) -> HttpConnection:
        """Send a request and return its connection once status and headers have arrived; the caller must `release` it.
        `headers` are complete lines.

        Raises HttpConnectTimeout where a new connection takes longer than `connect_timeout_s`, TimeoutError at the
        loop time `deadline`, ProxyError and HttpError.
        """
        origin, host, target = parse_url(url)
        proxy = None if origin.tls else self.find_proxy(origin)
        if proxy is not None:  # plain HTTP is forwarded by the proxy, TLS goes through a tunnel
            target, headers = b"http://%b%b" % (host, target), proxy.authorization + headers
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        close = b"" if self._idle_s else b"Connection: close\r\n"
        head = b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b%b\r\n" % (method.encode(), target, host, headers, length, close)
        connection = self._take_idle_connection(origin)
        if connection is None:
            connection = await self._connect(origin, connect_timeout_s, deadline)
        try:
            await connection.send_request(head, body or b"", deadline)
            del body
            while not connection.status:
                connection.raise_if_failed()
                await connection.wait_for_data(deadline)
            if proxy is not None and connection.status == 407:
                raise ProxyError.for_status(proxy, 407)
        except BaseException:
            connection.abort()
            raise
        return connection

    def find_proxy(self, origin: Origin) -> Proxy | None:
        """Return the proxy for an origin; None for a direct connection. Raises ValueError for a proxy URL that is not
        valid."""
        if origin not in self._proxies:
            self._proxies[origin] = self._proxy_rules.find_proxy(origin)
        return self._proxies[origin]

    def release(self, connection: HttpConnection) -> None:
        """Return the connection to the pool if its response was read completely; close it otherwise."""
        if not (connection.is_reusable and self._idle_s) or self._is_closed:
            connection.abort()
            return
        connection.reset()
        self._idle_connections.setdefault(self._origins[connection], {})[connection] = monotonic()
        if self._sweep_timer is None:
            loop = asyncio.get_running_loop()
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
        now = monotonic()
        while idle:
            connection, since = idle.popitem()
            if now - since < self._idle_s and not connection.is_closing:
                return connection
            connection.abort()
        return None

    def _close_idle_connections(self) -> None:
        loop = asyncio.get_running_loop()
        old = monotonic() - self._idle_s
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

    async def _connect(self, origin: Origin, connect_timeout_s: float, deadline: float) -> HttpConnection:
        if self._is_closed:
            raise HttpError("The client is closed.")
        connect_by = monotonic() + connect_timeout_s
        try:
            # one timer for both limits: a cancelled one takes 300 bytes until it would have ended
            async with asyncio.timeout_at(min(connect_by, deadline)):
                connection = await self._open_connection(origin)
        except TimeoutError as exc:
            if deadline <= connect_by:  # not by the clock: a timer of the loop may end a little early
                raise
            raise HttpConnectTimeout(f"{origin.host} could not be reached in time.") from exc
        except ProxyError:
            raise
        except (OSError, ValueError) as exc:  # ValueError: the host is not a valid name
            raise HttpConnectError(f"{origin.host} could not be reached.") from exc
        self._origins[connection] = origin
        return connection

    async def _open_connection(self, origin: Origin) -> HttpConnection:
        loop = asyncio.get_running_loop()
        if origin.tls and self._ssl_context is None:
            self._ssl_context = await asyncio.to_thread(trusted_certificates)
        proxy = self.find_proxy(origin)
        sock = await _open_socket(origin) if proxy is None else await _open_proxy_socket(proxy)
        try:
            if proxy is not None and origin.tls:
                await _open_tunnel(sock, proxy, origin)
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


async def _open_socket(origin: Origin) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port, kind, protocol = origin.host, origin.port, socket.SOCK_STREAM, socket.IPPROTO_TCP
    try:
        # an address needs no look-up, for which the loop would wake a thread
        addresses = socket.getaddrinfo(host, port, type=kind, proto=protocol, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        addresses = await loop.getaddrinfo(host, port, type=kind, proto=protocol)
    return await start_connection(addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, interleave=1, loop=loop)


async def _open_proxy_socket(proxy: Proxy) -> socket.socket:
    try:
        return await _open_socket(proxy.origin)
    except (OSError, ValueError) as exc:
        raise ProxyError(proxy, "could not be reached") from exc


async def _open_tunnel(sock: socket.socket, proxy: Proxy, origin: Origin) -> None:
    """Request a tunnel to the origin (RFC 9110, section 9.3.6). Raises ProxyError."""
    loop, target, response = asyncio.get_running_loop(), authority(origin).encode(), b""
    head = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (target, target, proxy.authorization)
    try:
        await loop.sock_sendall(sock, head)
        while b"\r\n\r\n" not in response and len(response) < MAX_TUNNEL_RESPONSE_BYTES:
            data = await loop.sock_recv(sock, MAX_TUNNEL_RESPONSE_BYTES)
            if not data:
                break
            response += data
    except OSError as exc:
        raise ProxyError(proxy, "closed the connection") from exc
    status = _TUNNEL_STATUS.match(response)
    if status is not None and status[1][:1] != b"2":
        raise ProxyError.for_status(proxy, int(status[1]))
    # the upstream sends nothing before its client does, so bytes after the head are not from it
    if status is None or not response.endswith(b"\r\n\r\n"):
        raise ProxyError(proxy, "sent an invalid response" if response else "closed the connection")


def headers_to_bytes(headers: Mapping[str, str]) -> bytes:
    """Return the headers as lines. Raises ValueError for characters that would break out of a line."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any(not line.isprintable() for line in lines):
        raise ValueError("a header holds a character that no header may hold")
    return "".join(f"{line}\r\n" for line in lines).encode()
