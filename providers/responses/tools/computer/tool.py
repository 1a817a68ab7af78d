"""The client's computer: one function, whose calls become `computer_call` items that end the turn.

The client carries out the actions and answers with a screenshot, which the model sees as the output of the call.
"""

from typing import Any, Final

from openai.types.responses import ResponseComputerToolCall

from apis.chat import FunctionDefinition, NativeToolName
from apis.errors import InvalidRequest
from apis.wire.computer import ComputerCallItem, ComputerTool, ComputerUsePreviewTool
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ToolFunctions, TypedTool
from providers.responses.tools.client import (
    Arguments,
    ClientFunctionCall,
    ClientTool,
    build_call_record,
    build_function,
)
from providers.responses.tools.computer.actions import ACTION_SCHEMA, ActionList, OneAction
from providers.responses.tools.tool_context import ToolContext

_NAME: Final = "computer"
_DESCRIPTION: Final = (
    "Uses the mouse and the keyboard of the user's computer, and returns a screenshot of the screen afterwards. "
    "Coordinates are pixels of the newest screenshot, from its top left corner; `scroll_y` above 0 scrolls down. "
    "Begin with a screenshot."
)


def _create_tool(declaration: ComputerTool, context: ToolContext) -> TypedTool:
    _require_vision(context)
    _refuse_both_forms(context)
    actions = {"type": "array", "items": ACTION_SCHEMA, "minItems": 1, "description": "Carried out in this order."}
    return _build_tool(build_function(_NAME, _DESCRIPTION, {"actions": actions}, ["actions"]), ActionList)


def _create_preview_tool(declaration: ComputerUsePreviewTool, context: ToolContext) -> TypedTool:
    _require_vision(context)
    screen = (
        f" The screen has {declaration.display_width} x {declaration.display_height} pixels; the environment is "
        f"{declaration.environment}."
    )
    return _build_tool(
        build_function(_NAME, _DESCRIPTION + screen, {"action": ACTION_SCHEMA}, ["action"]),
        OneAction,
    )


def _build_tool(function: FunctionDefinition, arguments_type: type[Arguments]) -> TypedTool:
    return ClientTool(function, "computer_call", arguments_type, _build_item)


def _require_vision(context: ToolContext) -> None:
    """Raise InvalidRequest for a model that is known to take no images: it could not see the screen."""
    if context.modalities is not None and "image" not in context.modalities:
        raise InvalidRequest(
            "This model takes no images, so it cannot use a computer.",
            param=f"{context.param}.type",
            code="invalid_value",
        )


def _refuse_both_forms(context: ToolContext) -> None:
    if any(isinstance(tool, ComputerUsePreviewTool) for tool in context.request.tools or ()):
        raise InvalidRequest(
            "Declare one of 'computer' and 'computer_use_preview': both stand for the same computer.",
            param=f"{context.param}.type",
            code="invalid_value",
        )


def _build_item(call: ClientFunctionCall[Any], arguments: Arguments, status: str) -> ResponseComputerToolCall:
    return ResponseComputerToolCall.model_validate(
        {
            "id": call.id,
            "type": "computer_call",
            "call_id": call.call_id,
            **arguments.model_dump(exclude_none=True),
            "pending_safety_checks": [],
            "status": status,
        }
    )


def _call_from_item(item: ComputerCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord:
    return build_call_record(
        item.call_id, _NAME, item.model_dump(include={"action", "actions"}, exclude_none=True, mode="json")
    )


COMPUTER: Final = ToolFunctions(_create_tool, _call_from_item)
COMPUTER_USE_PREVIEW: Final = ToolFunctions(_create_preview_tool, _call_from_item)
