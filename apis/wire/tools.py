"""The tools that a Responses request may declare."""

import re
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlsplit

from openai.types.responses.tool import Mcp
from pydantic import AfterValidator, Discriminator, Field, Tag, field_serializer

from apis.wire.base import JsonValue, ToolWire, Wire
from apis.wire.computer import ComputerTool, ComputerUsePreviewTool
from apis.wire.image_tools import ImageGenerationTool
from apis.wire.text_format import Grammar, TextFormatInput

DeclaredName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Domain = Annotated[str, Field(min_length=1, max_length=253)]
_DOMAIN: Final = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]")
Id = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]
VaultIds = Annotated[list[Id], Field(max_length=10)]
"""Vaults with credentials for the tools of a request, or of a session."""


_SDK_CONNECTORS: Final = get_args(get_args(Mcp.model_fields["connector_id"].annotation)[0])
AllowedCallers = list[Literal["direct"]] | None
"""Who may call a tool: a program, which may call tools in OpenAI's API as the model does, is refused."""


class FunctionTool(ToolWire):
    """A function that the client runs. `strict` constrains the model to the schema if the engine supports it. With
    `defer_loading` it is offered only after a tool search returned it."""

    type: Literal["function"]
    name: DeclaredName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, JsonValue] | None = None
    allowed_callers: AllowedCallers = None
    is_async: bool | None = Field(None, alias="async")
    runs_at_client = True

    def echo(self) -> dict[str, Any]:
        # always present, for clients that validate the echo against a schema
        return {"description": None, "parameters": None, **super().echo(), "strict": bool(self.strict)}


class GrammarFormat(Grammar):
    type: Literal["grammar"]


class CustomTool(ToolWire):
    """A tool that the client runs on free text, or on text of a grammar."""

    type: Literal["custom"]
    name: DeclaredName
    description: str | None = None
    format: Annotated[TextFormatInput | GrammarFormat, Field(discriminator="type")] | None = None
    defer_loading: bool | None = None
    allowed_callers: AllowedCallers = None
    is_async: bool | None = Field(None, alias="async")
    runs_at_client = True

    def echo(self) -> dict[str, Any]:
        return {"format": {"type": "text"}, **super().echo()}


class NamespaceTool(ToolWire):
    """Tools of the client's under one name. Its calls carry it as `namespace`."""

    type: Literal["namespace"]
    name: DeclaredName
    description: str = ""
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(max_length=128)
    runs_at_client = True

    def echo(self) -> dict[str, Any]:
        return {**super().echo(), "tools": [tool.echo() for tool in self.tools]}


def ascii_domain(name: str) -> str:
    """Return a domain in comparable form: ASCII, lower case, no final dot. Raises ValueError for any other text."""
    try:
        ascii_name = name.encode("idna").decode("ascii").lower().rstrip(".")
    except UnicodeError:
        ascii_name = ""
    if len(ascii_name) > 253 or not _DOMAIN.fullmatch(ascii_name):
        raise ValueError("expected a domain such as example.com, without https:// and without a path")
    return ascii_name


def _validate_domain(name: str) -> str:
    ascii_domain(name)
    return name


SearchDomain = Annotated[Domain, AfterValidator(_validate_domain)]


class SearchFilters(Wire):
    """Domains, each with its subdomains: neither URLs nor patterns."""

    allowed_domains: list[SearchDomain] | None = Field(None, max_length=100)
    blocked_domains: list[SearchDomain] | None = Field(None, max_length=100)


class UserLocation(Wire):
    type: Literal["approximate"] | None = None
    city: str | None = None
    country: str | None = Field(None, pattern=r"^[A-Za-z]{2}$")
    region: str | None = None
    timezone: str | None = None


class WebSearchTool(ToolWire):
    """The web search, in all its spellings. With `external_web_access: false` no page is fetched; with `search: false`
    the model opens pages and does not search."""

    type: Literal[
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "browser_search"
    ]
    filters: SearchFilters | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: UserLocation | None = None
    external_web_access: bool | None = None
    search_content_types: list[Literal["text", "image"]] | None = None
    search: bool | None = None

    def echo(self) -> dict[str, Any]:
        return {**super().echo(), "type": "web_search" if self.type == "browser_search" else self.type}


class NoNetwork(Wire):
    type: Literal["disabled"]


class DomainSecret(Wire):
    domain: Domain
    name: str
    value: str = Field(repr=False)


class NetworkAllowlist(Wire):
    """Only these domains. Secrets are never dumped: neither echoed nor stored."""

    type: Literal["allowlist"]
    allowed_domains: list[Domain] = Field(max_length=100)
    domain_secrets: list[DomainSecret] | None = Field(None, max_length=100, exclude=True, repr=False)


NetworkPolicy = Annotated[NoNetwork | NetworkAllowlist, Field(discriminator="type")]


class AutoContainer(Wire):
    """A container that the server chooses, the same one along a chain of responses."""

    type: Literal["auto"] = "auto"
    file_ids: list[Id] | None = Field(default=None, max_length=50)
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    network_policy: NetworkPolicy | None = None


def _container_tag(value: Any) -> str:
    return "id" if isinstance(value, str) else "auto"


class CodeInterpreterTool(ToolWire):
    """Python in the container of this id, or in one that the server creates."""

    type: Literal["code_interpreter"]
    allowed_callers: AllowedCallers = None
    container: Annotated[
        Annotated[Id, Tag("id")] | Annotated[AutoContainer, Tag("auto")], Discriminator(_container_tag)
    ] = AutoContainer()


class ToolFilter(Wire):
    """Selects tools by name, or by the server's own `readOnlyHint`. `excluded_names` are never selected."""

    tool_names: list[str] | None = Field(None, max_length=1000)
    excluded_names: list[str] | None = Field(default=None, max_length=1000)
    read_only: bool | None = None


class Approvals(Wire):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


def _allowed_tools_tag(value: Any) -> str:
    return "names" if isinstance(value, list) else "filter"


def _approval_tag(value: Any) -> str:
    return "mode" if isinstance(value, str) else "filter"


class McpTool(ToolWire):
    """The tools of an MCP server, by URL or by the name of a connector.

    `authorization` and `headers` exist only in the request: they are never dumped, so neither echoed, stored nor
    logged. `credential_id`, an extension, is the credential of a vault that is sent instead. Of the URL only the origin
    is dumped, because the rest may hold secrets. With `defer_loading` and a tool search, the server is contacted only
    after a search returned it. A request cannot start a program on this server: `command`, `args` and `env` are read so
    that the error can name them.
    """

    type: Literal["mcp"]
    allowed_callers: AllowedCallers = None
    server_label: DeclaredName
    server_url: str | None = Field(None, min_length=1, max_length=4096, repr=False)
    connector_id: Id | None = None
    tunnel_id: Id | None = None
    authorization: str | None = Field(None, exclude=True, repr=False)
    credential_id: Id | None = None
    headers: dict[str, str] | None = Field(None, max_length=100, exclude=True, repr=False)
    server_description: str | None = None
    allowed_tools: (
        Annotated[
            Annotated[list[str], Field(max_length=1000), Tag("names")] | Annotated[ToolFilter, Tag("filter")],
            Discriminator(_allowed_tools_tag),
        ]
        | None
    ) = None
    require_approval: (
        Annotated[
            Annotated[Literal["always", "never"], Tag("mode")] | Annotated[Approvals, Tag("filter")],
            Discriminator(_approval_tag),
        ]
        | None
    ) = None
    defer_loading: bool | None = None
    command: JsonValue = Field(None, exclude=True, repr=False)
    args: JsonValue = Field(None, exclude=True, repr=False)
    env: JsonValue = Field(None, exclude=True, repr=False)

    @field_serializer("server_url")
    def _origin(self, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
        except ValueError:
            return ""
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def echo(self) -> dict[str, Any]:
        fields = super().echo()
        if self.connector_id not in _SDK_CONNECTORS:  # it is one of this server's own
            fields.pop("connector_id", None)
        return fields


class ComparisonFilter(Wire):
    """Selects the files whose attribute `key` compares in this way with `value`."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str
    value: str | bool | int | float | list[str | int | float]


class CompoundFilter(Wire):
    type: Literal["and", "or"]
    filters: list["FileFilter"] = Field(max_length=100)


def _filter_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - any JSON
    return "compound" if kind in ("and", "or") else "comparison"


FileFilter = Annotated[
    Annotated[ComparisonFilter, Tag("comparison")] | Annotated[CompoundFilter, Tag("compound")],
    Discriminator(_filter_tag),
]


class HybridWeights(Wire):
    embedding_weight: float = Field(ge=0)
    text_weight: float = Field(ge=0)


class RankingOptions(Wire):
    ranker: Literal["auto", "default-2024-11-15"] | None = None
    score_threshold: float | None = Field(None, ge=0, le=1)
    hybrid_search: HybridWeights | None = None


class FileSearchTool(ToolWire):
    """A search in the uploaded files of vector stores."""

    type: Literal["file_search"]
    vector_store_ids: list[Id] = Field(min_length=1, max_length=20)
    max_num_results: int | None = Field(None, ge=1, le=50)
    filters: FileFilter | None = None
    ranking_options: RankingOptions | None = None


class ToolSearchTool(ToolWire):
    """A search for deferred tools. With `client` the client runs it and returns the tools; with `server`, the default,
    this server finds them by their words. MCP servers wait only for the client's search."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class LocalShellTool(ToolWire):
    """Commands that the client runs, one by one, each a list of words."""

    type: Literal["local_shell"]
    runs_at_client = True


class Skill(Wire):
    name: str
    description: str
    path: str


class LocalEnvironment(Wire):
    type: Literal["local"]
    skills: list[Skill] | None = Field(None, max_length=200)


class InlineSkillSource(Wire):
    """ZIP archive of a skill's folder, in base64."""

    type: Literal["base64"]
    media_type: Literal["application/zip"]
    data: str = Field(max_length=16 * 1024 * 1024, repr=False)


class InlineSkill(Wire):
    """A skill that the request brings with it."""

    type: Literal["inline"]
    name: str = Field(min_length=1, max_length=64)
    description: str = Field(min_length=1, max_length=1024)
    source: InlineSkillSource


class SkillReference(Wire):
    """A stored skill, in its default version unless it names another: a number, or `latest`."""

    type: Literal["skill_reference"]
    skill_id: Id
    version: str | None = Field(None, max_length=20)


SkillSource = Annotated[InlineSkill | SkillReference, Field(discriminator="type")]


class ContainerAutoEnvironment(Wire):
    """A container that the server chooses, the same one along a chain of responses."""

    type: Literal["container_auto"]
    file_ids: list[Id] | None = Field(default=None, max_length=50)
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    network_policy: NetworkPolicy | None = None
    skills: list[SkillSource] | None = Field(None, max_length=32)


class ContainerReferenceEnvironment(Wire):
    type: Literal["container_reference"]
    container_id: Id


class ShellTool(ToolWire):
    """Shell commands, several at a time: in a container of this server, or, by default, where the client is."""

    type: Literal["shell"]
    allowed_callers: AllowedCallers = None
    environment: (
        Annotated[
            LocalEnvironment | ContainerAutoEnvironment | ContainerReferenceEnvironment, Field(discriminator="type")
        ]
        | None
    ) = None

    def echo(self) -> dict[str, Any]:
        """Leave out the archives of skills, which would come with every event that holds the response."""
        fields = super().echo()
        for skill in fields.get("environment", {}).get("skills", ()):
            if "source" in skill:
                skill["source"]["data"] = ""
        return fields


class ApplyPatchTool(ToolWire):
    """Files that the client creates, deletes or edits by a diff."""

    type: Literal["apply_patch"]
    allowed_callers: AllowedCallers = None
    runs_at_client = True


Tool = Annotated[
    FunctionTool
    | CustomTool
    | NamespaceTool
    | WebSearchTool
    | CodeInterpreterTool
    | McpTool
    | FileSearchTool
    | ToolSearchTool
    | LocalShellTool
    | ShellTool
    | ApplyPatchTool
    | ImageGenerationTool
    | ComputerTool
    | ComputerUsePreviewTool,
    Field(discriminator="type"),
]
TOOL_TYPES: Final[tuple[type[ToolWire], ...]] = get_args(get_args(Tool)[0])
"""The types of declarations."""
