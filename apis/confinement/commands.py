"""Shell commands that run confined: what is run, what is reported of it, and its result.

It needs nothing but the standard library, since the process that holds the sandboxes reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """Command for the shell. The container has limits of its own, which apply where these are greater or None."""

    command: str
    timeout_s: float | None = None
    max_output_chars: int | None = None


@dataclass(frozen=True, slots=True)
class CommandEvent:
    """Text that the command `index` of a call wrote, or its end with the text that was not sent before. The exit code
    of a command that was stopped at its time limit is None. The end has the milliseconds that the command ran."""

    index: int
    stdout: str = ""
    stderr: str = ""
    has_ended: bool = False
    exit_code: int | None = None
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CommandsResult:
    """Result of the commands of one call: the ids of the files that they wrote, by path. `loss_reason` says why the
    files of earlier calls are gone; it is empty where they are not."""

    files: Mapping[str, str] = field(default_factory=dict[str, str])
    loss_reason: str = ""
