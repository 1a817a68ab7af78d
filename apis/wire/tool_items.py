"""The items of tools with types of their own: calls, outputs, lists of tools and approvals."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from apis.wire.base import JsonValue
from apis.wire.item_parts import CallId, ItemId, ItemStatus, ItemWire
from apis.wire.tools import CustomTool, FunctionTool, McpTool, NamespaceTool, Tool

LongText = Annotated[str, Field(max_length=10 * 2**20)]
HostedStatus = Literal["in_progress", "searching", "interpreting", "calling", "completed", "failed", "incomplete"]


class WebSearchAction(ItemWire):
    type: Literal["search", "open_page", "find_in_page", "find"]


class WebSearchCallItem(ItemWire):
    """A search, or the opening of a page, by the server."""

    type: Literal["web_search_call"]
    id: ItemId | None = None
    status: HostedStatus | None = None
    action: WebSearchAction | None = None


class CodeLogs(ItemWire):
    type: Literal["logs"]
    logs: str


class CodeImage(ItemWire):
    type: Literal["image"]
    url: str


class CodeInterpreterCallItem(ItemWire):
    """Code that the server ran."""

    type: Literal["code_interpreter_call"]
    id: ItemId | None = None
    status: HostedStatus | None = None
    code: LongText | None = None
    container_id: str | None = None
    outputs: list[Annotated[CodeLogs | CodeImage, Field(discriminator="type")]] | None = None


class FileSearchResult(ItemWire):
    file_id: str | None = None
    filename: str | None = None
    score: float | None = None
    text: str | None = None


class FileSearchCallItem(ItemWire):
    """A search in files by the server."""

    type: Literal["file_search_call"]
    id: ItemId | None = None
    status: HostedStatus | None = None
    queries: list[str] = Field(default_factory=list[str])
    results: list[FileSearchResult] | None = None


class ImageGenerationCallItem(ItemWire):
    """An image that an image model generated, `result` in base64. With nothing but its `id` it is the stored one."""

    type: Literal["image_generation_call"]
    id: ItemId | None = None
    status: Literal["in_progress", "generating", "completed", "failed"] | None = None
    result: Annotated[str, Field(max_length=30 * 2**20)] | None = None  # base64 of the largest image of a provider fits
    revised_prompt: str | None = None


class ListedTool(ItemWire):
    name: str
    input_schema: JsonValue = None
    description: str | None = None


class McpListToolsItem(ItemWire):
    """The tools that an MCP server listed."""

    type: Literal["mcp_list_tools"]
    id: ItemId | None = None
    server_label: str
    tools: list[ListedTool]
    error: JsonValue = None


class McpCallItem(ItemWire):
    """A call of a tool of an MCP server. `error` is an object, or a text from older servers."""

    type: Literal["mcp_call"]
    id: ItemId | None = None
    status: HostedStatus | None = None
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: JsonValue = None
    approval_request_id: str | None = None


class McpApprovalRequest(ItemWire):
    """A call that waits for the client's approval."""

    type: Literal["mcp_approval_request"]
    id: ItemId
    server_label: str
    name: str
    arguments: str


class McpApprovalResponse(ItemWire):
    type: Literal["mcp_approval_response"]
    id: ItemId | None = None
    approval_request_id: str
    approve: bool
    reason: str | None = None


class LocalShellAction(ItemWire):
    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(ItemWire):
    type: Literal["local_shell_call"]
    id: ItemId | None = None
    call_id: CallId
    status: ItemStatus | None = None
    action: LocalShellAction


class LocalShellCallOutput(ItemWire):
    """The output of a local shell call. `id` is the call's id or call_id; some clients send `call_id`, or both."""

    type: Literal["local_shell_call_output"]
    id: ItemId | None = None
    call_id: CallId | None = None
    status: ItemStatus | None = None
    output: LongText


class ShellAction(ItemWire):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCallEnvironment(ItemWire):
    """Where the commands ran: on the client's machine, or in a container of this server."""

    type: Literal["local", "container_reference"]
    container_id: str | None = None


class ShellCallItem(ItemWire):
    type: Literal["shell_call"]
    id: ItemId | None = None
    call_id: CallId
    status: ItemStatus | None = None
    action: ShellAction
    environment: ShellCallEnvironment | None = None


class ShellOutcome(ItemWire):
    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ShellOutput(ItemWire):
    stdout: LongText
    stderr: LongText
    outcome: ShellOutcome


class ShellCallOutput(ItemWire):
    type: Literal["shell_call_output"]
    id: ItemId | None = None
    call_id: CallId
    status: ItemStatus | None = None
    output: list[ShellOutput]
    max_output_length: int | None = None


class PatchOperation(ItemWire):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: LongText | None = None


class ApplyPatchCallItem(ItemWire):
    type: Literal["apply_patch_call"]
    id: ItemId | None = None
    call_id: CallId
    status: ItemStatus | None = None
    operation: PatchOperation


class ApplyPatchCallOutput(ItemWire):
    type: Literal["apply_patch_call_output"]
    id: ItemId | None = None
    call_id: CallId
    status: Literal["completed", "failed"]
    output: LongText | None = None


class ToolSearchCallItem(ItemWire):
    """A search for tools. `call_id` may be null if a server ran the search."""

    type: Literal["tool_search_call"]
    id: ItemId | None = None
    call_id: CallId | None = None
    execution: Literal["server", "client"] | None = None
    status: ItemStatus | None = None
    arguments: Any = None


class LoadedFunctionTool(FunctionTool):
    model_config = ConfigDict(extra="allow")


class LoadedCustomTool(CustomTool):
    model_config = ConfigDict(extra="allow")


class LoadedNamespaceTool(NamespaceTool):
    model_config = ConfigDict(extra="allow")

    tools: list[Annotated[LoadedFunctionTool | LoadedCustomTool, Field(discriminator="type")]] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so never written
        max_length=128
    )


class LoadedMcpTool(McpTool):
    """An MCP server whose tools later turns list and offer."""

    model_config = ConfigDict(extra="allow")


LoadedTool = Annotated[
    LoadedFunctionTool | LoadedCustomTool | LoadedNamespaceTool | LoadedMcpTool, Field(discriminator="type")
]


class ToolSearchOutput(ItemWire):
    """The result of a search for tools: later turns offer these tools too."""

    type: Literal["tool_search_output"]
    id: ItemId | None = None
    call_id: CallId | None = None
    execution: Literal["server", "client"] | None = None
    status: ItemStatus | None = None
    tools: list[LoadedTool] = Field(max_length=128)


class AdditionalTools(ItemWire):
    """Tools that this and later turns offer, as if they were in the request's `tools`."""

    type: Literal["additional_tools"]
    role: Literal["developer"] | None = None
    id: ItemId | None = None
    tools: list[Tool] = Field(max_length=128)
