"""WalCheckpoints: copies the write-ahead log of an SQLite file into the file, in a thread of its own."""

import logging
import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_log = logging.getLogger(__name__)

WAL_SIZE_LIMIT_BYTES = 64 * 1024 * 1024


class WalCheckpoints:
    """Copies what large writes have left in the log while the connection of the store goes on with other calls.

    SQLite copies the log at the end of the write that fills it. After a value of many megabytes that takes as long as
    the write itself, and all other calls wait for it.
    """

    def __init__(self, path: str) -> None:
        # of a file that was deleted none is made again; a store in memory has no log
        self._uri = f"{Path(path).absolute().as_uri()}?mode=rw" if path != ":memory:" else "file::memory:"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-checkpoints")
        self._running: Future[int] | None = None
        self._log_bytes = 0

    def begin(self) -> None:
        """Begin a copy, unless one is running."""
        if self._running is None or self._running.done():
            self._running = self._thread.submit(self._copy)

    def is_late(self) -> bool:
        """Return True if the log was over its limit after the last copy: then the next write has to copy it itself."""
        if self._running is not None and self._running.done():
            self._log_bytes = self._running.result()
        return self._log_bytes > WAL_SIZE_LIMIT_BYTES

    def close(self) -> None:
        """Wait for the copy that runs."""
        self._thread.shutdown()

    def _copy(self) -> int:
        """Return the bytes of the log that are not in the file yet."""
        try:
            connection = sqlite3.connect(self._uri, uri=True, isolation_level=None)
            try:
                page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])
                _, in_log, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                connection.close()
        except sqlite3.Error as exc:
            _log.warning("the write-ahead log could not be copied: %s", exc)
            return WAL_SIZE_LIMIT_BYTES + 1
        return (in_log - copied) * page_bytes
