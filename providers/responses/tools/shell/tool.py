"""The tool `shell`: shell commands, several at a time, on the client's machine or in a container of this server."""

from collections.abc import Mapping
from typing import Final

from apis.chat import NativeToolName
from apis.containers import CreateContainer
from apis.wire.tool_items import ShellCallItem, ShellCallOutput
from apis.wire.tools import ContainerReferenceEnvironment, LocalEnvironment, ShellTool
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ToolFunctions, TypedTool
from providers.responses.tools.client import build_call_record
from providers.responses.tools.container.request_container import RequestContainer
from providers.responses.tools.shell.arguments import SHELL_NAME, describe_skills
from providers.responses.tools.shell.client_shell import ClientShell
from providers.responses.tools.shell.command_outputs import render_output
from providers.responses.tools.shell.container_shell import ContainerShell, read_shell_call
from providers.responses.tools.tool_context import ToolContext

_CLIENT_DESCRIPTION: Final = (
    "Runs shell commands on the user's machine and returns what each wrote to stdout and stderr, and its exit code. "
    "Commands of one call do not wait for each other: put those that depend on each other into one, joined by `&&`."
)


def _create_tool(declaration: ShellTool, context: ToolContext) -> TypedTool:
    environment = declaration.environment
    if environment is None or isinstance(environment, LocalEnvironment):
        return _create_client_shell(environment)
    containers = context.runtime.containers() if context.runtime else None
    if containers is None:
        raise context.not_configured_error(
            "No containers are configured: give the run config's `tool_runtime` the provider `python`, or use the "
            "environment 'local'."
        )
    field = f"{context.param}.environment"
    if isinstance(environment, ContainerReferenceEnvironment):
        container = RequestContainer(
            environment.container_id, read_shell_call, context, containers, f"{field}.container_id"
        )
    else:
        new_container = CreateContainer(
            name="auto",
            file_ids=environment.file_ids,
            memory_limit=environment.memory_limit,
            network_policy=environment.network_policy,
            skills=environment.skills,
        )
        container = RequestContainer(new_container, read_shell_call, context, containers, field)
    skills = () if isinstance(environment, ContainerReferenceEnvironment) else environment.skills or ()
    return ContainerShell(context, containers, container, skills)


def _create_client_shell(environment: LocalEnvironment | None) -> TypedTool:
    skills = (environment.skills if environment else None) or ()
    return ClientShell(_CLIENT_DESCRIPTION + describe_skills(skills))


def _call_from_item(item: ShellCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    if item.status == "incomplete":  # it was not run
        return None
    return build_call_record(item.call_id, SHELL_NAME, item.action.model_dump(exclude_none=True))


def _output_from_item(item: ShellCallOutput, call_ids: Mapping[str, str]) -> tuple[str, str]:
    rendered = (render_output(output.stdout, output.stderr, output.outcome.exit_code) for output in item.output)
    return item.call_id, "\n\n".join(rendered)


SHELL: Final = ToolFunctions(_create_tool, _call_from_item, output_from_item=_output_from_item)
