"""Outcomes of what a session was asked to do: results of programs and commands, and the errors of a session."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ExitStatus = Literal["ok", "exception", "timed_out", "cpu_limit", "memory_limit", "files_limit", "crashed"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of running code. Unless `exit_status` is `ok` or `exception` the session has ended, and `reason` says
    why.

    The server adds why an earlier session of this name is gone, or "", and the time that this one may be idle when its
    record in the KVStore is due to be written again, else 0.
    """

    output: str
    exit_status: ExitStatus
    reason: str = ""
    files: Sequence[tuple[str, bytes]] = ()
    skipped_names: Sequence[str] = ()
    loss_reason: str = ""
    due_record_idle_s: float = 0.0


class SessionEnded(Exception):
    """The process has ended by itself or because it exceeded a limit. The text is a clause that says how."""

    def __init__(self, reason: str, exit_status: ExitStatus = "crashed") -> None:
        super().__init__(reason)
        self.exit_status: ExitStatus = exit_status


class FileRefused(Exception):
    """The sandbox did not read, write or delete a file; `is_missing` when there is no such file."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.is_missing = reason == "missing"


@dataclass(frozen=True, slots=True)
class CommandsOutcome:
    """Outcome of commands that ran at the same time: the files that they wrote. `reason` says why the session has
    ended, if it has; the other fields are as in RunOutcome."""

    filenames: Sequence[str] = ()
    reason: str = ""
    loss_reason: str = ""
    due_record_idle_s: float = 0.0
