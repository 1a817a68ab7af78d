"""Sessions with MCP servers: each lives in a task of its own, is shared by calls, and ends when nobody needs it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import anyio
from mcp import Client, ClientSession, MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    InputRequiredResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import TypeAdapter, ValidationError

from apis.errors import ToolFailed
from providers.tool_runtime.mcp.texts import http_error, protocol_error, redact_secrets
from providers.tool_runtime.mcp.wire import (
    CURRENT_EXCHANGE,
    FilteredStream,
    HttpExchange,
    SessionStreams,
    UnsolicitedFilter,
)

_log = logging.getLogger(__name__)

_MAX_PAGES: Final = 8
_MAX_TOOLS: Final = 1024
_CLOSE_TIMEOUT_S: Final = 10.0
_CLIENT_INFO: Final = Implementation(name="responses-stack", version="1")
_OUTCOME_ADAPTER: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(
    CallToolResult | InputRequiredResult
)
_Result = TypeVar("_Result")


class SessionLost(ToolFailed):
    """The server has forgotten the session, and so has not run what was asked."""


@dataclass(frozen=True, slots=True)
class SessionConnector:
    """How a session is opened. `open` gets what to do when the session is at its end, and gives its messages;
    `legacy` is the handshake of MCP before 2026, `secrets` what no error may say."""

    open_streams: Callable[[Callable[[], None]], AbstractAsyncContextManager[SessionStreams]]
    is_legacy: bool = False
    secrets: tuple[str, ...] = ()
    is_expiring: Callable[[], bool] = lambda: False


class McpSession:
    """A session, open as soon as it can be. The SDK's scopes never leave its task.

    `listing` is its user's; it is gone when the server says that its tools have changed.
    """

    def __init__(self, connector: SessionConnector, connect_timeout_s: float) -> None:
        self.user_count = 0
        self.completed_calls = 0
        self.is_broken = False
        self.tool_listing: list[dict[str, Any]] | None = None
        self._connector = connector
        self._connect_exchange = HttpExchange()
        self._client: Client | None = None
        self._ready_event = asyncio.Event()
        self._end_event = asyncio.Event()
        self._unsolicited_filter = UnsolicitedFilter(self._clear_listing, self._end_event.set)
        self.task = asyncio.create_task(self._run_session())
        self.task.add_done_callback(lambda _: self._on_task_done())
        self._timer = asyncio.get_running_loop().call_later(connect_timeout_s, self.task.cancel)

    @property
    def is_usable(self) -> bool:
        """Whether a new call may use it."""
        return not (self.is_broken or self._end_event.is_set() or self._connector.is_expiring())

    def begin_close(self) -> None:
        """End it, soon and without waiting."""
        self._end_event.set()
        self._timer.cancel()
        if self._client is None:
            self.task.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self.task.cancel)

    async def list_tools(self) -> list[Tool]:
        """What the server says that it has now; not endlessly much of it. Raises ToolFailed."""
        tools: list[Tool] = []
        params: PaginatedRequestParams | None = None
        for _ in range(_MAX_PAGES):
            page = await self._send_request(lambda session, params=params: session.list_tools(params=params))
            tools += page.tools
            if page.next_cursor is None or len(tools) >= _MAX_TOOLS:
                break
            params = PaginatedRequestParams(cursor=page.next_cursor)
        return tools[:_MAX_TOOLS]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """A result that is an error is a result. Raises ToolFailed.

        Not the SDK's own `call_tool`: that checks results against the server's schema, whose patterns may never end.
        """
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        try:
            outcome = await self._send_request(lambda session: session.send_request(request, _OUTCOME_ADAPTER))
        except ToolFailed as exc:
            if exc.detail["code"] != HEADER_MISMATCH:
                raise
            # The server wants some arguments in headers too: the SDK knows which, once it has seen the schema.
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
        """Why the task ended. What ends a connecting comes in groups of groups."""
        exc: BaseException | None = None if self.task.cancelled() else self.task.exception()
        while isinstance(exc, BaseExceptionGroup):
            exc = cast("BaseExceptionGroup[BaseException]", exc).exceptions[0]
        return exc

    @asynccontextmanager
    async def _open_streams(self) -> AsyncGenerator[SessionStreams]:
        async with self._connector.open_streams(self._end_event.set) as (received, sent):
            yield FilteredStream(received, self._unsolicited_filter), sent

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
            # The server may still be at it, and some can only be stopped by leaving.
            self.is_broken = True
            raise
        except MCPError as exc:
            raise self._convert_error(exc, exchange) from None
        except ValidationError:
            raise protocol_error(PARSE_ERROR, "The MCP server's answer is not one that MCP knows.") from None
        except (RuntimeError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.is_broken = True
            raise self._closed_error(exchange) from None
        finally:
            CURRENT_EXCHANGE.reset(token)
        self.completed_calls += 1
        return result

    async def _diagnose_connect(self) -> ToolFailed:
        """Why there is no session."""
        await asyncio.wait([self.task])
        exc = self._find_end_cause()
        if isinstance(exc, MCPError):
            return self._convert_error(exc, self._connect_exchange)
        if isinstance(exc, OSError):
            return protocol_error(CONNECTION_CLOSED, "The MCP server could not be started.")
        if self.task.cancelled():
            return protocol_error(REQUEST_TIMEOUT, "The MCP server did not open a session in time.")
        return self._closed_error(self._connect_exchange)

    def _convert_error(self, exc: MCPError, exchange: HttpExchange) -> ToolFailed:
        if exc.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            self.is_broken = True
        if exchange.is_session_lost:
            self.is_broken = True
            return SessionLost("The MCP server has forgotten the session.", detail=http_error(exchange.status).detail)
        if exchange.status:
            return http_error(exchange.status)
        if exchange.failure or exc.code == CONNECTION_CLOSED:
            return self._closed_error(exchange)
        said = redact_secrets(exc.message, self._connector.secrets)
        return protocol_error(exc.code, f"The MCP server refused: {said}" if said else "The MCP server refused.")

    def _closed_error(self, exchange: HttpExchange) -> ToolFailed:
        for each in (exchange, self._connect_exchange):
            if each.status:
                return http_error(each.status)
            if each.failure:
                return protocol_error(CONNECTION_CLOSED, redact_secrets(each.failure, self._connector.secrets))
        return protocol_error(CONNECTION_CLOSED, "The MCP server broke off the connection.")

    def _clear_listing(self) -> None:
        self.tool_listing = None


class McpSessionPool:
    """At most `max_sessions`, one per key; one that has been without a call for `idle_s` ends."""

    def __init__(self, max_sessions: int, idle_s: float, connect_timeout_s: float) -> None:
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._sessions_by_key: dict[Hashable, McpSession] = {}
        self._idle_timers: dict[McpSession, asyncio.TimerHandle] = {}
        self._open_sessions: set[McpSession] = set()

    @asynccontextmanager
    async def use_session(
        self, key: Hashable, build_connector: Callable[[], SessionConnector]
    ) -> AsyncGenerator[McpSession]:
        """The key's session, for one call. Raises ToolFailed when all that may be are at work."""
        session = self._sessions_by_key.get(key)
        if session is None or not session.is_usable:
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

    async def close(self) -> None:
        """End them all, within seconds."""
        for timer in self._idle_timers.values():
            timer.cancel()
        self._idle_timers.clear()
        self._sessions_by_key.clear()
        for session in self._open_sessions:
            session.begin_close()
        if self._open_sessions:
            await asyncio.wait([session.task for session in self._open_sessions])

    def _open_session(self, key: Hashable, build_connector: Callable[[], SessionConnector]) -> McpSession:
        self._remove_session(key)
        if len(self._sessions_by_key) >= self._max_sessions:
            idle = next((each for each, session in self._sessions_by_key.items() if session in self._idle_timers), None)
            if idle is None:
                raise protocol_error(CONNECTION_CLOSED, "Too many MCP servers are at work just now; try again later.")
            self._remove_session(idle)
        session = self._sessions_by_key[key] = McpSession(build_connector(), self._connect_timeout_s)
        self._open_sessions.add(session)
        session.task.add_done_callback(lambda _: self._on_session_end(key, session))
        return session

    def _release_session(self, key: Hashable, session: McpSession) -> None:
        if self._sessions_by_key.get(key) is not session or not session.is_usable:
            if self._sessions_by_key.get(key) is session:
                del self._sessions_by_key[key]
            session.begin_close()
            return
        # The order of the keys is that of their last use: the first is the first to go.
        self._sessions_by_key[key] = self._sessions_by_key.pop(key)
        self._idle_timers[session] = asyncio.get_running_loop().call_later(self._idle_s, self._remove_session, key)

    def _remove_session(self, key: Hashable) -> None:
        """No new call gets the session; it ends now, or with its last call."""
        session = self._sessions_by_key.pop(key, None)
        if session is None:
            return
        if (timer := self._idle_timers.pop(session, None)) is not None:
            timer.cancel()
        if session.user_count == 0:
            session.begin_close()

    def _on_session_end(self, key: Hashable, session: McpSession) -> None:
        self._open_sessions.discard(session)
        if self._sessions_by_key.get(key) is session:
            self._remove_session(key)
