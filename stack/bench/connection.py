"""HTTP of the load: one connection per client, parsed in C, with bodies passed on as they arrive.

A general HTTP client costs more CPU per read than the server that is measured; httptools parses here, nothing else.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import orjson

from stack.bench.figures import RequestFailed

_MAX_ERROR_BYTES: Final = 64 * 1024
OnBody = Callable[[bytes], None]


@dataclass(frozen=True)
class LoadTarget:
    """Server of the load: where to connect, and the head that all requests share."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    base_path: str
    head: bytes

    @classmethod
    def parse(cls, url: str, key: str) -> "LoadTarget":
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        host = parts.hostname or "127.0.0.1"
        head = f"host: {parts.netloc.rpartition('@')[2]}\r\nauthorization: Bearer {key}\r\naccept: */*\r\n"
        tls = ssl.create_default_context() if is_tls else None
        return cls(host, parts.port or (443 if is_tls else 80), tls, parts.path, head.encode())

    def encode(self, method: str, path: str, body: bytes) -> bytes:
        """Return a request; `path` follows the base path."""
        length = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body) if body else b""
        return b"%b %b HTTP/1.1\r\n%b%b\r\n%b" % (
            *(method.encode(), (self.base_path + path).encode(), self.head, length, body),
        )


class LoadConnection(asyncio.Protocol):
    """One keep-alive connection with at most one request in progress."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._on_body: OnBody = _ignore
        self._error_body = bytearray()
        self.status = 0
        self.retry_after_s = 0.0
        self.is_open = False

    async def send(self, request: bytes, on_body: OnBody) -> None:
        """Send a request and pass the body of its answer to `on_body` in pieces. Raises RequestFailed for a status of
        400 and more, whose body is not passed on, and for a connection that breaks."""
        assert self._transport is not None
        self.status, self.retry_after_s, self._on_body = 0, 0.0, on_body
        self._error_body.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        if self.status >= 400:
            raise _read_error(self.status, bytes(self._error_body), self.retry_after_s)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(RequestFailed("not HTTP", str(exc)))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end(RequestFailed("connection closed", f"The server closed the connection: {exc or 'end of stream'}."))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status < 400:
            self._on_body(body)
        elif len(self._error_body) < _MAX_ERROR_BYTES:
            self._error_body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, failure: RequestFailed | None) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)


class LoadClient:
    """One client of the load: opens its connection when it needs one. Not for concurrent requests."""

    def __init__(self, target: LoadTarget, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._connection: LoadConnection | None = None

    async def send(self, method: str, path: str, body: bytes, on_body: OnBody) -> None:
        """Send a request and pass the body of its answer on. Raises RequestFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._connection
                if connection is None or not connection.is_open:
                    connection = self._connection = await self._connect()
                await connection.send(self._target.encode(method, path, body), on_body)
        except TimeoutError:
            self.close()
            raise RequestFailed("timeout", f"No complete answer within {self._timeout_s:g} s.") from None
        except asyncio.CancelledError:
            self.close()
            raise

    async def load_json(self, method: str, path: str, body: bytes = b"") -> Any:
        """Send a request and return the JSON of its answer. Raises RequestFailed."""
        parts: list[bytes] = []
        await self.send(method, path, body, parts.append)
        try:
            return orjson.loads(b"".join(parts))
        except orjson.JSONDecodeError as exc:
            raise RequestFailed("not JSON", f"{method} {path}: {exc}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connect(self) -> LoadConnection:
        loop, target = asyncio.get_running_loop(), self._target
        try:
            _, connection = await loop.create_connection(LoadConnection, target.host, target.port, ssl=target.tls)
        except OSError as exc:
            raise RequestFailed("cannot connect", f"No server answers at {target.host}:{target.port}.") from exc
        return connection


def _read_error(status: int, body: bytes, retry_after_s: float) -> RequestFailed:
    code = message = ""
    try:
        error = orjson.loads(body)["error"]
        code, message = str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message = body[:200].decode(errors="replace")
    return RequestFailed(f"{status} {code}".rstrip(), message, retry_after_s)


def _ignore(_body: bytes) -> None:
    """Drop a piece of a body."""
