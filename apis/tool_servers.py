"""ToolServers: lists and calls the tools of MCP servers that requests declare."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from openai.types.responses.mcp_tool_call_error import McpProtocolError, McpToolCallError
from pydantic import JsonValue

from apis.errors import ToolFailed
from apis.provider import Provider
from apis.wire.tools import McpTool, ToolFilter

_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServerTool:
    """One tool of a server. `input_schema` is the JSON schema of its arguments object, `annotations` holds the hints
    that MCP defines (`readOnlyHint` for one). https://modelcontextprotocol.io/specification"""

    name: str
    description: str
    input_schema: dict[str, JsonValue]
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ToolServerFailed(ToolFailed):
    """A server cannot be used, or one of its tools failed. `error` is the failure as a client is shown it."""

    def __init__(self, message: str, error: McpToolCallError) -> None:
        super().__init__(message)
        self.error = error


class InvalidDeclaration(ToolServerFailed):
    """A declaration that no server can be reached by; `field_name` is its wrong field."""

    def __init__(self, field_name: str, error: McpProtocolError) -> None:
        super().__init__(error.message, error)
        self.field_name = field_name


class ToolServers(Provider, ABC):
    """Servers with tools. Implementations bound every request in time and every result in size, never share a session
    between tenants, send credentials to the declared server's origin only, and redact them in all that it returns."""

    @abstractmethod
    async def check_declaration(self, declaration: McpTool) -> None:
        """Raise InvalidDeclaration where the declaration names no server that may be used; the server is not
        contacted."""

    @abstractmethod
    async def list_tools(self, declaration: McpTool, *, tenant: str) -> Sequence[ServerTool]:
        """Return the server's tools that the declaration allows and a model can be offered, in the server's order.
        Raises ToolServerFailed."""

    @abstractmethod
    async def call_tool(
        self,
        declaration: McpTool,
        name: str,
        arguments: Mapping[str, Any],
        *,
        tenant: str,
        listed_tool: ServerTool | None = None,
    ) -> str:
        """Return the result of one call as text of at most 1 MiB. Raises ToolServerFailed.

        A tool that the declaration does not allow is not called; nor, with `listed_tool`, one that its server has
        changed since it was listed. Cancelling stops the work.
        """


def is_tool_name(name: str) -> bool:
    """Return True for names that MCP allows (SEP-986)."""
    return _TOOL_NAME.fullmatch(name) is not None


def allowed_tool_filter(declaration: McpTool) -> ToolFilter:
    """Return the declaration's `allowed_tools` in its one general form."""
    allowed = declaration.allowed_tools
    return allowed if isinstance(allowed, ToolFilter) else ToolFilter(tool_names=allowed)


def matches_filter(tool_filter: ToolFilter, tool: ServerTool) -> bool:
    """Return True where the filter selects the tool; an empty filter selects every tool."""
    read_only = tool.annotations.get("readOnlyHint") is True
    return (tool_filter.tool_names is None or tool.name in tool_filter.tool_names) and (
        tool_filter.read_only is None or tool_filter.read_only == read_only
    )
