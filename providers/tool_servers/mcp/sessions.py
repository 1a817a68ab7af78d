"""Sessions with MCP servers: each runs in its own task, is shared by calls, and ends when it has been idle."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar, cast

import anyio
from mcp import Client, ClientSession, MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)
from openai.types.responses.mcp_tool_call_error import McpProtocolError
from pydantic import TypeAdapter, ValidationError

from apis.fair_share import FairShare, Place
from apis.telemetry import current_span
from apis.tool_servers import ServerTool, ToolServerFailed
from providers.tool_servers.mcp.answers import AnswerMender
from providers.tool_servers.mcp.lost_sessions import names_lost_session
from providers.tool_servers.mcp.texts import http_error, one_line, protocol_error, redact_secrets
from providers.tool_servers.mcp.wire import (
    CURRENT_EXCHANGE,
    HttpExchange,
    ReceivedStream,
    SentStream,
    SessionStreams,
    UnsolicitedFilter,
)

_log = logging.getLogger(__name__)

_MAX_TOOLS: Final = 1024
_MAX_USELESS_PAGES: Final = 8
"""Pages of a list in a row that hold no tool that is not on it yet."""
_CLOSE_TIMEOUT_S: Final = 10.0
_TRANSIENT_STATUSES: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_CLIENT_INFO: Final = Implementation(name="responses-stack", version="1")
_OUTCOME_ADAPTER: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(
    CallToolResult | InputRequiredResult
)
_Result = TypeVar("_Result")

SessionKey = tuple[str, Hashable]
"""Tenant, and identity of the server with the credentials."""


class SessionLost(ToolServerFailed):
    """The server does not know the session any more, so it has not run the request."""


@dataclass(frozen=True, slots=True)
class SessionConnector:
    """Opens a session's streams. `open_streams` takes the callback that ends the session; `is_legacy` selects the
    handshake of MCP before 2026; `secrets` are redacted in errors."""

    open_streams: Callable[[Callable[[], None]], AbstractAsyncContextManager[SessionStreams]]
    is_legacy: bool = False
    secrets: tuple[str, ...] = ()
    is_expiring: Callable[[], bool] = lambda: False


class McpSession:
    """A session, which opens on construction. The SDK's cancel scopes never leave its task.

    `answered_at` is the time of its latest answer on the loop's clock, and `has_failed` is true while a request has
    failed since. `tool_listing` is set by the session's user and
    cleared when the server reports that its tools have changed.
    """

    def __init__(self, connector: SessionConnector, connect_timeout_s: float) -> None:
        self.user_count = 0
        self.answered_at = asyncio.get_running_loop().time()
        self.has_failed = False
        self.is_broken = False
        self.tool_listing: Sequence[ServerTool] | None = None
        self._connector = connector
        self._connect_exchange = HttpExchange(is_connect=True)
        self._mender = AnswerMender()
        self._client: Client | None = None
        self._ready_event = asyncio.Event()
        self._end_event = asyncio.Event()
        self._unsolicited_filter = UnsolicitedFilter(self._clear_listing, self._end_event.set)
        self.task = asyncio.create_task(self._run_session())
        self.task.add_done_callback(lambda _: self._on_task_done())
        self._timer = asyncio.get_running_loop().call_later(connect_timeout_s, self.task.cancel)

    @property
    def is_usable(self) -> bool:
        """True while new calls may use the session."""
        return not (self.is_broken or self._end_event.is_set() or self._connector.is_expiring())

    def begin_close(self) -> None:
        """Make the session end soon; does not wait for that."""
        self._end_event.set()
        self._timer.cancel()
        if self._client is None:
            self.task.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self.task.cancel)

    async def list_tools(self, deadline: float = math.inf) -> tuple[list[Tool], Sequence[str]]:
        """Return the server's current tools, at most 1024, and what was left out of them. Raises ToolServerFailed.

        The caller gives up at the loop time `deadline`. In the second half of the time until then no further page is
        requested, and in its last quarter none is waited for."""
        tools: dict[str, Tool] = {}
        mender, cursor, cursors, useless_pages = self._mender, None, set[str | None](), 0
        mender.faults = []
        loop = asyncio.get_running_loop()
        quarter_s, is_late = (deadline - loop.time()) / 4, False
        while cursor not in cursors and useless_pages < _MAX_USELESS_PAGES and len(tools) < _MAX_TOOLS:
            cursors.add(cursor)
            page = await self._list_page(cursor, deadline - quarter_s if deadline < math.inf else None)
            known_count = len(tools)
            for tool in page.tools:
                if tools.setdefault(tool.name, tool) is not tool:
                    mender.add_fault(f"{one_line(tool.name, 64)!r}: it is there already")
            useless_pages = 0 if len(tools) > known_count else useless_pages + 1
            cursor = page.next_cursor
            is_late = loop.time() > deadline - 2 * quarter_s
            if cursor is None or is_late:
                break
        if len(tools) > _MAX_TOOLS or (cursor is not None and len(tools) == _MAX_TOOLS):
            mender.add_fault(f"all after the first {_MAX_TOOLS}")
        elif cursor is not None and is_late:
            mender.add_fault("further pages: they take too long")
        elif cursor is not None:
            mender.add_fault("further pages: they repeat those before")
        return list(tools.values())[:_MAX_TOOLS], mender.faults

    async def _list_page(self, cursor: str | None, deadline: float | None) -> ListToolsResult:
        """Return one page of the list. In place of one that the server refuses, or that is not there at the loop time
        `deadline`, return an empty last one, unless it is the first."""
        params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
        try:
            async with asyncio.timeout_at(deadline if cursor is not None else None):
                return await self._send_request(lambda session: session.list_tools(params=params))
        except TimeoutError:
            self._mender.add_fault("further pages: they take too long")
            return ListToolsResult(tools=[])
        except SessionLost:
            raise
        except ToolServerFailed as exc:
            if cursor is None or self.is_broken:
                raise
            self._mender.add_fault(f"further pages: {exc.message}")
            return ListToolsResult(tools=[])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Return the tool's result, which may be an error. Raises ToolServerFailed.

        The SDK's own `call_tool` checks results against the server's schema, whose patterns may never end.
        """
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        try:
            outcome = await self._send_request(lambda session: session.send_request(request, _OUTCOME_ADAPTER))
        except ToolServerFailed as exc:
            if not isinstance(exc.error, McpProtocolError) or exc.error.code != HEADER_MISMATCH:
                raise
            # The server wants some arguments in headers too: the SDK learns from the schema which ones.
            await self.list_tools()
            outcome = await self._send_request(lambda session: session.send_request(request, _OUTCOME_ADAPTER))
        if isinstance(outcome, InputRequiredResult):
            raise protocol_error(INVALID_REQUEST, "The tool asks for more input, which is not offered here.")
        return outcome

    async def _run_session(self) -> None:
        CURRENT_EXCHANGE.set(self._connect_exchange)
        mode = "legacy" if self._connector.is_legacy else "auto"
        async with Client(self._open_streams(), mode=mode, cache=None, client_info=_CLIENT_INFO) as self._client:
            self._timer.cancel()
            self._ready_event.set()
            await self._end_event.wait()

    def _on_task_done(self) -> None:
        self._client = None
        self._timer.cancel()
        self._end_event.set()
        self._ready_event.set()
        if exc := self._find_end_cause():
            _log.info("an MCP session ended: %s", type(exc).__name__)

    def _find_end_cause(self) -> BaseException | None:
        """Return the exception that ended the task; a failed connect raises groups of groups."""
        exc: BaseException | None = None if self.task.cancelled() else self.task.exception()
        while isinstance(exc, BaseExceptionGroup):
            exc = cast("BaseExceptionGroup[BaseException]", exc).exceptions[0]
        return exc

    @asynccontextmanager
    async def _open_streams(self) -> AsyncGenerator[SessionStreams]:
        async with self._connector.open_streams(self._end_event.set) as (received, sent):
            yield ReceivedStream(received, self._unsolicited_filter, self._mender), SentStream(sent, self._mender)

    async def _send_request(self, send: Callable[[ClientSession], Awaitable[_Result]]) -> _Result:
        await self._ready_event.wait()
        if self._client is None or self._end_event.is_set():
            raise await self._diagnose_connect()
        self._unsolicited_filter.reset_counts()
        exchange = HttpExchange()
        token = CURRENT_EXCHANGE.set(exchange)
        try:
            result = await send(self._client.session)
        except asyncio.CancelledError:
            # The server may still be working, and some servers stop only when the session ends.
            self.is_broken = True
            raise
        except MCPError as exc:
            self.has_failed = True
            raise self._convert_error(exc, exchange) from None
        except ValidationError:
            raise protocol_error(PARSE_ERROR, "The MCP server's answer is not one that MCP knows.") from None
        except (RuntimeError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.is_broken = True
            raise self._closed_error(exchange) from None
        finally:
            CURRENT_EXCHANGE.reset(token)
            current_span().set({"jsonrpc.request.id": exchange.request_id})
        self.answered_at, self.has_failed = asyncio.get_running_loop().time(), False
        return result

    async def _diagnose_connect(self) -> ToolServerFailed:
        """Return the failure to open the session."""
        await asyncio.wait([self.task])
        exc = self._find_end_cause()
        if isinstance(exc, MCPError):
            return self._convert_error(exc, self._connect_exchange)
        if isinstance(exc, OSError):
            return protocol_error(CONNECTION_CLOSED, "The MCP server could not be started.")
        if self.task.cancelled():
            return protocol_error(REQUEST_TIMEOUT, "The MCP server did not open a session in time.")
        return self._closed_error(self._connect_exchange)

    def _convert_error(self, exc: MCPError, exchange: HttpExchange) -> ToolServerFailed:
        error = self._describe_error(exc, exchange)
        data: Any = exc.error.data
        words = f"{exc.message}: {data}" if isinstance(data, str) else exc.message
        # in such an error the words "unknown" and "session" are about an argument of the tool's
        is_about_session = exc.code != INVALID_PARAMS or "initiali" in words
        if exchange.failure or _is_closed(exc):
            self.is_broken = True
        elif exchange.is_session_lost or (is_about_session and names_lost_session(words)):
            self.is_broken = True
            if exchange.is_session_lost or names_lost_session(words, is_first_word=not exchange.is_streamed):
                return SessionLost(error.message, error.error)
        elif exchange.status // 100 == 4 and exchange.status not in _TRANSIENT_STATUSES:
            self.is_broken = True  # in doubt
        return error

    def _describe_error(self, exc: MCPError, exchange: HttpExchange) -> ToolServerFailed:
        if exchange.status:
            return http_error(exchange.status)
        if exchange.failure or _is_closed(exc):
            return self._closed_error(exchange)
        reason = redact_secrets(exc.message, self._connector.secrets)
        return protocol_error(exc.code, f"The MCP server refused: {reason}" if reason else "The MCP server refused.")

    def _closed_error(self, exchange: HttpExchange) -> ToolServerFailed:
        for failed in (exchange, self._connect_exchange):
            if failed.status:
                return http_error(failed.status)
            if failed.failure:
                return protocol_error(CONNECTION_CLOSED, redact_secrets(failed.failure, self._connector.secrets))
        return protocol_error(CONNECTION_CLOSED, "The MCP server broke off the connection.")

    def _clear_listing(self) -> None:
        self.tool_listing = None


def _is_closed(exc: MCPError) -> bool:
    """Return True for an error of the SDK's own, which has a code that servers use too."""
    return exc.code == CONNECTION_CLOSED and exc.message.startswith(("Connection closed", "SSE stream "))


class McpSessionPool:
    """Sessions of tenants, one per key, each with a place of `places` until its last call is over; each ends when the
    server has answered nothing for `idle_s`."""

    def __init__(self, places: FairShare, idle_s: float, connect_timeout_s: float) -> None:
        self._places = places
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._sessions_by_key: dict[SessionKey, McpSession] = {}
        self._places_by_session: dict[McpSession, Place] = {}
        self._idle_timers: dict[McpSession, asyncio.TimerHandle] = {}
        self._open_sessions: set[McpSession] = set()

    @asynccontextmanager
    async def use_session(
        self, key: SessionKey, build_connector: Callable[[], SessionConnector]
    ) -> AsyncGenerator[McpSession]:
        """Yield the key's session for one call. Raises ToolServerFailed when all sessions that the tenant may have are
        in use."""
        session = self._sessions_by_key.get(key)
        if session is None or not session.is_usable or self._is_overdue(session):
            session = self._open_session(key, build_connector)
        if (timer := self._idle_timers.pop(session, None)) is not None:
            timer.cancel()
        session.user_count += 1
        try:
            yield session
        finally:
            session.user_count -= 1
            if session.user_count == 0:
                self._release_session(key, session)

    def _is_overdue(self, session: McpSession) -> bool:
        """Return True for a session whose calls fail, and have for longer than it may be idle."""
        return session.has_failed and asyncio.get_running_loop().time() >= session.answered_at + self._idle_s

    async def close(self) -> None:
        """End all sessions within seconds."""
        for timer in self._idle_timers.values():
            timer.cancel()
        self._idle_timers.clear()
        self._sessions_by_key.clear()
        for session in self._open_sessions:
            session.begin_close()
        if self._open_sessions:
            await asyncio.wait([session.task for session in self._open_sessions])

    def _open_session(self, key: SessionKey, build_connector: Callable[[], SessionConnector]) -> McpSession:
        self._remove_session(key)
        connector = build_connector()
        place = self._take_place(key[0])
        session = McpSession(connector, self._connect_timeout_s)
        self._sessions_by_key[key] = session
        self._places_by_session[session] = place
        self._open_sessions.add(session)
        session.task.add_done_callback(lambda _: self._on_session_end(key, session))
        return session

    def _release_session(self, key: SessionKey, session: McpSession) -> None:
        """Take back a session that has no users now."""
        if self._sessions_by_key.get(key) is session:
            if session.is_usable:
                self._sessions_by_key[key] = self._sessions_by_key.pop(key)
                ends_at = session.answered_at + self._idle_s
                self._idle_timers[session] = asyncio.get_running_loop().call_at(ends_at, self._remove_session, key)
            else:
                self._remove_session(key)
        elif session in self._places_by_session:
            self._end_session(session).release()

    def _take_place(self, tenant: str) -> Place:
        """Return a place, for which an idle session may end. Raises ToolServerFailed when there is none."""
        end_idle_use = {
            self._places_by_session[session]: partial(self._reclaim_session, key)
            for key, session in self._sessions_by_key.items()  # the one unused for longest first
            if session in self._idle_timers
        }
        place = self._places.acquire_or_reclaim(tenant, end_idle_use)
        if place is None:
            raise protocol_error(CONNECTION_CLOSED, "Too many MCP servers are at work just now; try again later.")
        return place

    def _reclaim_session(self, key: SessionKey) -> None:
        """End an idle session without releasing its place."""
        self._end_session(self._sessions_by_key.pop(key))

    def _remove_session(self, key: SessionKey) -> None:
        """Keep new calls from the session, and end it now or with its last call."""
        session = self._sessions_by_key.pop(key, None)
        if session is not None and session.user_count == 0:
            self._end_session(session).release()

    def _end_session(self, session: McpSession) -> Place:
        """End a session that has no users, and return its place without releasing it."""
        if (timer := self._idle_timers.pop(session, None)) is not None:
            timer.cancel()
        session.begin_close()
        return self._places_by_session.pop(session)

    def _on_session_end(self, key: SessionKey, session: McpSession) -> None:
        self._open_sessions.discard(session)
        if self._sessions_by_key.get(key) is session:
            self._remove_session(key)
