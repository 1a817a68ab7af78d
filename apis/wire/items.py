"""The items in the input of a Responses request: those that clients write, and the output of earlier responses.

Unknown fields are preserved, so that an item is stored and listed as its client sent it.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, cast

from openai.types.responses import ResponseOutputItem
from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter

from apis.wire.base import Effort, Phase, Wire, sdk_model_to_json, sdk_model_to_python
from apis.wire.computer import ComputerCallItem, ComputerCallOutput
from apis.wire.item_parts import CallId, InputContent, ItemId, ItemStatus, ItemWire, OutputContent, ToolName
from apis.wire.text_format import TextFormatOption
from apis.wire.tool_items import (
    AdditionalTools,
    ApplyPatchCallItem,
    ApplyPatchCallOutput,
    CodeInterpreterCallItem,
    FileSearchCallItem,
    ImageGenerationCallItem,
    LocalShellCallItem,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCallItem,
    McpListToolsItem,
    ShellCallItem,
    ShellCallOutput,
    ToolSearchCallItem,
    ToolSearchOutput,
    WebSearchCallItem,
)


class InputMessage(ItemWire):
    """A message of a user, a developer or the system."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None


class AssistantMessage(ItemWire):
    """A message of the model: plain text from a client, or an output message of an earlier response."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: OutputContent
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class SummaryText(ItemWire):
    type: Literal["summary_text"]
    text: str


class ReasoningText(ItemWire):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ItemWire):
    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class FunctionCallItem(ItemWire):
    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    namespace: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(ItemWire):
    """The output of a function call, which `call_id` names; without it, of the oldest open call of the function
    `name`."""

    type: Literal["function_call_output"]
    call_id: CallId | None = None
    name: ToolName | None = None
    namespace: str | None = None
    output: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None


class CustomToolCallItem(ItemWire):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    input: str
    id: ItemId | None = None
    namespace: str | None = None
    status: ItemStatus | None = None


class CustomToolCallOutput(ItemWire):
    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: InputContent
    id: ItemId | None = None
    status: ItemStatus | None = None


class CompactionItem(ItemWire):
    """Replaces all earlier items by their encrypted summary."""

    type: Literal["compaction"]
    encrypted_content: str
    id: ItemId | None = None


class EffortUpdate(Wire):
    effort: Effort | None = None


class FormatUpdate(Wire):
    format: TextFormatOption


class ConfigurationUpdate(ItemWire):
    """Overrides the options of all later requests in the conversation, until the next update."""

    type: Literal["configuration_update"]
    id: ItemId | None = None
    reasoning: EffortUpdate | None = None
    text: FormatUpdate | None = None


class CompactionTrigger(ItemWire):
    """Requests a compaction of all earlier items instead of an answer. It is not part of the conversation."""

    type: Literal["compaction_trigger"]
    id: ItemId | None = None


class ItemReference(ItemWire):
    """Refers to a stored item; `type` is optional."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def item_tag(value: Any) -> str | None:
    """Return the tag of an item: its `type`, or the type that its fields imply where `type` is optional."""
    fields: dict[str, Any] = cast(dict[str, Any], value) if isinstance(value, dict) else getattr(value, "__dict__", {})
    kind = fields.get("type")
    if kind is None:
        kind = "message" if "role" in fields else "item_reference" if set(fields) <= {"type", "id"} else None
    if kind == "message" and fields.get("role") == "assistant":
        return "message:assistant"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[AssistantMessage, Tag("message:assistant")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[CodeInterpreterCallItem, Tag("code_interpreter_call")]
    | Annotated[FileSearchCallItem, Tag("file_search_call")]
    | Annotated[ImageGenerationCallItem, Tag("image_generation_call")]
    | Annotated[McpListToolsItem, Tag("mcp_list_tools")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[McpApprovalRequest, Tag("mcp_approval_request")]
    | Annotated[McpApprovalResponse, Tag("mcp_approval_response")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutput, Tag("local_shell_call_output")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[ShellCallOutput, Tag("shell_call_output")]
    | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[ApplyPatchCallOutput, Tag("apply_patch_call_output")]
    | Annotated[ComputerCallItem, Tag("computer_call")]
    | Annotated[ComputerCallOutput, Tag("computer_call_output")]
    | Annotated[ToolSearchCallItem, Tag("tool_search_call")]
    | Annotated[ToolSearchOutput, Tag("tool_search_output")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ConfigurationUpdate, Tag("configuration_update")]
    | Annotated[CompactionTrigger, Tag("compaction_trigger")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(item_tag),
]

ITEM_LIST_ADAPTER: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item], config=ConfigDict(defer_build=True))
"""Reads stored items, and output items as the input of what follows."""


def output_to_input(items: Iterable[ResponseOutputItem]) -> list[Item]:
    """Return output items as the input of what follows. Their texts are not copied."""
    return ITEM_LIST_ADAPTER.validate_python([sdk_model_to_python(item) for item in items])


def items_to_json(items: Iterable[ResponseOutputItem]) -> bytes:
    """Return output items as one JSON array, in bytes of just its length."""
    parts: list[bytes] = []
    for item in items:
        parts += (b"," if parts else b"[", sdk_model_to_json(item))
    return b"".join((*parts, b"]")) if parts else b"[]"
