"""Output of the commands of one shell call, as events and as the item that holds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from apis.confinement.commands import CommandEvent
from apis.events import EventList, ResponseStreamEvent
from providers.responses.events.response_events import item_event

_CONTENT: Final = "response.shell_call_output_content"
KILLED_EXIT_CODE: Final = 137
"""Exit code of a command, or of a program, whose processes were killed."""


@dataclass(slots=True)
class _CommandOutput:
    stdout: list[str] = field(default_factory=list[str])
    stderr: list[str] = field(default_factory=list[str])
    has_ended: bool = False
    exit_code: int | None = None
    duration_ms: int | None = None

    def to_json(self) -> dict[str, Any]:
        ended = {"type": "timeout"} if self.exit_code is None else {"type": "exit", "exit_code": self.exit_code}
        output = {"stdout": "".join(self.stdout), "stderr": "".join(self.stderr), "outcome": ended}
        # a field of ours, as the container of a call has one
        return output if self.duration_ms is None else {**output, "duration_ms": self.duration_ms}


class CommandOutputs:
    """Output of the commands, by their place in the call."""

    def __init__(self) -> None:
        self._outputs: list[_CommandOutput] = []

    def begin(self, command_count: int) -> None:
        """Expect the output of so many commands."""
        self._outputs = [_CommandOutput() for _ in range(command_count)]

    def feed(self, event: CommandEvent, item_id: str, output_index: int) -> EventList:
        """Take what a command wrote, or its end, and return the events of the item that show it."""
        output = self._outputs[event.index]
        events: EventList = []
        if event.stdout or event.stderr:
            output.stdout.append(event.stdout)
            output.stderr.append(event.stderr)
            delta = {key: text for key, text in (("stdout", event.stdout), ("stderr", event.stderr)) if text}
            events.append(
                item_event(f"{_CONTENT}.delta", item_id, output_index, command_index=event.index, delta=delta)
            )
        if event.has_ended:
            output.has_ended, output.exit_code, output.duration_ms = True, event.exit_code, event.duration_ms
            events.append(_done_event(event.index, output, item_id, output_index))
        return events

    def close(self, item_id: str, output_index: int) -> EventList:
        """Return the events that end the commands that have not ended."""
        events: EventList = []
        for index, output in enumerate(self._outputs):
            if not output.has_ended:
                output.has_ended, output.exit_code = True, KILLED_EXIT_CODE
                events.append(_done_event(index, output, item_id, output_index))
        return events

    def fail(self, message: str, exit_code: int, item_id: str, output_index: int) -> EventList:
        """Return the events by which the commands that have not ended, or one that stands for all, end with a message
        on stderr."""
        self._outputs = self._outputs or [_CommandOutput()]
        running = [index for index, output in enumerate(self._outputs) if not output.has_ended]
        ends = [CommandEvent(index, "", message, has_ended=True, exit_code=exit_code) for index in running]
        return [event for end in ends for event in self.feed(end, item_id, output_index)]

    def to_json(self) -> Sequence[dict[str, Any]]:
        """Return the `output` of the item."""
        return [output.to_json() for output in self._outputs]

    def render(self) -> str:
        """Return the output as a model reads it."""
        return "\n\n".join(
            render_output("".join(output.stdout), "".join(output.stderr), output.exit_code) for output in self._outputs
        )


def render_output(stdout: str, stderr: str, exit_code: int | None) -> str:
    """Return the output of one command as a model reads it. The exit code is None at a time limit."""
    ended = "stopped: it took too long" if exit_code is None else f"exit code {exit_code}"
    return "\n".join(filter(None, (stdout, f"stderr:\n{stderr}" if stderr else "", ended)))


def _done_event(index: int, output: _CommandOutput, item_id: str, output_index: int) -> ResponseStreamEvent:
    return item_event(f"{_CONTENT}.done", item_id, output_index, command_index=index, output=[output.to_json()])
