"""The tool `local_shell`: the client runs one command at a time, a list of words."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from openai.types.responses.response_output_item import LocalShellCall, LocalShellCallAction
from pydantic import Field

from apis.chat import NativeToolName
from apis.wire.tool_items import LocalShellCallItem, LocalShellCallOutput
from apis.wire.tools import LocalShellTool
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

_NAME: Final = "local_shell"
_DESCRIPTION: Final = (
    "Runs one command on the user's machine and returns its output. No shell interprets it: for pipes, globs or "
    'variables write ["bash", "-lc", "..."].'
)
_PROPERTIES: Final = {
    "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
    "working_directory": {"type": "string", "description": "Where to run it."},
    "timeout_ms": {"type": "integer", "description": "Milliseconds after which it is stopped."},
    "env": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Environment variables to set for it.",
    },
}


class _Command(Arguments):
    command: Annotated[list[str], Field(min_length=1)]
    working_directory: str | None = None
    timeout_ms: Annotated[int, Field(ge=0)] | None = None
    env: dict[str, str] | None = None
    user: str | None = None


def _create_tool(declaration: LocalShellTool, context: ToolContext) -> TypedTool:
    function = build_function(_NAME, _DESCRIPTION, _PROPERTIES, ["command"])
    return ClientTool(function, "local_shell_call", _Command, _build_item)


def _build_item(call: ClientFunctionCall[Any], arguments: _Command, status: str) -> LocalShellCall:
    fields = {**arguments.model_dump(exclude_none=True), "type": "exec", "env": arguments.env or {}}
    return LocalShellCall.model_validate(
        {
            "id": call.id,
            "type": "local_shell_call",
            "call_id": call.call_id,
            "action": LocalShellCallAction.model_validate(fields),
            "status": status,
        }
    )


def _call_from_item(item: LocalShellCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord:
    exclude = {"type"} if item.action.env else {"type", "env"}
    return build_call_record(item.call_id, _NAME, item.action.model_dump(exclude=exclude, exclude_none=True))


def _output_from_item(item: LocalShellCallOutput, call_ids: Mapping[str, str]) -> tuple[str, str]:
    name = item.call_id or item.id or ""
    return call_ids.get(name, name), item.output


LOCAL_SHELL: Final = ToolFunctions(_create_tool, _call_from_item, output_from_item=_output_from_item)
