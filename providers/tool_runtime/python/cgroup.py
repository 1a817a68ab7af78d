"""Control group for one sandbox, below the group that the session server runs in.

With cgroup v1 any group may have children. With v2 a group whose children have controllers must hold no process itself:
`prepare_delegated_group` moves those of a group that was delegated to this server into a child of their own.
"""

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
_SERVER_GROUP: Final = "python-sandbox-server"
"""Child of a delegated group that holds the server's own processes."""
_CONTROLLERS: Final = ("memory", "pids")
_DELEGATION_MARKS: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes by which systemd marks a group with `Delegate=yes`."""
_MAX_MOVE_ROUNDS: Final = 20
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
                "?": {"memory.swap.max": 0},
            },
            {
                "memory": {"memory.limit_in_bytes": memory_bytes},
                "pids": {"pids.max": processes},
                # Buffers of TCP connections over the loopback are counted by v1 only where they have this limit.
                "?": {"memory.memsw.limit_in_bytes": memory_bytes, "memory.kmem.tcp.limit_in_bytes": memory_bytes // 4},
            },
        ):
            optional = settings.pop("?")
            cgroup = cls([parent / name for parent in _find_parent_groups(settings)])
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

    def count_memory_kills(self) -> int:
        """Return how many processes of this group the kernel has killed because the memory was used up."""
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                match = re.search(r"^oom_kill ([0-9]+)$", (self._folders[0] / file).read_text(), re.MULTILINE)
                return 0 if match is None else int(match[1])
        return 0

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


def prepare_groups() -> None:
    """Make a delegated v2 group of this process usable, and remove the groups of servers that were killed before they
    could. Blocks for milliseconds."""
    for own in _find_own_groups([""]):
        prepare_delegated_group(own, _CONTROLLERS)
    for parent in [*_find_parent_groups([""]), *_find_parent_groups(_CONTROLLERS)]:
        for folder in parent.glob(f"{_NAME_PREFIX}-*-*"):
            if not Path("/proc", folder.name.split("-")[2]).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def prepare_delegated_group(own: Path, controllers: Sequence[str]) -> bool:
    """Turn controllers on for the children of the v2 group `own` or the one above it, whichever is delegated to this
    server; return False where neither is, or the kernel refuses.

    Where the delegated group holds processes, all of them move into one child: they are the server's own, since what
    is delegated is a service or scope of systemd or the whole of a container.
    """
    group = next((group for group in (own, own.parent) if _is_delegated(group)), None)
    if group is None:
        return False
    try:
        if not _has_controllers(group, controllers):
            _move_processes(group, group / _SERVER_GROUP)
            for controller in controllers:
                _write_value(group / "cgroup.subtree_control", f"+{controller}")
    except OSError:
        return False
    return True


def _is_delegated(group: Path) -> bool:
    """Return whether the group belongs to this server: marked so by systemd, or the root of a cgroup namespace, which
    unlike the machine's own root has a type."""
    for mark in _DELEGATION_MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(group, mark) == b"1":
                return True
    return group == _ROOT and (group / "cgroup.type").exists()


def _has_controllers(group: Path, controllers: Sequence[str]) -> bool:
    return {*controllers} <= {*(group / "cgroup.subtree_control").read_text().split()}


def _move_processes(group: Path, child: Path) -> None:
    """Move all processes of a group into a child of it; again until none is left, since one may fork meanwhile."""
    for _ in range(_MAX_MOVE_ROUNDS):
        pids = (group / "cgroup.procs").read_text().split()
        if not pids:
            return
        child.mkdir(exist_ok=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                _write_value(child / "cgroup.procs", pid)


def _find_parent_groups(controllers: Mapping[str, object] | Sequence[str]) -> list[Path]:
    """Return the folder below which sandboxes have their groups for each controller; that of v2 is ''."""
    if "" not in controllers:
        return _find_own_groups(controllers)
    groups = [own if _is_usable(own) else own.parent for own in _find_own_groups(controllers)]
    return [group for group in groups if _is_usable(group)]


def _is_usable(group: Path) -> bool:
    """Return whether a v2 group may have sandboxes as children: this process's own one, or a delegated one."""
    try:
        return _has_controllers(group, _CONTROLLERS) and (group in _find_own_groups([""]) or _is_delegated(group))
    except OSError:
        return False


def _find_own_groups(controllers: Mapping[str, object] | Sequence[str]) -> list[Path]:
    """Return the folder of this process's group for each controller; the unified hierarchy is the controller ''."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            paths.update(dict.fromkeys(names.split(","), path))
    folders = [_ROOT / name / paths[name].lstrip("/") for name in controllers if name in paths]
    return [folder for folder in folders if (folder / "cgroup.procs").exists()]


def _write_value(file: Path, value: int | str) -> None:
    with file.open("r+") as stream:
        stream.write(str(value))
