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
from providers.tool_runtime.mcp.texts import http_failed, protocol_failed, redacted
from providers.tool_runtime.mcp.wire import EXCHANGE, Exchange, Streams, Unasked, Watched

_log = logging.getLogger(__name__)

_MAX_PAGES: Final = 8
_MAX_LISTED: Final = 1024
_CLOSING_S: Final = 10.0
_WE: Final = Implementation(name="responses-stack", version="1")
_OUTCOME: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(CallToolResult | InputRequiredResult)
_Result = TypeVar("_Result")


class SessionLost(ToolFailed):
    """The server has forgotten the session, and so has not run what was asked."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a session is opened. `open` gets what to do when the session is at its end, and gives its messages;
    `legacy` is the handshake of MCP before 2026, `secrets` what no error may say."""

    open: Callable[[Callable[[], None]], AbstractAsyncContextManager[Streams]]
    legacy: bool = False
    secrets: tuple[str, ...] = ()
    worn: Callable[[], bool] = lambda: False


class Session:
    """A session, open as soon as it can be. The SDK's scopes never leave its task.

    `listing` is its user's; it is gone when the server says that its tools have changed.
    """

    def __init__(self, opening: Opening, connect_timeout_s: float) -> None:
        self.users = 0
        self.served = 0
        self.broken = False
        self.listing: list[dict[str, Any]] | None = None
        self._opening = opening
        self._exchange = Exchange()
        self._client: Client | None = None
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._unasked = Unasked(self._forget_listing, self._over.set)
        self.task = asyncio.create_task(self._live())
        self.task.add_done_callback(lambda _: self._at_end())
        self._timer = asyncio.get_running_loop().call_later(connect_timeout_s, self.task.cancel)

    @property
    def usable(self) -> bool:
        """Whether a new call may use it."""
        return not (self.broken or self._over.is_set() or self._opening.worn())

    def leave(self) -> None:
        """End it, soon and without waiting."""
        self._over.set()
        self._timer.cancel()
        if self._client is None:
            self.task.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(_CLOSING_S, self.task.cancel)

    async def list_tools(self) -> list[Tool]:
        """What the server says that it has now; not endlessly much of it. Raises ToolFailed."""
        tools: list[Tool] = []
        params: PaginatedRequestParams | None = None
        for _ in range(_MAX_PAGES):
            page = await self._ask(lambda session, params=params: session.list_tools(params=params))
            tools += page.tools
            if page.next_cursor is None or len(tools) >= _MAX_LISTED:
                break
            params = PaginatedRequestParams(cursor=page.next_cursor)
        return tools[:_MAX_LISTED]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """A result that is an error is a result. Raises ToolFailed.

        Not the SDK's own `call_tool`: that checks results against the server's schema, whose patterns may never end.
        """
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        try:
            outcome = await self._ask(lambda session: session.send_request(request, _OUTCOME))
        except ToolFailed as exc:
            if exc.detail["code"] != HEADER_MISMATCH:
                raise
            # The server wants some arguments in headers too: the SDK knows which, once it has seen the schema.
            await self.list_tools()
            outcome = await self._ask(lambda session: session.send_request(request, _OUTCOME))
        if isinstance(outcome, InputRequiredResult):
            raise protocol_failed(INVALID_REQUEST, "The tool asks for more input, which is not offered here.")
        return outcome

    async def _live(self) -> None:
        EXCHANGE.set(self._exchange)
        mode = "legacy" if self._opening.legacy else "auto"
        async with Client(self._streams(), mode=mode, cache=None, client_info=_WE) as self._client:
            self._timer.cancel()
            self._ready.set()
            await self._over.wait()

    def _at_end(self) -> None:
        self._client = None
        self._timer.cancel()
        self._over.set()
        self._ready.set()
        if exc := self._reason():
            _log.info("an MCP session ended: %s", type(exc).__name__)

    def _reason(self) -> BaseException | None:
        """Why the task ended. What ends a connecting comes in groups of groups."""
        exc: BaseException | None = None if self.task.cancelled() else self.task.exception()
        while isinstance(exc, BaseExceptionGroup):
            exc = cast("BaseExceptionGroup[BaseException]", exc).exceptions[0]
        return exc

    @asynccontextmanager
    async def _streams(self) -> AsyncGenerator[Streams]:
        async with self._opening.open(self._over.set) as (received, sent):
            yield Watched(received, self._unasked), sent

    async def _ask(self, ask: Callable[[ClientSession], Awaitable[_Result]]) -> _Result:
        await self._ready.wait()
        if self._client is None or self._over.is_set():
            raise await self._why_not()
        self._unasked.begin()
        exchange = Exchange()
        token = EXCHANGE.set(exchange)
        try:
            result = await ask(self._client.session)
        except asyncio.CancelledError:
            # The server may still be at it, and some can only be stopped by leaving.
            self.broken = True
            raise
        except MCPError as exc:
            raise self._failed(exc, exchange) from None
        except ValidationError:
            raise protocol_failed(PARSE_ERROR, "The MCP server's answer is not one that MCP knows.") from None
        except (RuntimeError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.broken = True
            raise self._closed(exchange) from None
        finally:
            EXCHANGE.reset(token)
        self.served += 1
        return result

    async def _why_not(self) -> ToolFailed:
        """Why there is no session."""
        await asyncio.wait([self.task])
        exc = self._reason()
        if isinstance(exc, MCPError):
            return self._failed(exc, self._exchange)
        if isinstance(exc, OSError):
            return protocol_failed(CONNECTION_CLOSED, "The MCP server could not be started.")
        if self.task.cancelled():
            return protocol_failed(REQUEST_TIMEOUT, "The MCP server did not open a session in time.")
        return self._closed(self._exchange)

    def _failed(self, exc: MCPError, exchange: Exchange) -> ToolFailed:
        if exc.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            self.broken = True
        if exchange.lost:
            self.broken = True
            return SessionLost("The MCP server has forgotten the session.", detail=http_failed(exchange.status).detail)
        if exchange.status:
            return http_failed(exchange.status)
        if exchange.failure or exc.code == CONNECTION_CLOSED:
            return self._closed(exchange)
        said = redacted(exc.message, self._opening.secrets)
        return protocol_failed(exc.code, f"The MCP server refused: {said}" if said else "The MCP server refused.")

    def _closed(self, exchange: Exchange) -> ToolFailed:
        for each in (exchange, self._exchange):
            if each.status:
                return http_failed(each.status)
            if each.failure:
                return protocol_failed(CONNECTION_CLOSED, redacted(each.failure, self._opening.secrets))
        return protocol_failed(CONNECTION_CLOSED, "The MCP server broke off the connection.")

    def _forget_listing(self) -> None:
        self.listing = None


class Sessions:
    """At most `max_sessions`, one per key; one that has been without a call for `idle_s` ends."""

    def __init__(self, max_sessions: int, idle_s: float, connect_timeout_s: float) -> None:
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._by_key: dict[Hashable, Session] = {}
        self._timers: dict[Session, asyncio.TimerHandle] = {}
        self._all: set[Session] = set()

    @asynccontextmanager
    async def session(self, key: Hashable, opening: Callable[[], Opening]) -> AsyncGenerator[Session]:
        """The key's session, for one call. Raises ToolFailed when all that may be are at work."""
        session = self._by_key.get(key)
        if session is None or not session.usable:
            session = self._open(key, opening)
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            if session.users == 0:
                self._rest(key, session)

    async def close(self) -> None:
        """End them all, within seconds."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._by_key.clear()
        for session in self._all:
            session.leave()
        if self._all:
            await asyncio.wait([session.task for session in self._all])

    def _open(self, key: Hashable, opening: Callable[[], Opening]) -> Session:
        self._forget(key)
        if len(self._by_key) >= self._max_sessions:
            idle = next((each for each, session in self._by_key.items() if session in self._timers), None)
            if idle is None:
                raise protocol_failed(CONNECTION_CLOSED, "Too many MCP servers are at work just now; try again later.")
            self._forget(idle)
        session = self._by_key[key] = Session(opening(), self._connect_timeout_s)
        self._all.add(session)
        session.task.add_done_callback(lambda _: self._ended(key, session))
        return session

    def _rest(self, key: Hashable, session: Session) -> None:
        if self._by_key.get(key) is not session or not session.usable:
            if self._by_key.get(key) is session:
                del self._by_key[key]
            session.leave()
            return
        # The order of the keys is that of their last use: the first is the first to go.
        self._by_key[key] = self._by_key.pop(key)
        self._timers[session] = asyncio.get_running_loop().call_later(self._idle_s, self._forget, key)

    def _forget(self, key: Hashable) -> None:
        """No new call gets the session; it ends now, or with its last call."""
        session = self._by_key.pop(key, None)
        if session is None:
            return
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()
        if session.users == 0:
            session.leave()

    def _ended(self, key: Hashable, session: Session) -> None:
        self._all.discard(session)
        if self._by_key.get(key) is session:
            self._forget(key)
