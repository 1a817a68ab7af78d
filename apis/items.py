"""The items a Responses request may hold as input: what clients write, and what earlier responses put out.

Fields we do not know are kept, so that an item is stored and listed as it came.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from apis.inference import Phase

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
ItemId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]
ToolName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]


class ItemWire(BaseModel):
    """Strict in what it knows, lossless in what it does not."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class InputText(ItemWire):
    type: Literal["input_text"]
    text: str


class InputImage(ItemWire):
    """An image by URL (https or data) or by the id of an uploaded file."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None


class InputFile(ItemWire):
    """A file by its data (data URL or base64), by URL or by the id of an uploaded file."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None


class OutputText(ItemWire):
    type: Literal["output_text"]
    text: str


class OutputRefusal(ItemWire):
    type: Literal["refusal"]
    refusal: str


def text_or_list(value: Any) -> str:
    """Tells the two forms apart that content has, so that errors speak of the one that was meant."""
    return "text" if isinstance(value, str) else "list"


GivenContent = Annotated[InputText | InputImage | InputFile, Field(discriminator="type")]
MadeContent = Annotated[InputText | OutputText | OutputRefusal, Field(discriminator="type")]
# fail_fast: only the first error is told, and listing a hundred thousand of them would hold up all else
_GivenList = Annotated[list[GivenContent], Field(fail_fast=True)]
_MadeList = Annotated[list[MadeContent], Field(fail_fast=True)]
Given = Annotated[Annotated[str, Tag("text")] | Annotated[_GivenList, Tag("list")], Discriminator(text_or_list)]
Made = Annotated[Annotated[str, Tag("text")] | Annotated[_MadeList, Tag("list")], Discriminator(text_or_list)]


class GivenMessage(ItemWire):
    """What a user, a developer or the system says."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: Given
    id: ItemId | None = None
    status: ItemStatus | None = None


class AssistantMessage(ItemWire):
    """What the model said: plain text from a client, or an output message of an earlier response."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: Made
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
    type: Literal["function_call_output"]
    call_id: CallId
    output: Given
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
    output: Given
    id: ItemId | None = None
    status: ItemStatus | None = None


class WebSearchAction(ItemWire):
    type: Literal["search", "open_page", "find_in_page", "find"]


class WebSearchCallItem(ItemWire):
    """A search the server ran. `result` is our own field in the store: what the model was told."""

    type: Literal["web_search_call"]
    id: ItemId | None = None
    status: Literal["in_progress", "searching", "completed", "failed", "incomplete"] | None = None
    action: WebSearchAction | None = None


class ItemReference(ItemWire):
    """Stands for a stored item; `type` may be left out."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def item_tag(value: Any) -> str | None:
    """Which kind of item this is: its `type`, or what its shape says where clients may leave the type out."""
    fields: dict[str, Any] = cast(dict[str, Any], value) if isinstance(value, dict) else getattr(value, "__dict__", {})
    kind = fields.get("type")
    if kind is None:
        kind = "message" if "role" in fields else "item_reference" if set(fields) <= {"type", "id"} else None
    if kind == "message" and fields.get("role") == "assistant":
        return "message:assistant"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[GivenMessage, Tag("message")]
    | Annotated[AssistantMessage, Tag("message:assistant")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(item_tag),
]
