"""The processes of a session: measured, resumed for an exchange with its guest, and stopped after the last one."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from providers.tool_runtime.python.cgroup import Cgroup
from providers.tool_runtime.python.outcomes import SessionEnded
from providers.tool_runtime.python.processes import (
    ProcessUsage,
    measure_socket_bytes,
    measure_usage,
    process_tree,
    resume_descendants,
    send_signal,
    stop_descendants,
)
from providers.tool_runtime.python.sandbox import MAX_INODES, MIB, WORKSPACE_FOLDER, SandboxLimits

_WATCH_INTERVAL_S: Final = 0.1
_CLOSE_WATCH_INTERVAL_S: Final = 0.02
"""Seconds between measurements where no control group holds the memory and half of it is used."""
_FIRST_PROCESSES: Final = 1
_PROTECTED_SCORE: Final = "-900"


@dataclass(frozen=True, slots=True)
class _UsageBefore:
    """Usage of a session when the first of its present exchanges began."""

    cpu_s: float
    memory_kills: int
    inodes: int


class SessionProcesses:
    """The outermost process `pid` and its descendants, within the limits of one session. All methods but `watch` and
    `adopt` read /proc, and block for milliseconds."""

    def __init__(self, pid: int, limits: SandboxLimits, *, is_isolated: bool) -> None:
        self.pid = pid
        self.inner_pidfd: int | None = None
        """A descriptor of the first process in the sandbox."""
        self.ran_out_of_memory = False
        self._limits = limits
        self._is_isolated = is_isolated
        self._cgroup: Cgroup | None = None
        self._inner_pid = 0
        self._scratch_folder = ""
        self._before = _UsageBefore(0.0, 0, 0)
        self._program_calls = 0

    @property
    def has_cgroup(self) -> bool:
        """True when a control group bounds the memory and the processes exactly, not only when they are measured."""
        return self._cgroup is not None

    def adopt(self, work_folder: str) -> None:
        """Put the guest, which has not run any program yet, into a control group, and open what ends it."""
        if not self._is_isolated:
            return
        self._scratch_folder = work_folder if work_folder == WORKSPACE_FOLDER else "/mnt"
        pids = process_tree(self.pid)
        self._inner_pid = pids[1]
        self.inner_pidfd = os.pidfd_open(self._inner_pid)
        with contextlib.suppress(OSError):  # only root may: then the kernel ends programs before the first process
            Path(f"/proc/{self._inner_pid}/oom_score_adj").write_text(_PROTECTED_SCORE)
        self._cgroup = Cgroup.create(self._limits.memory_bytes, self._limits.processes + _FIRST_PROCESSES)
        if self._cgroup is not None and not self._cgroup.add_processes(pids[1:]):
            self._cgroup.remove()
            self._cgroup = None

    def resume(self, *, with_programs: bool, is_first: bool) -> None:
        """Resume the processes, or the first one alone. The limits count from the exchange on that `is_first` of those
        in progress; each call of programs adds its processor time to them."""
        if with_programs:
            resume_descendants(self.pid)
        elif self._inner_pid:
            send_signal(self._inner_pid, self.pid, signal.SIGCONT)
        if is_first:
            usage, inodes = self._measure()
            self._before, self._program_calls = _UsageBefore(usage.cpu_s, self._count_memory_kills(), inodes), 0
        self._program_calls += with_programs

    def stop(self) -> bool:
        """Stop all processes until the next exchange; return False when they fork faster than they are stopped."""
        if stop_descendants(self.pid):
            return True
        resume_descendants(self.pid)
        return False

    async def watch(self, end_task: "asyncio.Task[None]") -> SessionEnded | None:
        """Return which limit was exceeded as soon as one is; None when the first process has ended."""
        limits, interval_s = self._limits, _WATCH_INTERVAL_S
        while True:
            await asyncio.wait([end_task], timeout=interval_s)
            if end_task.done():
                return None
            usage, inodes = await asyncio.to_thread(self._measure)
            before, cpu_limit_s = self._before, limits.cpu_s * max(1, self._program_calls)
            if usage.cpu_s - before.cpu_s > cpu_limit_s:
                return SessionEnded(f"it used more than {cpu_limit_s:g} s of processor time", "cpu_limit")
            if usage.memory_bytes > limits.memory_bytes or self.has_memory_kills:
                return self.memory_limit_error()
            is_close = not self.has_cgroup and usage.memory_bytes > limits.memory_bytes // 2
            interval_s = _CLOSE_WATCH_INTERVAL_S if is_close else _WATCH_INTERVAL_S
            if inodes > max(MAX_INODES, before.inodes):  # a program may remove what another has made
                return SessionEnded(f"it made more than {MAX_INODES} files", "files_limit")

    @property
    def has_memory_kills(self) -> bool:
        """True when the kernel has ended a process for memory since the present exchanges began."""
        return self._count_memory_kills() > self._before.memory_kills

    def memory_limit_error(self) -> SessionEnded:
        """Return the error of a session that has used up its memory."""
        return SessionEnded(f"it used more than {self._limits.memory_bytes // MIB} MiB of memory", "memory_limit")

    def remove_group(self) -> None:
        """Remove the control group after the processes have ended."""
        if self._cgroup is not None:
            self.ran_out_of_memory = self.has_memory_kills
            self._cgroup.remove()

    def _count_memory_kills(self) -> int:
        return self._cgroup.count_memory_kills() if self._cgroup is not None else 0

    def _measure(self) -> tuple[ProcessUsage, int]:
        """Return the usage of the processes and the number of files in the scratch folder. A control group counts what
        sockets hold; where there is none, their number bounds it."""
        usage, inodes = measure_usage(self.pid, self._limits.memory_bytes), 0
        if self._inner_pid and not self.has_cgroup:
            usage = replace(usage, memory_bytes=usage.memory_bytes + measure_socket_bytes(self._inner_pid))
        with contextlib.suppress(OSError):
            if self._inner_pid:
                status = os.statvfs(f"/proc/{self._inner_pid}/root{self._scratch_folder}")
                inodes = status.f_files - status.f_ffree
        return usage, inodes
