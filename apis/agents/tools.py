"""The tools that an agent may have."""

from typing import Annotated, Literal

from pydantic import Field

from apis.wire.base import JsonValue, Wire
from apis.wire.tools import DeclaredName, SearchDomain

CONNECTOR_SCHEME = "connector:"
"""Beginning of a `server_url` that names an MCP server of the run config."""


class AgentFunction(Wire):
    """A function that the client runs. With `defer_loading` a tool search has to find it first."""

    type: Literal["function"]
    name: DeclaredName
    description: str = Field(max_length=65_536)
    parameters: dict[str, JsonValue]
    defer_loading: bool | None = None


class AgentToolSearch(Wire):
    """A search for functions with `defer_loading`."""

    type: Literal["tool_search"]


class McpTransport(Wire):
    """The address of an MCP server, `connector:NAME` for one of the run config."""

    type: Literal["http"]
    server_url: str = Field(min_length=1, max_length=4096, repr=False)
    headers: dict[str, str] | None = Field(None, max_length=100, repr=False)
    authorization: str | None = Field(None, max_length=65_536, repr=False)


class AgentMcp(Wire):
    """The tools of an MCP server. Without `credential_id`, the one credential of the session's vaults that is for the
    server is sent to it, if there is one. `require_approval` is an extension: with `always`, each call waits for an
    answer of the client."""

    type: Literal["mcp"]
    server_label: DeclaredName
    transport: McpTransport
    allowed_tools: list[str] | None = Field(None, max_length=1000)
    connection_origin: Literal["service"] | None = None
    credential_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    required: bool | None = None
    require_approval: Literal["always", "never"] | None = None


class SearchPlace(Wire):
    city: str | None = None
    country: str | None = Field(None, pattern=r"^[A-Za-z]{2}$")
    region: str | None = None
    timezone: str | None = None


class AgentWebSearch(Wire):
    """The web search of this server. With `cached` no page is fetched."""

    type: Literal["web_search"]
    mode: Literal["disabled", "cached", "live"] | None = None
    allowed_domains: list[SearchDomain] | None = Field(None, max_length=100)
    context_size: Literal["low", "medium", "high"] | None = None
    location: SearchPlace | None = None


AgentTool = Annotated[
    AgentFunction | AgentToolSearch | AgentMcp | AgentWebSearch,
    Field(discriminator="type"),
]
AgentTools = Annotated[list[AgentTool], Field(max_length=128)]
