"""MCP: lists and calls the tools of MCP servers that requests declare or the run config names."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

from mcp_types import INVALID_PARAMS, REQUEST_TIMEOUT, CallToolResult
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apis.errors import ToolFailed
from apis.fetcher import Fetcher
from apis.provider import Provider
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime, ToolSpec
from providers.tool_runtime.mcp.listing import is_tool_name, is_unchanged, tools_to_json
from providers.tool_runtime.mcp.servers import (
    LocalServer,
    McpServerConfig,
    McpServerTarget,
    ServerCatalog,
    ServerDeclaration,
    Url,
    parse_declaration,
)
from providers.tool_runtime.mcp.sessions import McpSession, McpSessionPool, SessionConnector, SessionLost
from providers.tool_runtime.mcp.stdio import open_stdio_streams
from providers.tool_runtime.mcp.texts import execution_error, one_line, protocol_error, result_to_text
from providers.tool_runtime.mcp.wire import FetcherTransport

_log = logging.getLogger(__name__)

_LIST_TOOLS: Final = ToolSpec(
    name="mcp_list_tools",
    description="List the tools of an MCP server.",
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
)
_CALL_TOOL: Final = ToolSpec(
    name="mcp_call",
    description="Call a tool of an MCP server.",
    parameters={
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "The tool's name."},
            "arguments": {"type": "object", "description": "What the tool is given."},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
)
_CHECK_SERVER: Final = ToolSpec(
    name="mcp_check_server",
    description="Look whether the declaration of an MCP server can be followed, without asking the server.",
    parameters={"type": "object", "properties": {}, "additionalProperties": False},
)
_MAX_ARGUMENTS_BYTES: Final = 1024 * 1024
_SDK_LOGGERS: Final = ("client", "httpx2", "mcp.client", "mcp.shared")
"""The SDK's loggers."""

_Result = TypeVar("_Result")
_Model = TypeVar("_Model", bound=BaseModel)


class _NoArguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    arguments: dict[str, Any]


class MCP(ToolRuntime):
    """A client of MCP servers (https://modelcontextprotocol.io) over streamable HTTP, SSE, and, from the config only,
    stdio.

    The option `server` of a call is the request's declaration: `server_label`, and `server_url` or `connector_id` or
    neither (then the label is one of the config's `servers`), `authorization`, `headers`, `allowed_tools` (names, or
    `{tool_names, read_only}`), `transport` (else SSE where the path ends in /sse, and streamable HTTP elsewhere), and
    for a call `pinned`, the tools as they were listed before: a tool that has changed since is not called.

    `mcp_list_tools` gives as `data` a list of `{name, description, input_schema, annotations}`: the allowed tools
    that a model can be told of. `mcp_call` gives the result's text. `mcp_check_server` gives nothing. The `detail` of a
    failure has the `type` `mcp_protocol_error` or `http_error`, with `code` and `message`, or
    `mcp_tool_execution_error`, with `content`; where the declaration is wrong, `param` says by which of its fields.

    Credentials go to the server's origin only, and are blotted out wherever the server says them.
    """

    class Config(Provider.Config):
        """`allowed_hosts`, where set, are the only hosts of a request's `server_url`, each with its subdomains.
        `list_timeout_s` bounds connecting too. Of `max_sessions`, the longest unused makes room for a new one."""

        model_config = ConfigDict(hide_input_in_errors=True)

        servers: dict[str, McpServerConfig] = Field(default_factory=dict[str, McpServerConfig])
        connectors: dict[str, Url] = Field(default_factory=dict[str, Url])
        allowed_hosts: list[str] | None = None
        list_timeout_s: float = Field(30.0, gt=0, le=600)
        call_timeout_s: float = Field(60.0, gt=0, le=3600)
        max_sessions: int = Field(32, gt=0)
        idle_s: float = Field(300.0, gt=0)

    def __init__(self, config: Config, fetcher: Fetcher) -> None:
        self._config = config
        self._fetcher = fetcher
        hosts = None if config.allowed_hosts is None else [host.lower().rstrip(".") for host in config.allowed_hosts]
        self._catalog = ServerCatalog(config.servers, config.connectors, hosts)
        self._sessions = McpSessionPool(config.max_sessions, config.idle_s, config.list_timeout_s)

    async def start(self) -> None:
        # They write down whole messages, and of a wrong one even at the highest level: whatever the server says.
        for name in _SDK_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    async def close(self) -> None:
        await self._sessions.close()

    def tools(self) -> Sequence[ToolSpec]:
        return (_LIST_TOOLS, _CALL_TOOL, _CHECK_SERVER)

    async def call(self, call: ToolCall) -> ToolResult:
        match call.name:
            case _LIST_TOOLS.name:
                _validate_arguments(_NoArguments, call.arguments)
                return await self._list_tools(call)
            case _CALL_TOOL.name:
                return await self._call_tool(call, _validate_arguments(_Arguments, call.arguments))
            case _CHECK_SERVER.name:
                self._catalog.find_server(parse_declaration(call.options))
                return ToolResult("The declaration can be followed.")
            case _:
                raise ToolFailed(f"There is no tool '{one_line(call.name, 64)}' here.")

    async def _list_tools(self, call: ToolCall) -> ToolResult:
        declaration = parse_declaration(call.options)
        server = self._catalog.find_server(declaration)

        async def run(session: McpSession) -> Sequence[dict[str, Any]]:
            return await _list_server_tools(session, declaration, server)

        tools = await self._use_session(self._config.list_timeout_s, call, server, run)
        permitted = [tool for tool in tools if declaration.permits_tool(tool)]
        return ToolResult(f"{len(permitted)} tools.", data=permitted)

    async def _call_tool(self, call: ToolCall, arguments: _Arguments) -> ToolResult:
        declaration = parse_declaration(call.options)
        server = self._catalog.find_server(declaration)
        allowed = declaration.tool_filter
        if not is_tool_name(arguments.name) or (
            allowed.tool_names is not None and arguments.name not in allowed.tool_names
        ):
            raise _tool_not_allowed(arguments.name)
        _check_arguments(arguments.arguments)

        async def run(session: McpSession) -> CallToolResult:
            if allowed.read_only is not None or declaration.pinned is not None:
                tools = session.tool_listing
                _check_tool(
                    await _list_server_tools(session, declaration, server) if tools is None else tools,
                    arguments.name,
                    declaration,
                )
            return await session.call_tool(arguments.name, arguments.arguments)

        result = await self._use_session(self._config.call_timeout_s, call, server, run)
        if result.is_error:
            raise execution_error(arguments.name, result, server.secrets)
        return ToolResult(result_to_text(result, server.secrets))

    async def _use_session(
        self, timeout_s: float, call: ToolCall, server: McpServerTarget, use: Callable[[McpSession], Awaitable[_Result]]
    ) -> _Result:
        key: Hashable = (call.tenant, server.identity)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    async with self._sessions.use_session(key, lambda: self._build_connector(server)) as session:
                        served = session.completed_calls
                        try:
                            return await use(session)
                        except SessionLost:
                            # A server that was started anew knows none of before; one just opened it ought to know.
                            if not served:
                                raise
        except TimeoutError:
            raise protocol_error(REQUEST_TIMEOUT, f"The MCP server did not answer within {timeout_s:g} s.") from None

    def _build_connector(self, server: McpServerTarget) -> SessionConnector:
        if isinstance(server, LocalServer):
            return SessionConnector(
                lambda _: open_stdio_streams(server.command, server.args, server.env), secrets=server.secrets
            )
        wire = FetcherTransport(self._fetcher, server.url, server.transport, self._config.call_timeout_s)
        return SessionConnector(
            lambda end: wire.open_streams(server.headers, end),
            is_legacy=server.transport == "sse",
            secrets=server.secrets,
            is_expiring=lambda: wire.is_expiring,
        )


async def _list_server_tools(
    session: McpSession, declaration: ServerDeclaration, server: McpServerTarget
) -> Sequence[dict[str, Any]]:
    tools = tools_to_json(await session.list_tools(), declaration.server_label, server.secrets)
    session.tool_listing = tools
    return tools


def _check_tool(tools: Sequence[Mapping[str, Any]], name: str, declaration: ServerDeclaration) -> None:
    tool = next((tool for tool in tools if tool["name"] == name), None)
    if tool is None or not declaration.permits_tool(tool):
        raise _tool_not_allowed(name)
    if declaration.pinned is not None and not is_unchanged(tool, declaration.pinned):
        raise protocol_error(INVALID_PARAMS, f"The tool '{name}' is no longer what it was when it was listed.")


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    try:
        size = len(json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode())
    except (ValueError, TypeError, RecursionError):
        raise protocol_error(INVALID_PARAMS, "The arguments hold what cannot be sent as JSON.") from None
    if size > _MAX_ARGUMENTS_BYTES:
        raise protocol_error(INVALID_PARAMS, f"The arguments are larger than {_MAX_ARGUMENTS_BYTES} bytes.")


def _tool_not_allowed(name: str) -> ToolFailed:
    return protocol_error(INVALID_PARAMS, f"The MCP server has no tool '{one_line(name, 64)}' that may be called.")


def _validate_arguments(model: type[_Model], arguments: Mapping[str, Any]) -> _Model:
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(step) for step in first["loc"])
        raise protocol_error(INVALID_PARAMS, f"Wrong arguments: {one_line(path, 64)}: {first['msg']}") from None
