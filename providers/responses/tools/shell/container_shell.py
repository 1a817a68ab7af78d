"""The shell in a container of this server: its calls, and the items that hold their output."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal

from openai.types.responses import ResponseFunctionShellToolCall, ResponseFunctionShellToolCallOutput
from pydantic import ValidationError

from apis.chat import ChatFunctionTool
from apis.confinement.commands import CommandEvent, CommandsResult, ShellCommand
from apis.containers import Containers, MountedSkill
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.wire.item_types import id_prefix
from apis.wire.items import Item
from apis.wire.tool_items import ShellCallItem
from apis.wire.tools import SkillSource
from apis.workspaces import WORKSPACE_PREFIX
from providers.responses.events.open_items import item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ContainerFile
from providers.responses.tools.call import Emit, HostedCall, TypedTool
from providers.responses.tools.client import build_argument_error
from providers.responses.tools.container.request_container import (
    EarlierCall,
    RequestContainer,
)
from providers.responses.tools.shell.arguments import (
    CommandsParser,
    ShellArguments,
    build_action,
    build_shell_function,
    describe_skills,
)
from providers.responses.tools.shell.command_events import CommandEvents
from providers.responses.tools.shell.command_outputs import CommandOutputs
from providers.responses.tools.tool_context import ToolContext

_DESCRIPTION: Final = (
    "Runs shell commands in a Linux container and returns what each wrote to stdout and stderr, and its exit code. "
    "Commands of one call run at the same time: put those that depend on each other into one, joined by `&&`. Files "
    "stay from call to call. Files written into the current folder, /mnt/data, are given to the "
    "user: link to them like [plot.png](sandbox:/mnt/data/plot.png)."
)
_WORKSPACE_DESCRIPTION: Final = (
    "Runs shell commands in a Linux container and returns what each wrote to stdout and stderr, and its exit code. "
    "Commands of one call run at the same time: put those that depend on each other into one, joined by `&&`. Files "
    "stay from call to call. The current folder is /workspace. Files in /workspace/outputs are given to the user "
    "when you have ended."
)
_FAILURE_EXIT_CODE: Final = 126
"""Exit code shown for commands that were not run, as shells have it for what they cannot execute."""
ShownStatus = Literal["in_progress", "completed", "incomplete"]


def read_shell_call(item: Item) -> EarlierCall | None:
    """Return the call in a container that an item stands for; None for any other item."""
    if not isinstance(item, ShellCallItem) or item.environment is None or item.environment.container_id is None:
        return None
    return EarlierCall(item.environment.container_id, has_run=item.status == "completed")


class ContainerShell(TypedTool):
    """The shell as one request declares it."""

    def __init__(
        self,
        context: ToolContext,
        containers: Containers,
        container: RequestContainer,
        skills: Sequence[SkillSource] = (),
    ) -> None:
        self.container = container
        self._skill_sources = skills
        self._skills: Sequence[MountedSkill] = ()
        self._context = context
        self._containers = containers
        self._turn = asyncio.Lock()
        """Calls of one response run one after the other, as the model has written them."""

    async def check_declaration(self) -> None:
        await self.container.check()
        self._skills = await self._containers.list_skills(self._skill_sources, tenant=self._context.tenant)

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        is_workspace = self.container.id.startswith(WORKSPACE_PREFIX)
        description = (_WORKSPACE_DESCRIPTION if is_workspace else _DESCRIPTION) + self.container.description
        return [ChatFunctionTool(function=build_shell_function(description + describe_skills(self._skills)))]

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return _ContainerShellCall(self, start)

    async def run(self, arguments: ShellArguments, events: "asyncio.Queue[CommandEvent | None]") -> CommandsResult:
        """Run the commands of a call in the container; its events are put into the queue, and None at the end. Raises
        StackError if they cannot run."""
        timeout_s = arguments.timeout_ms / 1000 if arguments.timeout_ms else None
        commands = [ShellCommand(command, timeout_s, arguments.max_output_length) for command in arguments.commands]
        tenant = self._context.tenant
        try:
            async with self._turn:
                return await self._containers.run_commands(
                    self.container.id, commands, events.put_nowait, tenant=tenant
                )
        finally:
            events.put_nowait(None)


class _ContainerShellCall(HostedCall):
    item_type = "shell_call"

    def __init__(self, tool: ContainerShell, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._parser = CommandsParser()
        self._command_events = CommandEvents()
        self._arguments: ShellArguments | None = None
        self._outputs = CommandOutputs()
        self._result_id = ""
        self._is_call_done = False

    def item(self, status: str) -> ResponseFunctionShellToolCall:
        return ResponseFunctionShellToolCall.model_validate(
            {
                "id": self.id,
                "type": "shell_call",
                "call_id": self.call_id,
                "action": build_action(self._arguments, [] if status == "in_progress" else self._parser.commands),
                "environment": {"type": "container_reference", "container_id": self._tool.container.id},
                "status": _shown_status(status),
            }
        )

    def append(self, text: str, events: EventList) -> None:
        super().append(text, events)
        events += self._command_events.build(self._parser.feed(text), self.index)

    def close(self, status: str) -> EventList:
        self._is_call_done = True
        item = item_done_event(self.index, self.item(status))
        return [*self._command_events.close(self.index), item]

    def close_result(self, status: str) -> EventList:
        events = self._outputs.close(self._result_id, self.result_index)
        item = self._result_item(status)
        if self.tool_result is not None and self.output is not None and status == "completed":
            sealed = self.output.seal_tool_result(self.tool_result)
            item = item if sealed is None else item.model_copy(update={"encrypted_content": sealed})
        return [*events, item_done_event(self.result_index, item)]

    def fail(self, error: ToolFailed) -> EventList:
        self.record_result(error.message, state=self._tool.container.state)
        events = [] if self._is_call_done else [*self.close("completed"), *self._open_result()]
        events += self._outputs.fail(error.message, _FAILURE_EXIT_CODE, self._result_id, self.result_index)
        return [*events, *self.close_result("completed")]

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        self._arguments = arguments = self._validate_arguments()
        changes = self._parser.finish(arguments.commands)
        last_commands = self._command_events.build(changes, self.index)
        self._outputs.begin(len(arguments.commands))
        await emit([*last_commands, *self.close("completed"), *self._open_result()])
        notice = await self._tool.container.prepare()
        queue: asyncio.Queue[CommandEvent | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._tool.run(arguments, queue))
        try:
            while (event := await queue.get()) is not None:
                if events := self._outputs.feed(event, self._result_id, self.result_index):
                    await emit(events)
            result = await task
        finally:
            task.cancel()
            await asyncio.wait([task])
        files = {path: ContainerFile(self._tool.container.id, file_id) for path, file_id in result.files.items()}
        output.files.update(files)
        text = notice + self._describe_loss(result) + self._outputs.render()
        self.record_result(text, state=self._tool.container.state, files=files)

    def finish(self) -> EventList:
        return self.close_result("completed")

    def _describe_loss(self, result: CommandsResult) -> str:
        is_state_lost = self._tool.container.take_state_loss()
        if result.loss_reason:
            return f"[the files of the earlier calls are gone: {result.loss_reason}]\n"
        return "[this is a new container: the files of the earlier calls are gone]\n" if is_state_lost else ""

    def _validate_arguments(self) -> ShellArguments:
        try:
            return ShellArguments.model_validate(self.parse_arguments())
        except ValidationError as exc:
            raise build_argument_error(self.name, exc) from None

    def _open_result(self) -> EventList:
        assert self.output is not None
        self._result_id = self.output.ids.new_item_id(id_prefix("shell_call_output"))
        self.result_index = self.output.reserve_index()
        return [item_added_event(self.result_index, self._result_item("in_progress"))]

    def _result_item(self, status: str) -> ResponseFunctionShellToolCallOutput:
        fields: dict[str, Any] = {
            "id": self._result_id,
            "type": "shell_call_output",
            "call_id": self.call_id,
            "max_output_length": self._arguments.max_output_length if self._arguments else None,
            "output": [] if status == "in_progress" else self._outputs.to_json(),
            "status": _shown_status(status),
        }
        if (expires_at := self._tool.container.find_expiry()) is not None:
            fields["container_expires_at"] = expires_at
        return ResponseFunctionShellToolCallOutput.model_validate(fields)


def _shown_status(status: str) -> ShownStatus:
    """Return the status of an item, of a type that the API has no failed status for."""
    return "completed" if status == "completed" else "in_progress" if status == "in_progress" else "incomplete"
