"""Control groups of v2: the server's processes leave a group that was delegated to it, and no other."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from providers.tool_runtime.python.cgroup import prepare_delegated_group

V2_ROOTS = [
    each for each in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if (each / "cgroup.procs").exists()
]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not V2_ROOTS or not os.access(V2_ROOTS[0], os.W_OK),
    reason="needs root and a writable cgroup v2",
)


@contextmanager
def group_with_processes() -> Generator[tuple[Path, list[int]]]:
    """Make a group that holds two processes; it and they end with the context."""
    group = V2_ROOTS[0] / f"test-delegated-{os.getpid()}"
    group.mkdir()
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    try:
        for process in processes:
            (group / "cgroup.procs").write_text(str(process.pid))
        yield group, [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for folder in (*group.glob("*/"), group):
            with suppress(OSError):
                folder.rmdir()


def find_control_groups(server_id: int) -> list[str]:
    """Return the control groups of the session server's programs. Those of other servers may go while this looks."""
    names = (name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders)
    return [name for name in names if name.startswith(f"python-sandbox-{server_id}-")]


def processes_of(group: Path) -> list[int]:
    return sorted(map(int, (group / "cgroup.procs").read_text().split()))


@pytest.mark.parametrize("mark", ["user.delegate", "trusted.delegate"])
def test_the_processes_of_a_delegated_group_move_into_one_of_their_own(mark: str) -> None:
    """With v2 a group whose children have limits must hold no process."""
    with group_with_processes() as (group, pids):
        os.setxattr(group, mark, b"1")
        controllers = (group / "cgroup.controllers").read_text().split()
        # Where the machine's controllers are those of v1, the kernel has none to give: the processes move all the same.
        is_prepared = prepare_delegated_group(group, controllers or ["memory", "pids"])
        assert is_prepared == bool(controllers)
        assert processes_of(group) == []
        assert processes_of(group / "python-sandbox-server") == sorted(pids)
        assert (group / "cgroup.subtree_control").read_text().split() == controllers
        # A server that starts later is in the child, and finds the group above it ready.
        assert prepare_delegated_group(group / "python-sandbox-server", controllers) is True


def test_a_group_of_others_is_left_alone() -> None:
    """A login session's group, for one, holds its shell, too."""
    with group_with_processes() as (group, pids):
        assert prepare_delegated_group(group, ["memory", "pids"]) is False
        assert processes_of(group) == sorted(pids)
