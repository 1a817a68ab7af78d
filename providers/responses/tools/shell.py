"""The tool `shell`: the client runs shell commands, several at a time."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from openai.types.responses import ResponseFunctionShellToolCall
from pydantic import Field

from apis.chat import NativeToolName
from apis.wire.tool_items import ShellCallItem, ShellCallOutput, ShellOutput
from apis.wire.tools import ShellTool
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ToolType, TypedTool
from providers.responses.tools.client import (
    Arguments,
    ClientFunctionCall,
    ClientTool,
    build_call_record,
    build_function,
)
from providers.responses.tools.tool_context import ToolContext

_NAME: Final = "shell"
_DESCRIPTION: Final = (
    "Runs shell commands on the user's machine and returns what each wrote to stdout and stderr, and its exit code. "
    "Commands of one call do not wait for each other: put those that depend on each other into one, joined by `&&`."
)
_PROPERTIES: Final = {
    "commands": {"type": "array", "items": {"type": "string"}, "description": "The commands, each for the shell."},
    "timeout_ms": {"type": "integer", "description": "Milliseconds after which a command is stopped."},
    "max_output_length": {"type": "integer", "description": "Characters of output to return of each command."},
}


class _Commands(Arguments):
    commands: Annotated[list[str], Field(min_length=1)]
    timeout_ms: Annotated[int, Field(ge=0)] | None = None
    max_output_length: Annotated[int, Field(ge=0)] | None = None


def _create_tool(declaration: ShellTool, context: ToolContext) -> TypedTool:
    """Return the shell on the client's machine."""
    skills = (declaration.environment.skills if declaration.environment else None) or ()
    listed = "".join(f"\n- {skill.name} ({skill.path}): {skill.description}" for skill in skills)
    description = (
        f"{_DESCRIPTION}\nSkills, each explained in the SKILL.md of its folder:{listed}" if listed else _DESCRIPTION
    )
    function = build_function(_NAME, description, _PROPERTIES, ["commands"])
    return ClientTool(function, "shell_call", _Commands, _build_item)


def _build_item(call: ClientFunctionCall[Any], arguments: _Commands, status: str) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "id": call.id,
            "type": "shell_call",
            "call_id": call.call_id,
            # OpenAI's own items always have these three fields
            "action": {"max_output_length": None, "timeout_ms": None, **arguments.model_dump()},
            "environment": {"type": "local"},
            "status": status,
        }
    )


def _call_from_item(item: ShellCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord:
    return build_call_record(item.call_id, _NAME, item.action.model_dump(exclude_none=True))


def _output_from_item(item: ShellCallOutput, call_ids: Mapping[str, str]) -> tuple[str, str]:
    return item.call_id, "\n\n".join(map(_render_output, item.output))


def _render_output(output: ShellOutput) -> str:
    outcome = output.outcome
    ended = "stopped: it took too long" if outcome.type == "timeout" else f"exit code {outcome.exit_code}"
    return "\n".join(filter(None, (output.stdout, f"stderr:\n{output.stderr}" if output.stderr else "", ended)))


SHELL: Final = ToolType(
    ShellTool,
    _create_tool,
    (ShellCallItem,),
    _call_from_item,
    output_item=ShellCallOutput,
    output_from_item=_output_from_item,
)
