"""Folder of the Unix sockets by which the workers of this user reach their Python session servers."""

import fcntl
import hashlib
import os
import socket
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from apis import confinement
from providers.common import net

_MAX_FOLDERS: Final = 16
"""Names of which the first one is used that no other user has taken."""
_MAX_PATH_BYTES: Final = 100
"""Length of a socket's path in bytes; the kernel's own limit is 108 on Linux and 104 on macOS."""


def socket_path(deployment_id: str, config: bytes) -> Path:
    """Return where a session server listens.

    Its name is a hash of the deployment, the settings and this package's code: a server is never shared with another
    store, and after an upgrade or a change of settings the new workers start a server of their own. The name of the
    folder is a hash of the deployment, whose id is only in its store: another user of the machine cannot create it
    first. Where one has seen it, and creates it after a restart of the machine, the next name is the folder's.
    """
    identity = hashlib.sha256(f"{deployment_id}\n".encode() + config)
    for folder in (Path(__file__).parent, Path(confinement.__file__).parent, Path(net.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            identity.update(file.read_bytes())
    names = (hashlib.sha256(f"{deployment_id}\n{number}".encode()).hexdigest()[:16] for number in range(_MAX_FOLDERS))
    folders = [Path(tempfile.gettempdir(), f"python-sessions-{name}") for name in names]
    folder = next((each for each in folders if not os.path.lexists(each) or _is_own(each)), folders[0])
    return folder / f"{identity.hexdigest()[:16]}.sock"


def prepare_folder(path: Path) -> None:
    """Create the folder of a socket, for this user alone. Raise OSError where it cannot be that or the path is too
    long."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(f"the path {path} is too long for a socket")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(path.parent):
        raise OSError(f"{path.parent} belongs to another user, or others may use it")


def _is_own(folder: Path) -> bool:
    """Return true for a folder of this user alone."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


@contextmanager
def locked_folder(folder: Path) -> Generator[None]:
    """Hold the folder's lock, under which sockets are created and removed: for milliseconds. Blocks."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def connect(path: Path) -> socket.socket:
    """Return a connection. Never waits: raises BlockingIOError when the server's queue is full, and
    FileNotFoundError or ConnectionRefusedError when no server listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets of servers that were killed before they could; needs the folder's lock."""
    for path in folder.glob("*.sock"):
        with suppress(OSError):
            try:
                connect(path).close()
            except ConnectionRefusedError:
                path.unlink()
