"""The MCP SDK's HTTP through a Fetcher, to one origin; and a watch over what a server sends unasked."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

import anyio
import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from apis.errors import FetchFailed
from apis.fetcher import Fetcher, Incoming, Outgoing

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
_MAX_STREAM_BYTES: Final = 64 * 1024 * 1024
_STREAM_LIFE_S: Final = 3600.0
_GOODBYE_S: Final = 2.0
_SPARE_S: Final = 10.0
_MAX_UNASKED: Final = 2000
_MAX_UNASKED_REQUESTS: Final = 100
_MAX_RESUMED: Final = 5
_OF_ONE_CONNECTION: Final = frozenset({"accept-encoding", "connection", "content-length", "host"})

Transport = Literal["streamable_http", "sse"]
Streams = tuple[Any, Any]
"""What the SDK reads messages from, and what it writes them to."""


@dataclass(slots=True)
class Exchange:
    """What became of the HTTP requests that one call, or one connecting, made. The SDK tells of neither.

    `status` is that of an answer which holds no message of MCP's, `lost` says that the session is no longer known.
    """

    status: int = 0
    failure: str = ""
    lost: bool = False
    resumed: int = 0


EXCHANGE: Final[ContextVar[Exchange]] = ContextVar("mcp_exchange")
"""The SDK sends a message in the context of the task that wrote it."""


class Unasked:
    """Counts what a server sends that answers nothing, since the last call. Only a changed tool list is of use."""

    def __init__(self, on_list_changed: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.on_end = on_end
        self._on_list_changed = on_list_changed
        self._messages = 0
        self._requests = 0

    def begin(self) -> None:
        self._messages = self._requests = 0

    def wants(self, item: SessionMessage | Exception) -> bool:
        """Whether the SDK is to see it. Raises EndOfStream, which ends the session, for a flood."""
        message = item if isinstance(item, Exception) else item.message
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            return True
        self._messages += 1
        asks = isinstance(message, JSONRPCRequest)
        self._requests += asks
        if self._messages > _MAX_UNASKED or self._requests > _MAX_UNASKED_REQUESTS:
            exchange = EXCHANGE.get()
            exchange.failure = "The MCP server sends too much that it was not asked for."
            raise anyio.EndOfStream
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/tools/list_changed":
            self._on_list_changed()
        return asks


class Watched:
    """A stream of the SDK's without what is not wanted."""

    def __init__(self, inner: Any, unasked: Unasked) -> None:
        self._inner = inner
        self._unasked = unasked

    async def receive(self) -> SessionMessage | Exception:
        while True:
            item: SessionMessage | Exception = await self._inner.receive()
            if self._unasked.wants(item):
                return item

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            self._unasked.on_end()
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Wire(httpx2.AsyncBaseTransport):
    """Sends each request of the SDK's through the Fetcher, to the server's own origin and nowhere else.

    `call_timeout_s` is the longest that an answer may be waited for; waiting less is the caller's affair.
    """

    def __init__(self, fetcher: Fetcher, url: str, transport: Transport, call_timeout_s: float) -> None:
        self._fetcher = fetcher
        self._origin = _origin(httpx2.URL(url))
        self._url = url
        self._is_sse = transport == "sse"
        self._timeout_s = call_timeout_s + _SPARE_S
        self._until = anyio.current_time() + _STREAM_LIFE_S / 2
        self._streamed_bytes = 0
        self._on_broken: Callable[[], None] = lambda: None

    @property
    def worn(self) -> bool:
        """Whether the one stream of SSE nears a limit of its own; a new call begins a new session then."""
        if not self._is_sse:
            return False
        return anyio.current_time() > self._until or self._streamed_bytes > _MAX_STREAM_BYTES // 2

    @asynccontextmanager
    async def streams(self, headers: Mapping[str, str], on_broken: Callable[[], None]) -> AsyncGenerator[Streams]:
        """The session's messages, with these headers on every request. Of what breaks it, the SDK may say nothing."""
        self._on_broken = on_broken

        def client(*_: Any, **__: Any) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(
                transport=self, headers=dict(headers), timeout=None, max_redirects=3, trust_env=False
            )

        if self._is_sse:
            async with sse_client(self._url, httpx_client_factory=client) as streams:
                yield streams
        else:
            async with (
                client() as http,
                streamable_http_client(self._url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
            ):
                yield streams

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = EXCHANGE.get()
        exchange.status = 0
        if _origin(request.url) != self._origin:
            return self._failed(exchange, "The MCP server leads to another server, which is refused.")
        if request.method == "GET" and not self._is_sse:
            if "last-event-id" not in request.headers:
                # A stream for what nobody asked for: a server may be without one, and so may we.
                return httpx2.Response(405)
            exchange.resumed += 1
            if exchange.resumed > _MAX_RESUMED:
                return self._failed(exchange, "The MCP server breaks off its answer again and again.")
        opened = AsyncExitStack()
        try:
            incoming = await opened.enter_async_context(self._fetcher.open(await self._outgoing(request)))
        except FetchFailed as exc:
            return self._failed(exchange, exc.message)
        if incoming.status >= 400:
            return await self._refused(exchange, request, incoming, opened)
        counted = self._counted(incoming.chunks, exchange)
        return httpx2.Response(incoming.status, headers=dict(incoming.headers), stream=_Body(counted, opened))

    async def _outgoing(self, request: httpx2.Request) -> Outgoing:
        timeout_s, max_bytes = self._timeout_s, MAX_MESSAGE_BYTES
        if request.method == "DELETE":
            timeout_s = _GOODBYE_S
        elif request.method == "GET" and self._is_sse:
            timeout_s, max_bytes = _STREAM_LIFE_S, _MAX_STREAM_BYTES
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_CONNECTION}
        return Outgoing(
            url=str(request.url),
            method=request.method,
            headers=headers,
            body=await request.aread() or None,
            follow_redirects=False,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
        )

    async def _refused(
        self, exchange: Exchange, request: httpx2.Request, incoming: Incoming, opened: AsyncExitStack
    ) -> httpx2.Response:
        """The SDK tells one status from another only where the body is an error of MCP's."""
        body = bytearray()
        async with opened:
            try:
                async for chunk in incoming.chunks:
                    body += chunk
            except FetchFailed as exc:
                return self._failed(exchange, exc.message)
        if b'"jsonrpc"' not in body:
            exchange.status = incoming.status
            exchange.lost = incoming.status == 404 and "mcp-session-id" in request.headers
        if self._is_sse:
            self._on_broken()
        return httpx2.Response(incoming.status, headers=dict(incoming.headers), content=bytes(body))

    def _failed(self, exchange: Exchange, message: str) -> httpx2.Response:
        exchange.failure = message
        if self._is_sse:
            # The SDK's writer ends at the first failure and leaves its callers waiting.
            self._on_broken()
        return httpx2.Response(502)

    async def _counted(self, chunks: AsyncIterator[bytes], exchange: Exchange) -> AsyncGenerator[bytes]:
        try:
            async for chunk in chunks:
                self._streamed_bytes += len(chunk)
                yield chunk
        except FetchFailed as exc:
            exchange.failure = exc.message
            # Of all that a body may raise, the SDK expects this.
            raise httpx2.StreamError(exc.message) from None


class _Body(httpx2.AsyncByteStream):
    """A body that closes its connection when it is left."""

    def __init__(self, chunks: AsyncGenerator[bytes], opened: AsyncExitStack) -> None:
        self._chunks = chunks
        self._opened = opened

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        await self._chunks.aclose()
        await self._opened.aclose()


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
