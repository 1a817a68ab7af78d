"""Events that show the commands of a shell call."""

from collections.abc import Iterable

from apis.events import EventList, ResponseStreamEvent
from providers.responses.events.response_events import build_event
from providers.responses.tools.shell.arguments import CommandChange


class CommandEvents:
    """Turns changes of the commands of the item `output_index` into events, which add up to each command."""

    def __init__(self) -> None:
        self._open: dict[int, list[str]] = {}

    def build(self, changes: Iterable[CommandChange], output_index: int) -> EventList:
        """Return the events of the changes."""
        events: EventList = []
        for change in changes:
            if change.is_new:
                self._open[change.index] = []
                events.append(_event("added", output_index, change.index, command=""))
            if change.text:
                self._open[change.index].append(change.text)
                events.append(_event("delta", output_index, change.index, delta=change.text))
            if change.is_last:
                events.append(self._end(change.index, output_index))
        return events

    def close(self, output_index: int) -> EventList:
        """Return the events that end the commands that are still open."""
        return [self._end(index, output_index) for index in [*self._open]]

    def _end(self, index: int, output_index: int) -> ResponseStreamEvent:
        return _event("done", output_index, index, command="".join(self._open.pop(index)))


def _event(phase: str, output_index: int, index: int, **fields: str) -> ResponseStreamEvent:
    kind = f"response.shell_call_command.{phase}"
    return build_event(kind, output_index=output_index, command_index=index, **fields)
