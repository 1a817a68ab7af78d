"""`local_shell`: one command at a time, as a list of words, run by the client."""

from typing import Annotated, Any, Final

from openai.types.responses.response_output_item import LocalShellCall, LocalShellCallAction
from pydantic import Field

from apis.wire.tools import LocalShellTool
from providers.responses.tools.call import TypedTool
from providers.responses.tools.client import Arguments, ClientFunctionCall, ClientTool, build_function
from providers.responses.tools.tool_context import ToolContext

LOCAL_SHELL_NAME: Final = "local_shell"
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


def make_local_shell(declaration: LocalShellTool, context: ToolContext) -> TypedTool:
    """The local shell, which needs no configuration."""
    return ClientTool(
        build_function(LOCAL_SHELL_NAME, _DESCRIPTION, _PROPERTIES, ["command"]), "lsh", _Command, _build_item
    )


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
