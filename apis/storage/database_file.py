"""DatabaseFile: the path of an SQLite database, readable only by its owner, and watched while it is open.

A process that has a file open goes on reading and writing it after it was deleted or replaced, and all of that is lost
when the process ends.
"""

import logging
import os
import stat
import time
from pathlib import Path
from typing import Final

from apis.errors import StoreUnavailable

_log = logging.getLogger(__name__)
_OWNER_ONLY: Final = 0o600
_CHECK_INTERVAL_S: Final = 1.0
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_IN_MEMORY: Final = ":memory:"

FileIdentity = tuple[int, int]
"""Device and inode."""


class DatabaseFile:
    """The file at `path` and its write-ahead log, as they were when they were opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._wal_path = f"{path}-wal"
        self._identity: FileIdentity | None = None
        self._wal_identity: FileIdentity | None = None
        self._next_check = 0.0
        self._is_lost = False

    def prepare(self) -> None:
        """Create the file for its owner only if it is absent; SQLite gives its other files the same permissions. Warn
        of an existing one that others can read. An impossible path is left for SQLite to refuse."""
        if self._path == _IN_MEMORY:
            return
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER_ONLY))
        except FileExistsError:
            self._warn_if_shared()
        except OSError:
            return

    def remember(self) -> None:
        """Take the files that are there now as those that are open."""
        self._identity = _read_identity(self._path)
        self._wal_identity = _read_identity(self._wal_path)

    def require(self, *, is_write: bool) -> None:
        """Raise StoreUnavailable if the open files are no longer those at the path. The log is looked at once a second,
        and so is the file for reads."""
        now = time.monotonic()
        is_due = self._is_lost or now >= self._next_check
        if self._identity is None or not (is_write or is_due):
            return
        is_lost = _read_identity(self._path) != self._identity
        if is_due:
            self._next_check = now + _CHECK_INTERVAL_S
            wal_identity = _read_identity(self._wal_path)
            self._wal_identity = self._wal_identity or wal_identity
            is_lost = is_lost or wal_identity != self._wal_identity
        if is_lost and not self._is_lost:
            _log.error(
                "the database file %r or its write-ahead log was deleted or replaced while it was open: nothing is "
                "read or written any more. Stop all servers that use it, restore it, and start them.",
                self._path,
            )
        self._is_lost = is_lost
        if is_lost:
            raise StoreUnavailable("The database file was deleted or replaced while the server was running.")

    def _warn_if_shared(self) -> None:
        for path in (self._path, self._wal_path, f"{self._path}-shm"):
            try:
                mode = Path(path).stat().st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and mode & _OTHERS:
                _log.warning("other users of this machine can access the database file %r: chmod 600 it", path)


def _read_identity(path: str) -> FileIdentity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
