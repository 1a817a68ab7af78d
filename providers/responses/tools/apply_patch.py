"""The tool `apply_patch`: the client creates, deletes or edits a file by a diff."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from openai.types.responses import ResponseApplyPatchToolCall
from pydantic import Field, model_validator

from apis.chat import NativeToolName
from apis.wire.tool_items import ApplyPatchCallItem, ApplyPatchCallOutput
from apis.wire.tools import ApplyPatchTool
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ToolFunctions, TypedTool
from providers.responses.tools.client import (
    Arguments,
    ClientFunctionCall,
    ClientTool,
    build_call_record,
    build_function,
)
from providers.responses.tools.tool_context import ToolContext

_NAME: Final = "apply_patch"
_DESCRIPTION: Final = """Creates, edits or deletes one file in the user's workspace.

The `diff` of `create_file` is the whole file, each line with a `+` before it. That of `update_file` is one or more
hunks: a line `@@`, which may be followed by a line of the file above the change to find it by, then lines of the file,
each with a space before it where it stays, `-` where it goes and `+` where it is new; about three lines of context
before and after. There are no line numbers. `delete_file` has no diff."""
_PROPERTIES: Final = {
    "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
    "path": {"type": "string", "description": "The file, relative to the workspace."},
    "diff": {"type": "string", "description": "The change; not for delete_file."},
}


class _Operation(Arguments):
    type: Literal["create_file", "update_file", "delete_file"]
    path: Annotated[str, Field(min_length=1)]
    diff: str | None = None

    @model_validator(mode="after")
    def _require_diff(self) -> Self:
        if self.type != "delete_file" and self.diff is None:
            raise ValueError(f"{self.type} needs a `diff`")
        return self


def _create_tool(declaration: ApplyPatchTool, context: ToolContext) -> TypedTool:
    return ClientTool(
        build_function(_NAME, _DESCRIPTION, _PROPERTIES, ["type", "path"]),
        "apply_patch_call",
        _Operation,
        _build_item,
    )


def _build_item(call: ClientFunctionCall[Any], arguments: _Operation, status: str) -> ResponseApplyPatchToolCall:
    leave_out = {"diff"} if arguments.type == "delete_file" else None
    return ResponseApplyPatchToolCall.model_validate(
        {
            "id": call.id,
            "type": "apply_patch_call",
            "call_id": call.call_id,
            "operation": arguments.model_dump(exclude=leave_out),
            "status": status,
        }
    )


def _call_from_item(item: ApplyPatchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord:
    return build_call_record(item.call_id, _NAME, item.operation.model_dump(exclude_none=True))


def _output_from_item(item: ApplyPatchCallOutput, call_ids: Mapping[str, str]) -> tuple[str, str]:
    default = "Done." if item.status == "completed" else "The patch could not be applied."
    return item.call_id, item.output or default


APPLY_PATCH: Final = ToolFunctions(_create_tool, _call_from_item, output_from_item=_output_from_item)
