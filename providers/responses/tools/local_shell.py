"""`local_shell`: one command at a time, as a list of words, run by the client."""

from typing import Annotated, Any, Final

from openai.types.responses.response_output_item import LocalShellCall, LocalShellCallAction
from pydantic import Field

from apis.wire.tools import LocalShellTool
from providers.responses.tools.call import TypedTool
from providers.responses.tools.client import Arguments, ClientTool, FunctionOfClient, function
from providers.responses.tools.tool_context import Setting

NAME: Final = "local_shell"
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


def make_local_shell(declared: LocalShellTool, setting: Setting) -> TypedTool:
    """The local shell, which needs no configuration."""
    return ClientTool(function(NAME, _DESCRIPTION, _PROPERTIES, ["command"]), "lsh", _Command, _item)


def _item(call: FunctionOfClient[Any], given: _Command, status: str) -> LocalShellCall:
    fields = {**given.model_dump(exclude_none=True), "type": "exec", "env": given.env or {}}
    return LocalShellCall.model_validate(
        {
            "id": call.id,
            "type": "local_shell_call",
            "call_id": call.call_id,
            "action": LocalShellCallAction.model_validate(fields),
            "status": status,
        }
    )
