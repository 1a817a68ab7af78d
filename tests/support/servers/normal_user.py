"""Command that runs Python as a normal user, from tests that run as root."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

NORMAL_UID: Final = 30001
SHARED_PYTHON: Final[Mapping[str, Any]] = {"dangerously_share_without_bounds": True}
"""Fields of the tool `python` for several tenants: a normal user who runs the tests may have no control groups."""

# In a mount namespace of its own, which ends with the command, the way to a Python in root's home is open.
_OPEN_WAY: Final = """
set -e
mount --bind "$1" "$3"
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir -p "$1/$2"
mount --bind "$3/$2" "$1/$2"
shift 3
exec "$@"
"""


def can_change_user() -> bool:
    """Return whether this process may start others as another user."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None and shutil.which("unshare") is not None


def normal_user_command(folder: Path, *arguments: str) -> Sequence[str]:
    """Return the command of this Python as a user without any rights; `folder` is an empty one for its mounts."""
    user = str(NORMAL_UID)
    python = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--", sys.executable, *arguments]
    base = Path(sys.base_prefix).resolve()
    closed = next((each for each in reversed(base.parents) if not each.stat().st_mode & 0o001), None)
    if closed is None:
        return python
    return [
        "unshare",
        "--mount",
        "sh",
        "-c",
        _OPEN_WAY,
        "sh",
        str(closed),
        str(base.relative_to(closed)),
        str(folder),
        *python,
    ]


def normal_user_environment() -> dict[str, str]:
    """Return an environment for it: that of this process, with the code under test first and no home of root's."""
    code = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": code, "HOME": tempfile.gettempdir(), "USER": "normal", "LOGNAME": "normal"}
