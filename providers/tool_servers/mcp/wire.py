"""The MCP SDK's HTTP transport over a Fetcher, to one origin; and the bound on unsolicited messages."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote

import anyio
import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from apis.documents.fetcher import Fetcher, FetchRequest, FetchStream
from apis.errors import FetchFailed, FetchRefused
from providers.tool_servers.mcp.answers import AnswerMender
from providers.tool_servers.mcp.lost_sessions import means_lost_session, names_lost_session
from providers.tool_servers.mcp.messages import BOM, MAX_MESSAGE_BYTES, EventMender, mend_events, mend_messages

_OK: Final = 200
_SESSION_ID: Final = "mcp-session-id"
_MAX_STREAM_BYTES: Final = 64 * 1024 * 1024
_MAX_STREAM_S: Final = 3600.0
_DELETE_TIMEOUT_S: Final = 2.0
_TIMEOUT_MARGIN_S: Final = 10.0
_MAX_UNSOLICITED_MESSAGES: Final = 2000
_MAX_UNSOLICITED_REQUESTS: Final = 100
_MAX_RESUMES: Final = 5
_MAX_STREAM_OPENS: Final = 3
"""Times that the stream of unsolicited messages of a session is opened in a row, where it ends at once."""
_LONG_STREAM_S: Final = 10.0
_MAX_ERROR_BYTES: Final = 64 * 1024
_EVENT_STREAM_STARTS: Final = (b"event:", b"data:", b"id:", b"retry:", b":")
_HOP_BY_HOP_HEADERS: Final = frozenset({"accept-encoding", "connection", "content-length", "host"})

Transport = Literal["streamable_http", "sse"]
SessionStreams = tuple[Any, Any]
"""The stream that the SDK reads messages from, and the one that it writes to."""


@dataclass(slots=True)
class HttpExchange:
    """Outcome of the HTTP requests of one call or one connect, which the SDK does not report.

    `status` is the HTTP status of a response without an MCP message; `is_session_lost` means that the server does not
    know the session any more; `is_streamed` that it answers with an event stream; `request_id` is the JSON-RPC id of
    the newest request that was sent; `is_connect` marks the exchange in which a session opens.
    """

    status: int = 0
    failure: str = ""
    is_session_lost: bool = False
    is_streamed: bool = False
    is_connect: bool = False
    resume_count: int = 0
    request_id: str = ""


CURRENT_EXCHANGE: Final[ContextVar[HttpExchange]] = ContextVar("mcp_exchange")
"""Set per call: the SDK sends a message in the context of the task that wrote it."""


class UnsolicitedFilter:
    """Counts a server's messages since the last call that answer no request; only a changed tool list is used."""

    def __init__(self, on_list_changed: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.on_end = on_end
        self._on_list_changed = on_list_changed
        self._message_count = 0
        self._request_count = 0

    def reset_counts(self) -> None:
        self._message_count = self._request_count = 0

    def accepts(self, item: SessionMessage | Exception) -> bool:
        """Return True where the SDK must see the message. Raises EndOfStream, which ends the session, for a flood."""
        message = item if isinstance(item, Exception) else item.message
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            return True
        self._message_count += 1
        is_request = isinstance(message, JSONRPCRequest)
        self._request_count += is_request
        if self._message_count > _MAX_UNSOLICITED_MESSAGES or self._request_count > _MAX_UNSOLICITED_REQUESTS:
            exchange = CURRENT_EXCHANGE.get()
            exchange.failure = "The MCP server sends too much that it was not asked for."
            raise anyio.EndOfStream
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/tools/list_changed":
            self._on_list_changed()
        return is_request


class _WrappedStream:
    """A stream of the SDK, closed with this one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class ReceivedStream(_WrappedStream):
    """A stream of the SDK that yields only messages that the filter accepts, with answers mended."""

    def __init__(self, stream: Any, unsolicited_filter: UnsolicitedFilter, mender: AnswerMender) -> None:
        super().__init__(stream)
        self._unsolicited_filter = unsolicited_filter
        self._mender = mender

    async def receive(self) -> SessionMessage | Exception:
        while True:
            item: SessionMessage | Exception = await self._stream.receive()
            if self._unsolicited_filter.accepts(item):
                if not isinstance(item, Exception):
                    self._mender.mend(item.message)
                return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            self._unsolicited_filter.on_end()
            raise StopAsyncIteration from None


class SentStream(_WrappedStream):
    """A stream of the SDK that notes the id of each request that is written to it, which the SDK does not report."""

    def __init__(self, stream: Any, mender: AnswerMender) -> None:
        super().__init__(stream)
        self._mender = mender

    async def send(self, item: SessionMessage) -> None:
        if isinstance(item.message, JSONRPCRequest):
            CURRENT_EXCHANGE.get().request_id = str(item.message.id)
            self._mender.note_request(item.message)
        await self._stream.send(item)


class FetcherTransport(httpx2.AsyncBaseTransport):
    """Sends each request of the SDK through the Fetcher, to the server's own origin only.

    `call_timeout_s` is the upper bound of a response's time; callers may wait less. `allow_private` is for a server of
    the run config that may have an address in a private network.
    """

    def __init__(
        self, fetcher: Fetcher, url: str, transport: Transport, call_timeout_s: float, *, allow_private: bool = False
    ) -> None:
        self._fetcher = fetcher
        self._allow_private = allow_private
        self._origin = _url_origin(httpx2.URL(url))
        self._url = url
        self._is_sse = transport == "sse"
        self._timeout_s = call_timeout_s + _TIMEOUT_MARGIN_S
        self._renew_at = anyio.current_time() + _MAX_STREAM_S / 2
        self._session_ids: dict[str, str] = {}
        self._streamed_bytes = 0
        self._stream_opens = 0
        self._stream_opened_at = 0.0
        self._on_broken: Callable[[], None] = lambda: None

    @property
    def is_expiring(self) -> bool:
        """True when the one stream of an SSE session is halfway to its limit; the next call opens a new session."""
        if not self._is_sse:
            return False
        return anyio.current_time() > self._renew_at or self._streamed_bytes > _MAX_STREAM_BYTES // 2

    @asynccontextmanager
    async def open_streams(
        self, headers: Mapping[str, str], on_broken: Callable[[], None]
    ) -> AsyncGenerator[SessionStreams]:
        """Yield the session's streams, whose requests all carry `headers`. `on_broken` is called for failures that the
        SDK may not report."""
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
        exchange = CURRENT_EXCHANGE.get()
        if request.method == "GET" and not self._is_sse:
            if exchange.is_connect:
                return await self._open_unsolicited(request)
            exchange.resume_count += 1
            if exchange.resume_count > _MAX_RESUMES:
                return self._fail_exchange(exchange, "The MCP server breaks off its answer again and again.")
        return await self._send(request, exchange)

    async def _send(self, request: httpx2.Request, exchange: HttpExchange) -> httpx2.Response:
        exchange.status = 0
        if _url_origin(request.url) != self._origin:
            return self._fail_exchange(exchange, "The MCP server leads to another server, which is refused.")
        exit_stack = AsyncExitStack()
        outgoing = await self._build_outgoing(request)
        try:
            incoming = await exit_stack.enter_async_context(self._fetcher.open(outgoing))
            if incoming.status >= 400:
                return await self._relay_error_response(exchange, request, incoming, exit_stack)
            headers = self._mask_session_id(dict(incoming.headers))
            exchange.is_streamed = headers.get("content-type", "").lower().startswith("text/event-stream")
            if (
                request.method == "POST"
                and not self._is_sse
                and incoming.status // 100 == 2
                and not exchange.is_streamed
            ):
                async with exit_stack:
                    body = b"".join([chunk async for chunk in incoming.chunks])
                return self._relay_message(exchange, request, incoming.status, headers, body)
        except FetchFailed as exc:
            return self._fail_exchange(exchange, _with_remedy(exc))
        chunks = incoming.chunks
        if exchange.is_streamed:
            chunks = mend_events(chunks, EventMender(_parse_request(outgoing.body), has_names=self._is_sse))
        body = _ResponseBody(self._count_bytes(chunks, exchange), exit_stack)
        return httpx2.Response(incoming.status, headers=headers, stream=body)

    async def _open_unsolicited(self, request: httpx2.Request) -> httpx2.Response:
        """Open the stream by which a server may ask its client something outside of a call's own stream: the SDK then
        declines, and the call does not wait for an answer that never comes. Nothing depends on the stream."""
        now = anyio.current_time()
        self._stream_opens = 0 if now > self._stream_opened_at + _LONG_STREAM_S else self._stream_opens
        self._stream_opens, self._stream_opened_at = self._stream_opens + 1, now
        if self._stream_opens > _MAX_STREAM_OPENS:
            return httpx2.Response(405)
        return await self._send(request, HttpExchange())

    def _relay_message(
        self, exchange: HttpExchange, request: httpx2.Request, status: int, headers: dict[str, str], body: bytes
    ) -> httpx2.Response:
        """Return a whole response, with the type that its first bytes show, and the status of one that has a body. An
        answer that names no request, or another, is that to this one: the SDK would wait for its own."""
        message = _parse_request(request.content)
        start = body.removeprefix(BOM).lstrip()[:8]
        if start.startswith((b"{", b"[")) and "id" in message and (messages := mend_messages(body, message)):
            # several are an event stream, as the answer to one request
            is_one = len(messages) == 1
            status, headers["content-type"] = _OK, "application/json" if is_one else "text/event-stream"
            body = messages[0] if is_one else b"".join(b"data: %b\n\n" % each for each in messages)
        elif start.startswith(_EVENT_STREAM_STARTS):
            status, headers["content-type"] = _OK, "text/event-stream"
            mender = EventMender(message)
            body = mender.feed(body) + mender.end()
        elif names_lost_session(body[:_MAX_ERROR_BYTES].decode(errors="replace")):
            exchange.is_session_lost = True
        return httpx2.Response(status, headers=headers, content=body)

    def _mask_session_id(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers with a session id of ASCII characters, which the SDK demands; it is sent as it was."""
        session_id = headers.get(_SESSION_ID, "")
        if not session_id.isascii():
            headers[_SESSION_ID] = quote(session_id)
            self._session_ids[headers[_SESSION_ID]] = session_id
        return headers

    async def _build_outgoing(self, request: httpx2.Request) -> FetchRequest:
        timeout_s, max_bytes = self._timeout_s, MAX_MESSAGE_BYTES
        if request.method == "DELETE":
            timeout_s = _DELETE_TIMEOUT_S
        elif request.method == "GET" and (self._is_sse or CURRENT_EXCHANGE.get().is_connect):
            timeout_s, max_bytes = _MAX_STREAM_S, _MAX_STREAM_BYTES
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP_HEADERS}
        if _SESSION_ID in headers:
            headers[_SESSION_ID] = self._session_ids.get(headers[_SESSION_ID], headers[_SESSION_ID])
        return FetchRequest(
            url=str(request.url),
            method=request.method,
            headers=headers,
            body=await request.aread() or None,
            follow_redirects=False,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            allow_private=self._allow_private,
        )

    async def _relay_error_response(
        self, exchange: HttpExchange, request: httpx2.Request, incoming: FetchStream, exit_stack: AsyncExitStack
    ) -> httpx2.Response:
        """Record the status, which the SDK reports only where the body is an MCP error, and return the response."""
        body = bytearray()
        async with exit_stack:
            with suppress(FetchFailed):  # the status says enough
                async for chunk in incoming.chunks:
                    body += chunk
                    if len(body) > _MAX_ERROR_BYTES:
                        break
        if b'"jsonrpc"' not in body:
            exchange.status = incoming.status
        has_session = self._is_sse or _SESSION_ID in request.headers
        exchange.is_session_lost = means_lost_session(
            incoming.status, body.decode(errors="replace"), has_session=has_session
        )
        if self._is_sse:
            self._on_broken()
        return httpx2.Response(incoming.status, headers=dict(incoming.headers), content=bytes(body))

    def _fail_exchange(self, exchange: HttpExchange, message: str) -> httpx2.Response:
        exchange.failure = message
        if self._is_sse:
            # The SDK's writer ends at the first failure, and its callers would wait forever.
            self._on_broken()
        return httpx2.Response(502)

    async def _count_bytes(self, chunks: AsyncIterator[bytes], exchange: HttpExchange) -> AsyncGenerator[bytes]:
        try:
            async for chunk in chunks:
                self._streamed_bytes += len(chunk)
                yield chunk
        except FetchFailed as exc:
            exchange.failure = exc.message
            # The SDK handles only this exception from a body.
            raise httpx2.StreamError(exc.message) from None


class _ResponseBody(httpx2.AsyncByteStream):
    """A response body that closes its connection when it is closed."""

    def __init__(self, chunks: AsyncGenerator[bytes], exit_stack: AsyncExitStack) -> None:
        self._chunks = chunks
        self._exit_stack = exit_stack

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        await self._chunks.aclose()
        await self._exit_stack.aclose()


def _with_remedy(error: FetchFailed) -> str:
    if not isinstance(error, FetchRefused):
        return error.message
    return f"{error.reason} To use a server of your own, put it under tool_servers.servers with private: true."


def _parse_request(body: bytes | None) -> dict[str, Any]:
    """Return the message of a request of the SDK's; an empty one where it sends none."""
    return json.loads(body) if body else {}


def _url_origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
