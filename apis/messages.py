"""The requests of Anthropic's Messages API. Unknown fields are ignored, because its clients send fields of many betas.

The models have no `extra` in their config: pydantic then ignores unknown fields, and no field counts as misspelt.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from apis.wire.base import JsonValue
from apis.wire.item_parts import text_or_list

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class MessagePart(BaseModel):
    """A part of a request of the Messages API: strict in its known fields."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)


class Base64Source(MessagePart):
    type: Literal["base64"]
    media_type: str = Field(max_length=128)
    data: str


class UrlSource(MessagePart):
    type: Literal["url"]
    url: str


class FileSource(MessagePart):
    type: Literal["file"]
    file_id: _Name


class TextSource(MessagePart):
    type: Literal["text"]
    data: str


class TextBlock(MessagePart):
    type: Literal["text"]
    text: str


class ImageBlock(MessagePart):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class ContentSource(MessagePart):
    """A document that consists of blocks."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], Tag("list")],
        Discriminator(text_or_list),
    ]


class DocumentBlock(MessagePart):
    type: Literal["document"]
    source: Annotated[Base64Source | UrlSource | FileSource | TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(MessagePart):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(MessagePart):
    """The name of a tool that a tool search of the client has found."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(MessagePart):
    """Reasoning of an earlier answer. Only the signature counts: it is the sealed reasoning."""

    type: Literal["thinking"]
    thinking: str | None = None
    signature: str | None = None


class RedactedThinkingBlock(MessagePart):
    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(MessagePart):
    type: Literal["tool_use"]
    id: _Name
    name: _Name
    input: JsonValue = None


class ToolResultBlock(MessagePart):
    type: Literal["tool_result"]
    tool_use_id: _Name
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[
                list[
                    Annotated[
                        TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
                        Field(discriminator="type"),
                    ]
                ],
                Field(fail_fast=True),
                Tag("list"),
            ],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    is_error: bool | None = None


class ContainerUploadBlock(MessagePart):
    """A file for the programs of the code execution, which the model does not read."""

    type: Literal["container_upload"]
    file_id: _Name


class ServerToolUseBlock(MessagePart):
    """A call that a server ran, this one or another."""

    type: Literal["server_tool_use"]
    id: _Name
    name: _Name
    input: JsonValue = None


class McpToolUseBlock(MessagePart):
    """A call of a tool of an MCP server."""

    type: Literal["mcp_tool_use"]
    id: _Name
    name: _Name
    server_name: _Name
    input: JsonValue = None


class ServerToolResultBlock(MessagePart):
    """The result of a call that a server ran, this one or another."""

    type: Literal[
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_result",
    ]
    tool_use_id: _Name
    content: JsonValue = None
    is_error: bool | None = None


MessageBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ContainerUploadBlock
    | ServerToolUseBlock
    | McpToolUseBlock
    | ServerToolResultBlock,
    Field(discriminator="type"),
]


class MessageTurn(MessagePart):
    """A turn of the conversation; `system` stands for instructions that come later than the first ones."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[MessageBlock], Field(fail_fast=True), Tag("list")],
        Discriminator(text_or_list),
    ]


class ToolLocation(MessagePart):
    city: str | None = None
    country: str | None = None
    region: str | None = None
    timezone: str | None = None


class McpToolConfig(MessagePart):
    """Settings of one tool of an MCP server, or of all of them. Servers are deferred whole."""

    enabled: bool | None = None
    defer_loading: bool | None = None


class McpToolConfiguration(MessagePart):
    """The tools of an MCP server in the older form: without a toolset."""

    enabled: bool | None = None
    allowed_tools: Annotated[list[str], Field(max_length=1000)] | None = None


class McpServerDefinition(MessagePart):
    """An MCP server. Its token exists only in the request."""

    type: Literal["url"]
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    url: str = Field(min_length=1, max_length=4096, repr=False)
    authorization_token: str | None = Field(None, repr=False)
    tool_configuration: McpToolConfiguration | None = None


class ContainerReference(MessagePart):
    """The container of an earlier message."""

    id: _Name | None = None
    skills: JsonValue = None


class MessageTool(MessagePart):
    """A tool. Without `type`, or with `custom`, it is a function of the client; a type that ends with a date is one of
    Anthropic's own tools. With `defer_loading` a function waits for the tool search, where there is one."""

    type: str | None = Field(None, max_length=64)
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None
    strict: bool | None = None
    max_uses: int | None = Field(None, ge=1)
    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None
    user_location: ToolLocation | None = None
    defer_loading: bool | None = None
    mcp_server_name: str | None = None
    default_config: McpToolConfig | None = None
    configs: dict[str, McpToolConfig] | None = Field(None, max_length=1000)


class MessageToolChoice(MessagePart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(MessagePart):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessageFormat(MessagePart):
    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(MessagePart):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class Diagnostics(MessagePart):
    """Asks why the prompt is not that of an earlier message with more messages after it. Null begins such a chain."""

    previous_message_id: str | None = Field(None, max_length=512)


class MessageMetadata(MessagePart):
    user_id: str | None = None


class CountMessageTokens(MessagePart):
    """A request to count the tokens of the prompt that a message would have."""

    model: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")
    messages: list[MessageTurn] = Field(min_length=1, max_length=100_000)
    system: (
        Annotated[Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("list")], Discriminator(text_or_list)]
        | None
    ) = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    mcp_servers: list[McpServerDefinition] | None = Field(None, max_length=32)
    container: (
        Annotated[
            Annotated[_Name, Tag("text")] | Annotated[ContainerReference, Tag("list")], Discriminator(text_or_list)
        ]
        | None
    ) = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessageFormat | None = None


class CreateMessage(CountMessageTokens):
    """A request for a message. With `max_tokens: 0` no model answers: the prompt is only read into its cache."""

    max_tokens: int = Field(ge=0, le=2**31 - 1)
    stream: bool | None = None
    stop_sequences: list[str] | None = Field(None, max_length=64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    metadata: MessageMetadata | None = None
    diagnostics: Diagnostics | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
