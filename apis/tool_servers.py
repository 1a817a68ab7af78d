"""ToolServers: lists and calls the tools of MCP servers that requests declare."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from openai.types.responses.mcp_tool_call_error import McpProtocolError, McpToolCallError

from apis.errors import ToolFailed
from apis.provider import Provider
from apis.wire.base import JsonValue
from apis.wire.tools import McpTool, ToolFilter

_MAX_TOOL_NAME_CHARS: Final = 128


@dataclass(frozen=True, slots=True)
class ServerTool:
    """One tool of a server. `input_schema` is the JSON schema of its arguments object, `annotations` holds the hints
    that MCP defines (`readOnlyHint` for one). https://modelcontextprotocol.io/specification"""

    name: str
    description: str
    input_schema: dict[str, JsonValue]
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ServerPolicy:
    """The operator's own limits of a server, which hold together with those of a request's declaration.

    Only `allowed_tools` may be called, None for all; `approval_required` are the tools that need an approval, None for
    all of them.
    """

    allowed_tools: frozenset[str] | None = None
    approval_required: frozenset[str] | None = frozenset()

    def allows(self, tool_name: str) -> bool:
        """Return True where the tool may be offered and called."""
        return self.allowed_tools is None or tool_name in self.allowed_tools

    def requires_approval(self, tool_name: str) -> bool:
        """Return True where each call needs an approval, however the request declares the server."""
        return self.approval_required is None or tool_name in self.approval_required


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


class ToolChanged(ToolServerFailed):
    """A tool is not called, because its server describes it otherwise than when it was listed. `tool` is its present
    description, None where the server has the tool no more."""

    def __init__(self, message: str, error: McpToolCallError, tool: ServerTool | None) -> None:
        super().__init__(message, error)
        self.tool = tool


class ToolServers(Provider, ABC):
    """Servers with tools. Implementations bound every request in time and every result in size, never share a session
    between tenants, send credentials to the declared server's origin only, and redact them in all that it returns."""

    @abstractmethod
    async def check_declaration(self, declaration: McpTool, *, tenant: str) -> None:
        """Raise InvalidDeclaration where the declaration names no server that the tenant may use; the server is not
        contacted."""

    def find_policy(self, declaration: McpTool) -> ServerPolicy:
        """Return the operator's limits of the declared server; by default there are none."""
        return ServerPolicy()

    def known_labels(self, tenant: str) -> Sequence[str]:
        """Return the labels of the servers that the tenant may declare without a URL."""
        return ()

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
        changed since it was listed, which raises ToolChanged. Cancelling stops the work.
        """


def is_tool_name(name: str) -> bool:
    """Return True for a name that a tool can have: at most 128 printable characters. MCP recommends letters, digits and
    `_-./`, and servers have others. Models see a name of their own alphabet in its place."""
    return 0 < len(name) <= _MAX_TOOL_NAME_CHARS and name.isprintable() and not name.isspace()


def allowed_tool_filter(declaration: McpTool) -> ToolFilter:
    """Return the declaration's `allowed_tools` in its one general form."""
    allowed = declaration.allowed_tools
    return allowed if isinstance(allowed, ToolFilter) else ToolFilter(tool_names=allowed)


def matches_filter(tool_filter: ToolFilter, tool: ServerTool) -> bool:
    """Return True where the filter selects the tool; an empty filter selects every tool."""
    read_only = tool.annotations.get("readOnlyHint") is True
    return selects_name(tool_filter, tool.name) and tool_filter.read_only in (None, read_only)


def selects_name(tool_filter: ToolFilter, name: str) -> bool:
    """Return True where the filter may select a tool of this name, as far as names decide."""
    is_named = tool_filter.tool_names is None or name in tool_filter.tool_names
    return is_named and name not in (tool_filter.excluded_names or ())
