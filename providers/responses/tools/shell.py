"""`shell`: shell commands, several at a time, run by the client."""

from typing import Annotated, Any, Final

from openai.types.responses import ResponseFunctionShellToolCall
from pydantic import Field

from apis.errors import Unsupported
from apis.wire.tools import ContainerEnvironment, ShellTool
from providers.responses.tools.call import TypedTool
from providers.responses.tools.client import Arguments, ClientFunctionCall, ClientTool, build_function
from providers.responses.tools.tool_context import ToolContext

SHELL_NAME: Final = "shell"
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


def make_shell(declaration: ShellTool, context: ToolContext) -> TypedTool:
    """The shell on the client's machine. Raises Unsupported for one in a container of the server's."""
    environment = declaration.environment
    if isinstance(environment, ContainerEnvironment):
        message = "A shell in a container is not offered by this server: use the environment 'local'."
        raise Unsupported(message, param=f"{context.param}.environment", code="unsupported_value")
    skills = (environment.skills if environment else None) or ()
    known = "".join(f"\n- {skill.name} ({skill.path}): {skill.description}" for skill in skills)
    description = (
        f"{_DESCRIPTION}\nSkills, each explained in the SKILL.md of its folder:{known}" if known else _DESCRIPTION
    )
    return ClientTool(build_function(SHELL_NAME, description, _PROPERTIES, ["commands"]), "sh", _Commands, _build_item)


def _build_item(call: ClientFunctionCall[Any], arguments: _Commands, status: str) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "id": call.id,
            "type": "shell_call",
            "call_id": call.call_id,
            # these three are always there, as in OpenAI's own items
            "action": {"max_output_length": None, "timeout_ms": None, **arguments.model_dump()},
            "environment": {"type": "local"},
            "status": status,
        }
    )
