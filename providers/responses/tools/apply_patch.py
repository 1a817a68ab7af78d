"""`apply_patch`: files created, deleted or edited by a diff, by the client."""

from typing import Annotated, Any, Final, Literal, Self

from openai.types.responses import ResponseApplyPatchToolCall
from pydantic import Field, model_validator

from apis.wire.tools import ApplyPatchTool
from providers.responses.tools.call import TypedTool
from providers.responses.tools.client import Arguments, ClientFunctionCall, ClientTool, build_function
from providers.responses.tools.tool_context import ToolContext

APPLY_PATCH_NAME: Final = "apply_patch"
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


def make_apply_patch(declaration: ApplyPatchTool, context: ToolContext) -> TypedTool:
    """The patch tool, which needs no configuration."""
    return ClientTool(
        build_function(APPLY_PATCH_NAME, _DESCRIPTION, _PROPERTIES, ["type", "path"]), "apc", _Operation, _build_item
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
