"""Outcomes of what a session was asked to do: results of programs and commands, and the errors of a session."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from providers.tool_runtime.python.egress.settings import EgressCounts

_NO_EGRESS: Final = EgressCounts()
ExitStatus = Literal["ok", "exception", "timed_out", "cpu_limit", "memory_limit", "files_limit", "crashed"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of running code. Unless `exit_status` is `ok` or `exception` the process that ran it has ended, and
    `reason` says why; if `are_files_lost` the session has, and its files are gone too.

    The server adds why an earlier session of this name is gone, or "", and the time that this one may be idle when its
    record in the KVStore is due to be written again, else 0. `egress` counts what the session's proxy did meanwhile.
    """

    output: str
    exit_status: ExitStatus
    reason: str = ""
    files: Sequence[tuple[str, bytes]] = ()
    skipped_names: Sequence[str] = ()
    are_files_lost: bool = False
    loss_reason: str = ""
    due_record_idle_s: float = 0.0
    egress: EgressCounts = _NO_EGRESS


class SessionEnded(Exception):
    """A process has ended by itself or because it exceeded a limit: the one of a program, or the session's first one,
    and its files with it. The text is a clause that says how."""

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
    """Outcome of commands that ran at the same time: the files that they wrote. `reason` says why they were ended, if
    they were; the other fields are as in RunOutcome."""

    filenames: Sequence[str] = ()
    reason: str = ""
    are_files_lost: bool = False
    loss_reason: str = ""
    due_record_idle_s: float = 0.0
    egress: EgressCounts = _NO_EGRESS


def describe_exit(status: int) -> str:
    """Return a clause for the status that a guest reports of a process."""
    try:
        return describe_exit_code(os.waitstatus_to_exitcode(status))
    except (ValueError, OverflowError):
        return "it ended"


def describe_exit_code(code: int) -> str:
    """Return a clause for the exit code of a process, that of a signal being negative."""
    if -code in set(signal.Signals):
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it exited with status {code}"
