"""The memory and the processor cores that this process may use: those of the machine, within its control groups.

Both versions of control groups are read (https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1), of this
process and of all groups around it: a container has its limit at the top of what it sees.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """Memory in bytes. `free_bytes` are available to new allocations; the cache of files counts as free."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control groups of a process: where the kernel shows them, and the file that names those of the process."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def find_folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the groups around this process that could have files of the controller."""
        for mount, path in [(self.root, "/"), (self.root / controller, "/"), *self._read_memberships(controller)]:
            inner = PurePosixPath(path)
            for group in (inner, *inner.parents):
                folder = mount / str(group).lstrip("/")
                if ".." not in group.parts and folder.is_dir():
                    yield folder

    def _read_memberships(self, controller: str) -> list[tuple[Path, str]]:
        memberships: list[tuple[Path, str]] = []
        for line in _read_lines(self.membership):
            _, _, names_and_path = line.partition(":")
            names, _, path = names_and_path.partition(":")
            if not names:
                memberships.append((self.root, path))
            elif controller in names.split(","):
                memberships.append((self.root / controller, path))
        return memberships


OWN_GROUPS: Final = ControlGroups()


def read_memory(groups: ControlGroups = OWN_GROUPS) -> UsableMemory:
    """Return the memory of the machine, or of the narrowest control group with a limit."""
    free_bytes, total_bytes = _read_machine_memory()
    machine_bytes = total_bytes
    for folder in groups.find_folders("memory"):
        limit = _read_first_number(folder, "memory.max", "memory.limit_in_bytes")
        usage = _read_first_number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and usage is not None and limit < machine_bytes:
            # The kernel counts its cache of files as usage, and takes it back when memory is needed.
            unused = max(0, limit - max(0, usage - _read_cache_bytes(folder)))
            free_bytes, total_bytes = min(free_bytes, unused), min(total_bytes, limit)
    return UsableMemory(free_bytes, total_bytes)


def _read_machine_memory() -> tuple[int, int]:
    """Return the bytes of the machine that are available, and all of them."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    total_bytes = page_bytes * os.sysconf("SC_PHYS_PAGES")
    for line in _read_lines(Path("/proc/meminfo")):  # Linux only
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, total_bytes
    return total_bytes, total_bytes


def usable_cores(groups: ControlGroups = OWN_GROUPS) -> int:
    """Return the number of threads that can compute at once: the cores of this process, within the quotas of processor
    time of its control groups, and OpenMP's own variables."""
    # Windows and macOS bind no process to cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [int(text) for name in _THREAD_VARIABLES if (text := os.environ.get(name, "").strip()).isdecimal()]
    quotas = (_read_cpu_quota(folder) for folder in groups.find_folders("cpu"))
    limits += [int(quota) for quota in quotas if quota is not None]
    return max(1, min([cores, *limits]))


def _read_cpu_quota(folder: Path) -> float | None:
    """Return the cores' worth of processor time that a group may use, None without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        quota_us, period_us = (_read_first_number(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _read_cache_bytes(folder: Path) -> int:
    """Return the bytes of cached files of a group that nothing uses, with those of the groups within it."""
    counts = dict(line.split(maxsplit=1) for line in _read_lines(folder / "memory.stat") if " " in line)
    # Version 1 counts the group alone under the name that version 2 has for all.
    count = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
    return int(count) if count.strip().isdecimal() else 0


def _read_first_number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
