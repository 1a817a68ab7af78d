"""Control group for one sandbox, below the group that the session server runs in."""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_NAME_PREFIX: Final = "python-sandbox"
_group_numbers: Final = itertools.count(1)


class Cgroup:
    """Exact bound on memory and processes: rlimits bound them per process, and sampling only afterwards."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    @classmethod
    def create(cls, memory_bytes: int, processes: int) -> "Cgroup | None":
        """Return a new group, or None where none can be created: not root, nothing delegated, or a read-only /sys."""
        name = f"{_NAME_PREFIX}-{os.getpid()}-{next(_group_numbers)}"
        for settings in (
            {
                "": {"memory.max": memory_bytes, "pids.max": processes},
                "?": {"memory.swap.max": 0, "memory.oom.group": 1},
            },
            {
                "memory": {"memory.limit_in_bytes": memory_bytes},
                "pids": {"pids.max": processes},
                "?": {"memory.memsw.limit_in_bytes": memory_bytes},
            },
        ):
            optional = settings.pop("?")
            cgroup = cls([parent / name for parent in _find_own_groups(settings)])
            if len(cgroup._folders) == len(settings) and cgroup._apply_limits(list(settings.values()), optional):
                return cgroup
            cgroup.remove()
        return None

    def _apply_limits(self, settings: Sequence[Mapping[str, int]], optional_settings: Mapping[str, int]) -> bool:
        try:
            for folder, values in zip(self._folders, settings, strict=True):
                folder.mkdir()
                for file, value in values.items():
                    # Never created: where the controller is off, the file is missing, and so is its limit.
                    _write_value(folder / file, value)
        except OSError:
            return False
        for file, value in optional_settings.items():
            with contextlib.suppress(OSError):
                _write_value(self._folders[0] / file, value)
        return True

    def add_processes(self, pids: Sequence[int]) -> bool:
        """Move processes in, and with them all that they start later. Return False when that fails."""
        try:
            for folder, pid in itertools.product(self._folders, pids):
                _write_value(folder / "cgroup.procs", pid)
        except OSError:
            return False
        return True

    def ran_out_of_memory(self) -> bool:
        """Return True when the kernel has killed a process of this group because the memory was used up."""
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                match = re.search(r"^oom_kill ([0-9]+)$", (self._folders[0] / file).read_text(), re.MULTILINE)
                return match is not None and match[1] != "0"
        return False

    def remove(self) -> None:
        """Remove the group after its processes have ended. Blocks up to 0.5 s while they are ending."""
        until = time.monotonic() + 0.5
        for folder in self._folders:
            while folder.exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > until:
                    break
                time.sleep(0.005)


def remove_stale_groups() -> None:
    """Remove the groups of servers that were killed before they could."""
    for parent in {*_find_own_groups([""]), *_find_own_groups(["memory", "pids"])}:
        for folder in parent.glob(f"{_NAME_PREFIX}-*-*"):
            if not Path("/proc", folder.name.split("-")[2]).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _find_own_groups(controllers: Mapping[str, object] | Sequence[str]) -> list[Path]:
    """Return the folder of this process's group for each controller; the unified hierarchy is the controller ''."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            paths.update(dict.fromkeys(names.split(","), path))
    folders = [_ROOT / name / paths[name].lstrip("/") for name in controllers if name in paths]
    return [folder for folder in folders if (folder / "cgroup.procs").exists()]


def _write_value(file: Path, value: int) -> None:
    with file.open("r+") as stream:
        stream.write(str(value))
