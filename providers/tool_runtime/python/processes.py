"""Processes of a sandbox, measured, stopped and resumed from outside through /proc."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
    """Measure a process and its descendants: private and shared memory, and page tables. Memory that they share is
    counted for each of them, unless the sum exceeds `exact_above_bytes`: then it is measured exactly, which takes
    longer."""
    pids = process_tree(root)
    ticks = sum(sum(map(int, _read_stat(pid)[11:15])) for pid in pids)
    memory_bytes = sum(_measure_bytes(pid) for pid in pids)
    if memory_bytes > exact_above_bytes:
        memory_bytes = sum(_measure_exact_bytes(pid) for pid in pids)
    return ProcessUsage(len(pids), ticks / _TICKS_PER_S, memory_bytes)


def measure_socket_bytes(pid: int) -> int:
    """Return the most that the sockets in the network namespace of a process can hold, those included that are closed
    or on their way between processes while their data is not read; 0 when the process has ended.

    A socket takes data while it holds less than its send buffer, at most half of that at a time (sock_alloc_send_pskb).
    """
    try:
        used = next(line for line in _read_text(f"/proc/{pid}/net/sockstat").splitlines() if "sockets:" in line)
        return int(used.split()[2]) * int(_read_text("/proc/sys/net/core/wmem_default")) * 3 // 2
    except (OSError, StopIteration):
        return 0


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


async def wait_for_exit(pidfd: int, timeout_s: float) -> None:
    """Wait until a process has ended, or for the time."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()
    finally:
        loop.remove_reader(pidfd)


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


def _measure_bytes(pid: int) -> int:
    """Return the resident memory that belongs to no file on a disk, and the page tables."""
    return sum(_read_kib(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmPTE:"))) * 1024


def _measure_exact_bytes(pid: int) -> int:
    """Return the anonymous memory, the process's part of the shared memory, and the page tables."""
    exact = _read_kib(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
    return (sum(exact) + sum(_read_kib(f"/proc/{pid}/status", ("VmPTE:",)))) * 1024 if exact else _measure_bytes(pid)


def _read_kib(path: str, names: Sequence[str]) -> list[int]:
    """Return the values of these lines, in KiB; none for a process that ended."""
    try:
        return [int(line.split()[1]) for line in _read_text(path).splitlines() if line.startswith(tuple(names))]
    except OSError:
        return []
