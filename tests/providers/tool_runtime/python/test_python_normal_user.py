"""The Python sandbox of a server that a normal user runs: it has no control group, and holds all the same."""

import subprocess
from pathlib import Path

import pytest

from tests.support.servers.normal_user import can_change_user, normal_user_command, normal_user_environment

pytestmark = pytest.mark.skipif(not can_change_user(), reason="only root can start tests as another user")
ESCAPES = Path(__file__).with_name("test_python_escapes.py")


def run_escapes(folder: Path, *options: str) -> str:
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "-n0", str(ESCAPES), *options)
    tests = subprocess.run(
        normal_user_command(folder, *arguments),
        env=normal_user_environment(),
        cwd=ESCAPES.parents[4],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout[-3000:] + tests.stderr[-3000:]
    return tests.stdout


def test_memory_is_bounded_for_a_normal_user(tmp_path: Path) -> None:
    """Shared maps, buffers of sockets and processes together, where no control group counts them."""
    assert run_escapes(tmp_path, "-k", "(maps and two) or (buffers and sockets) or internet").startswith("....")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_escape_fails_for_a_normal_user(tmp_path: Path) -> None:
    """The whole suite of escapes."""
    run_escapes(tmp_path)
