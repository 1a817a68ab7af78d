"""Processes of a sandbox, measured, stopped and resumed from outside through /proc."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_STOP_TIMEOUT_S: Final = 5.0
"""Seconds; on a busy machine even stopping a process takes time."""
_STOPPED_STATES: Final = "TtZX"


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources of a process and all its descendants at one moment; `cpu_s` includes ended descendants."""

    process_count: int
    cpu_s: float
    memory_bytes: int


def process_tree(root: int) -> list[int]:
    """Return `root` and its living descendants, parents first; those that end meanwhile may be missing."""
    pids = [root]
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, _read_text(f"/proc/{pid}/task/{task}/children").split())
    return pids


def measure_usage(root: int, exact_above_bytes: int) -> ProcessUsage:
    """Measure a process and its descendants. Memory that they share is counted for each of them, unless the sum exceeds
    `exact_above_bytes`: then it is measured exactly, which takes longer."""
    pids = process_tree(root)
    ticks = sum(sum(map(int, _read_stat(pid)[11:15])) for pid in pids)
    memory_bytes = sum(_count_private_pages(pid) for pid in pids) * _PAGE_BYTES
    if memory_bytes > exact_above_bytes:
        memory_bytes = sum(_measure_exact_bytes(pid) for pid in pids)
    return ProcessUsage(len(pids), ticks / _TICKS_PER_S, memory_bytes)


def stop_descendants(root: int) -> bool:
    """Stop all descendants of `root`; return False when they fork faster than they are stopped. Blocks up to 5 s."""
    quiet_rounds = 0
    for _ in _poll_rounds():
        running = [pid for pid in process_tree(root)[1:] if _read_state(pid) not in _STOPPED_STATES]
        for pid in running:
            send_signal(pid, root, signal.SIGSTOP)
        # A process may have forked just before it stopped: only a second look finds the child.
        quiet_rounds = 0 if running else quiet_rounds + 1
        if quiet_rounds == 2:
            return True
    return False


def resume_descendants(root: int) -> None:
    """Resume all descendants of `root`."""
    for pid in process_tree(root)[1:]:
        send_signal(pid, root, signal.SIGCONT)


def send_signal(pid: int, root: int, signal_number: signal.Signals) -> None:
    """Signal a descendant of `root`, and not another process that has got its number meanwhile."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _is_descendant(pid, root):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal_number)
    finally:
        os.close(pidfd)


def _is_descendant(pid: int, root: int) -> bool:
    while pid > 1 and pid != root:
        pid = int((_read_stat(pid) or ["X", "0"])[1])
    return pid == root


def _poll_rounds() -> Iterator[None]:
    until = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < until:
        yield
        time.sleep(0.001)


def _read_text(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; none for a process that ended."""
    try:
        return _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []


def _read_state(pid: int) -> str:
    return (_read_stat(pid) or ["X"])[0]


def _count_private_pages(pid: int) -> int:
    """Return the number of resident pages that belong to no file."""
    try:
        fields = _read_text(f"/proc/{pid}/statm").split()
    except OSError:
        return 0
    return int(fields[1]) - int(fields[2])


def _measure_exact_bytes(pid: int) -> int:
    """Return the anonymous memory and the process's part of the shared memory."""
    try:
        lines = [line.split() for line in _read_text(f"/proc/{pid}/smaps_rollup").splitlines()[1:]]
    except OSError:
        return _count_private_pages(pid) * _PAGE_BYTES
    return sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:")) * 1024
