"""The declaration of the tool `programmatic_tool_calling`, and the item of its calls."""

from typing import Literal

from apis.wire.base import ToolWire
from apis.wire.item_parts import CallId, ItemId, ItemWire


class ProgramTool(ToolWire):
    """Programs that multiply."""

    type: Literal["programmatic_tool_calling"]


class ProgramItem(ItemWire):
    """A program that this server has run."""

    type: Literal["program"]
    id: ItemId | None = None
    call_id: CallId
    code: str
