"""Calls of the shell on the client's machine."""

from typing import Any

from openai.types.responses import ResponseFunctionShellToolCall

from apis.deltas import ToolCallStart
from apis.events import EventList
from providers.responses.tools.call import ClientCall
from providers.responses.tools.client import ClientFunctionCall, ClientTool
from providers.responses.tools.shell.arguments import (
    CommandsParser,
    ShellArguments,
    build_action,
    build_shell_function,
)
from providers.responses.tools.shell.command_events import CommandEvents


class ClientShell(ClientTool):
    """The shell on the client's machine."""

    def __init__(self, description: str) -> None:
        super().__init__(build_shell_function(description), "shell_call", ShellArguments, _build_item)

    def create_call(self, start: ToolCallStart) -> ClientCall:
        return _ClientShellCall(start, "shell_call", ShellArguments, _build_item)


class _ClientShellCall(ClientFunctionCall[ShellArguments]):
    """Call whose commands are shown by events of their own before its item is done."""

    def open(self) -> EventList:
        arguments = ShellArguments.model_validate(self.parse_arguments())
        changes = CommandsParser().finish(arguments.commands)
        return [*super().open(), *CommandEvents().build(changes, self.index)]


def _build_item(call: ClientFunctionCall[Any], arguments: ShellArguments, status: str) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "id": call.id,
            "type": "shell_call",
            "call_id": call.call_id,
            "action": build_action(None if status == "in_progress" else arguments),
            "environment": {"type": "local"},
            "status": status,
        }
    )
