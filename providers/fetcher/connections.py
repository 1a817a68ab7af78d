"""HTTP/1.1 for the fetcher: httpcore2 over a network backend that connects to checked addresses only.

The backend's connections come from `CheckedHosts`; TLS is verified against the name. httpcore2 is used without httpx2
around it: a URL is parsed once, in `targets.py`, and sent as parsed.

Imported at the first fetch, because httpcore2 costs about 20 ms of start-up.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final

import httpcore2

from apis.errors import FetchFailed
from providers.common.net.http.inflater import INFLATED_ENCODINGS, EncodingError, inflate_chunks
from providers.fetcher.limits import FetchLimits, too_large_error
from providers.fetcher.targets import Target

HostConnect = Callable[[str, int], Awaitable[socket.socket]]
"""Takes a host and a port; returns a connection to it."""
_MAX_HEADERS_BYTES: Final = 64 * 1024
"""Response headers above this size fail the fetch. httpcore2 itself stops buffering headers at 100 KiB."""
_HEADERS_STARTED: Final = "http11.send_request_headers.started"
"""httpcore2's trace event after a connection, TLS included, is established."""
_BODY_METHODS: Final = frozenset({"PATCH", "POST", "PUT"})


class Connections:
    """Connections that `connect` opens, each for one request; at most `limit` at a time.

    `connect_timeout_s` bounds waiting for a free connection, resolving, connecting and the TLS handshake together.
    """

    def __init__(
        self,
        connect: HostConnect,
        context: ssl.SSLContext,
        *,
        limit: int,
        connect_timeout_s: float,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=limit,
            max_keepalive_connections=0,
            network_backend=_CheckedBackend(connect),
        )

    async def request(
        self, method: str, target: Target, headers: Mapping[str, str], body: bytes | None, limits: FetchLimits
    ) -> "HopResponse":
        """Send one request and return its response once its headers are read. Raises FetchFailed."""
        fields = {
            "host": target.authority,
            **headers,
            "accept-encoding": INFLATED_ENCODINGS,
            "connection": "close",
        }
        if body is not None or method in _BODY_METHODS:
            fields["content-length"] = str(len(body or b""))
        with _fetch_errors(limits):
            async with asyncio.timeout(self._connect_timeout_s) as connect_timeout:

                async def end_connect_timeout(event: str, info: Mapping[str, Any]) -> None:
                    if event == _HEADERS_STARTED:
                        connect_timeout.reschedule(None)

                request = httpcore2.Request(
                    method,
                    httpcore2.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path),
                    headers=[(name.encode(), value.strip().encode()) for name, value in fields.items()],
                    content=body,
                    extensions={"trace": end_connect_timeout},
                )
                response = await self._pool.handle_async_request(request)
        if sum(len(name) + len(value) for name, value in response.headers) > _MAX_HEADERS_BYTES:
            await response.aclose()
            raise _protocol_error()
        return HopResponse(response, limits)

    async def close(self) -> None:
        await self._pool.aclose()


class HopResponse:
    """Response of one hop: status and headers at once, the body on demand. The caller closes it."""

    def __init__(self, response: httpcore2.Response, limits: FetchLimits) -> None:
        self._response = response
        self._limits = limits
        self._headers: dict[str, str] = {}
        for name_bytes, value_bytes in response.headers:
            name, value = name_bytes.decode("ascii").lower(), value_bytes.decode(errors="surrogateescape")
            self._headers[name] = f"{self._headers[name]}, {value}" if name in self._headers else value
        self.status = response.status
        self.location = self._headers.get("location")

    def headers(self) -> dict[str, str]:
        """Return the headers, without cookies and without those that describe the body's transfer and compression."""
        hidden = ("set-cookie", "content-encoding", "content-length", "transfer-encoding")
        return {
            name: value.encode(errors="replace").decode() for name, value in self._headers.items() if name not in hidden
        }

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the decompressed body. Raises FetchFailed."""
        inflated_bytes = 0
        encoding = self._headers.get("content-encoding", "")
        async with aclosing(self._raw_chunks()) as raw_chunks, aclosing(inflate_chunks(raw_chunks, encoding)) as chunks:
            try:
                async for chunk in chunks:
                    inflated_bytes += len(chunk)
                    if inflated_bytes > self._limits.inflated_bytes:
                        raise too_large_error(self._limits.inflated_bytes)
                    yield chunk
            except EncodingError as exc:
                raise FetchFailed(str(exc)) from None

    async def _raw_chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it was sent."""
        limits = self._limits
        raw_bytes = 0
        loop = asyncio.get_running_loop()
        if int(self._headers.get("content-length", "0").partition(",")[0]) > limits.raw_bytes:
            raise too_large_error(limits.raw_bytes)
        async with aclosing(self._response.aiter_stream()) as raw_chunks:
            while True:
                now = loop.time()
                if now > limits.deadline:  # a read of buffered data never waits, so that no timeout would end it
                    raise limits.timeout_error()
                with _fetch_errors(limits):
                    async with asyncio.timeout_at(min(limits.deadline, now + limits.read_timeout_s)):
                        data = await anext(raw_chunks, None)
                if data is None:
                    return
                raw_bytes += len(data)
                if raw_bytes > limits.raw_bytes:
                    raise too_large_error(limits.raw_bytes)
                yield data

    async def close(self) -> None:
        await self._response.aclose()


@contextmanager
def _fetch_errors(limits: FetchLimits) -> Generator[None]:
    """Translate what can fail into FetchFailed. `from None`: causes carry the sent headers, which may hold secrets."""
    try:
        yield
    except TimeoutError:
        raise limits.timeout_error() from None
    except ssl.SSLError:
        raise FetchFailed("The server's certificate is not one that can be trusted.") from None
    except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError, ValueError):
        raise _protocol_error() from None


def _protocol_error() -> FetchFailed:
    return FetchFailed("The server could not be reached, or did not answer in proper HTTP.")


class _CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Network backend whose connections `connect` opens, at checked addresses."""

    def __init__(self, connect: HostConnect) -> None:
        self._connect = connect

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore2's; `Connections` bounds the time
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> "_SocketStream":
        return _SocketStream(*await asyncio.open_connection(sock=await self._connect(host, port)))


class _SocketStream(httpcore2.AsyncNetworkStream):
    """One connection over asyncio's streams. Ignores timeouts, since the callers bound the time themselves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as above
        return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        self._writer.write(buffer)
        try:
            await self._writer.drain()
        except OSError as exc:
            # httpcore2 then still reads the response of a server that closed its side early.
            raise httpcore2.WriteError from exc

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
    ) -> "_SocketStream":
        try:
            await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except BaseException:
            self._writer.transport.abort()
            raise
        return self
