"""Shell commands in a sandbox: what a guest reports of them while they run, checked and as text that can be shown."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from apis.confinement.commands import CommandEvent, ShellCommand
from providers.tool_runtime.python.files import is_file_name, parse_file_list
from providers.tool_runtime.python.output import render_terminal_text

_MAX_FILES: Final = 100
"""Files of one call that can be cited."""
_MAX_PARTS: Final = 1000
_MAX_MARK_CHARS: Final = 200
"""Length of the lines that say how much output is missing."""

GuestMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BoundCommand:
    """Command with the limits that it runs under."""

    command: str
    timeout_s: float
    max_chars: int


def bind_command(command: ShellCommand, max_timeout_s: float, max_chars: int) -> BoundCommand:
    """Return the command with its own limits where they are smaller than these."""
    timeout_s, chars = command.timeout_s, command.max_output_chars
    return BoundCommand(
        command.command,
        max_timeout_s if timeout_s is None else min(timeout_s, max_timeout_s),
        max_chars if chars is None else min(chars, max_chars),
    )


class CommandParts:
    """Checks the parts that a guest sends, since a program may have written them, and hands on what they report.

    A guest that sends more than its commands may write, or anything after the end of one, raises ValueError. The
    commands begin when this is created.
    """

    def __init__(self, commands: Sequence[BoundCommand], on_event: Callable[[CommandEvent], None]) -> None:
        self._on_event = on_event
        self._began_s = time.monotonic()
        self._chars_left = {index: command.max_chars + _MAX_MARK_CHARS for index, command in enumerate(commands)}
        self._parts_left = _MAX_PARTS * len(commands)

    def feed(self, part: GuestMessage, payload: bytes) -> None:
        match part:
            case {"part": int(index), "out": int(size), **rest} if index in self._chars_left:
                stdout, stderr = (render_terminal_text(data) for data in (payload[:size], payload[size:]))
                self._parts_left -= 1
                self._chars_left[index] -= len(stdout) + len(stderr)
                if self._chars_left[index] < 0 or self._parts_left < 0:
                    raise ValueError("more output than the limit")
                code: Any = rest.get("exit_code")
                if has_ended := "exit_code" in rest:
                    del self._chars_left[index]
                exit_code = code if isinstance(code, int) and 0 <= code <= 255 else None
                duration_ms = self._measure() if has_ended else None
                self._on_event(CommandEvent(index, stdout, stderr, has_ended, exit_code, duration_ms))
            case _:
                raise ValueError("no part of a running command")

    def end_all(self, note: str, *, is_timed_out: bool) -> None:
        """Report the end of the commands that still ran when their session ended."""
        exit_code, duration_ms = None if is_timed_out else 137, self._measure()
        for index in self._chars_left:
            end = CommandEvent(index, "", f"[{note}]\n", has_ended=True, exit_code=exit_code, duration_ms=duration_ms)
            self._on_event(end)
        self._chars_left.clear()

    def _measure(self) -> int:
        """Return the milliseconds for which the commands have run; no program can forge them."""
        return round((time.monotonic() - self._began_s) * 1000)


def parse_written_files(reply: GuestMessage) -> list[str]:
    """Return the names of the files that the commands wrote."""
    return [name for name, _, _ in parse_file_list(reply) if is_file_name(name)][:_MAX_FILES]
