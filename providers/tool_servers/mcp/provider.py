"""MCP: lists and calls the tools of MCP servers that requests declare or the run config names."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

from mcp_types import INVALID_PARAMS, REQUEST_TIMEOUT, CallToolResult
from pydantic import BeforeValidator, ConfigDict, Field

from apis.documents.fetcher import Fetcher
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.provider import Provider
from apis.telemetry import AttributeValue, Span, SpanType, open_span
from apis.tool_servers import (
    ServerPolicy,
    ServerTool,
    ToolChanged,
    ToolServerFailed,
    ToolServers,
    allowed_tool_filter,
    is_tool_name,
    matches_filter,
    selects_name,
)
from apis.wire.tools import McpTool, ToolFilter
from providers.tool_servers.mcp.listing import convert_tools
from providers.tool_servers.mcp.servers import (
    ConnectorConfig,
    LocalServer,
    McpServerConfig,
    McpServerTarget,
    ServerCatalog,
)
from providers.tool_servers.mcp.sessions import McpSession, McpSessionPool, SessionConnector, SessionKey, SessionLost
from providers.tool_servers.mcp.stdio import open_stdio_streams
from providers.tool_servers.mcp.texts import execution_error, one_line, protocol_error, result_to_text
from providers.tool_servers.mcp.wire import FetcherTransport

_MAX_ARGUMENTS_BYTES: Final = 1024 * 1024
_SDK_LOGGERS: Final = ("client", "httpx2", "mcp.client", "mcp.shared")

_Result = TypeVar("_Result")


def _url_to_connector(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class MCP(ToolServers):
    """A client of MCP servers (https://modelcontextprotocol.io) over streamable HTTP, SSE, and, from the config only,
    stdio.

    A declaration without `server_url` and `connector_id` means the config's server of its label. A URL whose path ends
    in /sse is spoken to over SSE. Sessions are shared by the calls of one tenant with equal credentials.
    """

    class Config(Provider.Config):
        """A connector is a URL, or a mapping with `url` and the rules that `servers` take too: `private`, `tenants`,
        `allowed_tools`, `require_approval`. `allowed_hosts`, where set, are the only hosts of a request's `server_url`,
        each with its subdomains. `list_timeout_s` bounds connecting too. When `max_sessions` are open, or
        `max_tenant_sessions` of one tenant where there are several (by default half), a new one replaces the one that
        has been idle for the longest time."""

        model_config = ConfigDict(hide_input_in_errors=True)

        servers: dict[str, McpServerConfig] = Field(default_factory=dict[str, McpServerConfig])
        connectors: dict[str, Annotated[ConnectorConfig, BeforeValidator(_url_to_connector)]] = Field(
            default_factory=dict[str, ConnectorConfig]
        )
        allowed_hosts: list[str] | None = None
        list_timeout_s: float = Field(30.0, gt=0, le=600)
        call_timeout_s: float = Field(60.0, gt=0, le=3600)
        max_sessions: int = Field(32, gt=0)
        max_tenant_sessions: int | None = Field(None, gt=0)
        idle_s: float = Field(300.0, gt=0)

    def __init__(self, config: Config, fetcher: Fetcher, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._fetcher = fetcher
        hosts = None if config.allowed_hosts is None else [host.lower().rstrip(".") for host in config.allowed_hosts]
        self._catalog = ServerCatalog(config.servers, config.connectors, hosts)
        places = FairShare(
            "MCP sessions",
            config.max_sessions,
            tenant_places=config.max_tenant_sessions,
            several_tenants=tenants.are_several,
        )
        self._sessions = McpSessionPool(places, config.idle_s, config.list_timeout_s)

    async def start(self) -> None:
        # The SDK logs whole messages, credentials of a misbehaving server's echo included, even at the highest level.
        for name in _SDK_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    async def close(self) -> None:
        await self._sessions.close()

    def machine_bound_state(self) -> str | None:
        commands = [name for name, server in self._config.servers.items() if server.command is not None]
        if not commands:
            return None
        return (
            f"each machine starts its own server of the command of {', '.join(commands)}, with a state of its own; on "
            "several, use servers with a url"
        )

    async def check_declaration(self, declaration: McpTool, *, tenant: str) -> None:
        self._catalog.find_server(declaration, tenant)

    def known_labels(self, tenant: str) -> Sequence[str]:
        return self._catalog.known_labels(tenant)

    def find_policy(self, declaration: McpTool) -> ServerPolicy:
        return self._catalog.find_policy(declaration)

    async def list_tools(self, declaration: McpTool, *, tenant: str) -> Sequence[ServerTool]:
        server = self._catalog.find_server(declaration, tenant)
        deadline = asyncio.get_running_loop().time() + self._config.list_timeout_s
        with _request_span("tools/list", server):
            tools = await self._use_session(
                self._config.list_timeout_s,
                (tenant, server.identity),
                server,
                lambda session: _list_tools(session, declaration.server_label, server, deadline),
            )
        allowed = allowed_tool_filter(declaration)
        policy = self._catalog.find_policy(declaration)
        return [tool for tool in tools if matches_filter(allowed, tool) and policy.allows(tool.name)]

    async def call_tool(
        self,
        declaration: McpTool,
        name: str,
        arguments: Mapping[str, Any],
        *,
        tenant: str,
        listed_tool: ServerTool | None = None,
    ) -> str:
        server = self._catalog.find_server(declaration, tenant)
        allowed = allowed_tool_filter(declaration)
        if not (
            is_tool_name(name) and selects_name(allowed, name) and self._catalog.find_policy(declaration).allows(name)
        ):
            raise _tool_not_allowed(name)
        _check_arguments(arguments)
        deadline = asyncio.get_running_loop().time() + self._config.call_timeout_s

        async def call(session: McpSession) -> CallToolResult:
            if allowed.read_only is not None or listed_tool is not None:
                tools = session.tool_listing
                if tools is None:
                    tools = await _list_tools(session, declaration.server_label, server, deadline)
                _check_tool(tools, name, allowed, listed_tool)
            return await session.call_tool(name, dict(arguments))

        with _request_span("tools/call", server, name) as span:
            result = await self._use_session(self._config.call_timeout_s, (tenant, server.identity), server, call)
            if result.is_error:
                span.fail("tool_error")
        if result.is_error:
            raise execution_error(name, result, server.secrets)
        return result_to_text(result, server.secrets)

    async def _use_session(
        self,
        timeout_s: float,
        session_key: SessionKey,
        server: McpServerTarget,
        use: Callable[[McpSession], Awaitable[_Result]],
    ) -> _Result:
        """Use a session, and once more another one where its server does not know it (any more)."""
        try:
            async with asyncio.timeout(timeout_s):
                for is_last in (False, True):
                    async with self._sessions.use_session(
                        session_key, lambda: self._build_connector(server)
                    ) as session:
                        try:
                            return await use(session)
                        except SessionLost:
                            if is_last:
                                raise
                raise AssertionError("the last attempt returns or raises")
        except TimeoutError:
            raise protocol_error(REQUEST_TIMEOUT, f"The MCP server did not answer within {timeout_s:g} s.") from None

    def _build_connector(self, server: McpServerTarget) -> SessionConnector:
        if isinstance(server, LocalServer):
            return SessionConnector(
                lambda _: open_stdio_streams(server.command, server.args, server.env), secrets=server.secrets
            )
        wire = FetcherTransport(
            self._fetcher,
            server.url,
            server.transport,
            self._config.call_timeout_s,
            allow_private=server.is_private,
        )
        return SessionConnector(
            lambda end: wire.open_streams(server.headers, end),
            is_legacy=server.transport == "sse",
            secrets=server.secrets,
            is_expiring=lambda: wire.is_expiring,
        )


def _request_span(method: str, server: McpServerTarget, tool: str = "") -> Span:
    """Return the span of one MCP request, which covers the opening of the session and repeated attempts."""
    attributes: dict[str, AttributeValue] = {"mcp.method.name": method}
    if tool:
        attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
    if isinstance(server, LocalServer):
        attributes["network.transport"] = "pipe"
    else:
        origin = urlsplit(server.url)
        port = origin.port or (443 if origin.scheme == "https" else 80)
        attributes |= {
            "network.transport": "tcp",
            "network.protocol.name": "http",
            "server.address": origin.hostname or "",
            "server.port": port,
        }
    return open_span(SpanType.MCP_REQUEST, f"{method} {tool}".strip(), attributes)


async def _list_tools(
    session: McpSession, server_label: str, server: McpServerTarget, deadline: float
) -> Sequence[ServerTool]:
    listed = await session.list_tools(deadline)
    session.tool_listing = tools = await convert_tools(*listed, server_label, server.secrets)
    return tools


def _check_tool(tools: Sequence[ServerTool], name: str, allowed: ToolFilter, listed_tool: ServerTool | None) -> None:
    tool = next((tool for tool in tools if tool.name == name and matches_filter(allowed, tool)), None)
    if listed_tool not in (None, tool):
        state = "no longer there" if tool is None else "no longer what it was when it was listed"
        failure = protocol_error(INVALID_PARAMS, f"The tool '{one_line(name, 64)}' is {state}.")
        raise ToolChanged(failure.message, failure.error, tool)
    if tool is None:
        raise _tool_not_allowed(name)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    try:
        size = len(json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode())
    except (ValueError, TypeError, RecursionError):
        raise protocol_error(INVALID_PARAMS, "The arguments hold what cannot be sent as JSON.") from None
    if size > _MAX_ARGUMENTS_BYTES:
        raise protocol_error(INVALID_PARAMS, f"The arguments are larger than {_MAX_ARGUMENTS_BYTES} bytes.")


def _tool_not_allowed(name: str) -> ToolServerFailed:
    return protocol_error(INVALID_PARAMS, f"The MCP server has no tool '{one_line(name, 64)}' that may be called.")
