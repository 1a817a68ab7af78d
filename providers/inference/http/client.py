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

from providers.inference.http.connection import Answer, HttpFailed

HAPPY_EYEBALLS_DELAY_S: Final = 0.25
_TURNS_TO_CLOSE: Final = 10
"""Of the loop, until every transport has told that it is closed."""


class ConnectTimedOut(HttpFailed):
    """No connection within the limit."""


class Origin(NamedTuple):
    """Where a URL points, without its path."""

    tls: bool
    host: str
    port: int


class HttpClient:
    """Keeps connections that may serve again for `idle_s`; with 0 each serves once. Needs a running loop to be used."""

    def __init__(self, *, idle_s: float = 4) -> None:
        # Given up before uvicorn's five seconds, lest a request meets a connection that is just being closed.
        self._idle_s = idle_s
        self._idle: dict[Origin, dict[Answer, float]] = {}
        self._open: dict[Answer, Origin] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def send(self, method: str, url: str, headers: bytes, body: bytes | None, connect_s: float) -> Answer:
        """Ask, and wait for the answer's status and headers; then it is to be released. `headers` are whole lines.

        Raises ConnectTimedOut, HttpFailed. Bounds no time but `connect_s`, for a new connection.
        """
        origin, host, target = read_url(url)
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        close = b"" if self._idle_s else b"Connection: close\r\n"
        head = b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b%b\r\n" % (method.encode(), target, host, headers, length, close)
        answer = self._kept(origin) or await self._connect(origin, connect_s)
        try:
            await answer.begin(head, body or b"")
            del body
            while not answer.status:
                answer.check()
                await answer.more(math.inf)
        except BaseException:
            answer.abort()
            raise
        return answer

    def release(self, answer: Answer) -> None:
        """Keep its connection where the answer was read to its end; else close it at once."""
        if not (answer.reusable and self._idle_s) or self._closed:
            answer.abort()
            return
        loop = asyncio.get_running_loop()
        answer.rest()
        self._idle.setdefault(self._open[answer], {})[answer] = loop.time()
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._idle_s, self._sweep)

    async def close(self) -> None:
        """Close every connection; who still reads from one gets HttpFailed."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for answer in tuple(self._open):
            answer.abort()
        for _ in range(_TURNS_TO_CLOSE):
            if not self._open:
                break
            await asyncio.sleep(0)

    def _kept(self, origin: Origin) -> Answer | None:
        kept = self._idle.get(origin)
        now = asyncio.get_running_loop().time()
        while kept:
            answer, since = kept.popitem()
            if now - since < self._idle_s and not answer.closing:
                return answer
            answer.abort()
        return None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        old = loop.time() - self._idle_s
        for kept in self._idle.values():
            for answer in [answer for answer, since in kept.items() if since <= old]:
                del kept[answer]
                answer.abort()
        self._idle = {origin: kept for origin, kept in self._idle.items() if kept}
        self._sweeping = loop.call_later(self._idle_s, self._sweep) if self._idle else None

    def _forget(self, answer: Answer) -> None:
        """Its connection is lost."""
        origin = self._open.pop(answer, None)
        if origin is not None:
            self._idle.get(origin, {}).pop(answer, None)

    async def _connect(self, origin: Origin, connect_s: float) -> Answer:
        if self._closed:
            raise HttpFailed("The client is closed.")
        try:
            async with asyncio.timeout(connect_s):
                answer = await self._connected(origin)
        except TimeoutError as exc:
            raise ConnectTimedOut(f"{origin.host} could not be reached in time.") from exc
        except (OSError, ValueError) as exc:  # a ValueError is a host that is no name
            raise HttpFailed(f"{origin.host} could not be reached.") from exc
        self._open[answer] = origin
        return answer

    async def _connected(self, origin: Origin) -> Answer:
        loop = asyncio.get_running_loop()
        if origin.tls and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        sock = await start_connection(found, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, interleave=1, loop=loop)
        try:
            _, answer = await loop.create_connection(
                lambda: Answer(self._forget),
                sock=sock,
                ssl=self._tls if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        except BaseException:
            sock.close()
            raise
        return answer


def headers_to_bytes(headers: Mapping[str, str]) -> bytes:
    """As they are sent. Raises ValueError for what would break out of its line."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any(not line.isprintable() for line in lines):
        raise ValueError("a header holds a character that no header may hold")
    return "".join(f"{line}\r\n" for line in lines).encode()


@functools.lru_cache(maxsize=256)
def read_url(url: str) -> tuple[Origin, bytes, bytes]:
    """Where it points, and what stands in the request for its host and for the rest. Raises ValueError."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host = parts.hostname or ""
    host = host if host.isascii() else host.encode("idna").decode()
    named = f"[{host}]" if ":" in host else host
    named = named if parts.port is None else f"{named}:{parts.port}"
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    target = f"{target}?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else target
    return Origin(tls, host, parts.port or (443 if tls else 80)), named.encode(), target.encode()
