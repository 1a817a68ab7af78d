"""The checksum that the stores on disk append to each value: a changed bit is found when the value is read.

VALUE CRC32        the CRC-32 is that of the key, then the value, in four bytes, big-endian
"""

import logging
import zlib
from typing import Final

from apis.storage.kv_store import Entry

_log = logging.getLogger(__name__)

_CHECKSUM_BYTES: Final = 4
_MAX_LOGGED: Final = 10_000


def add_checksum(key: bytes, value: bytes) -> bytes:
    """Return the bytes to store for the value."""
    return value + zlib.crc32(value, zlib.crc32(key)).to_bytes(_CHECKSUM_BYTES, "big")


class EntryDecoder:
    """Decodes what one store has stored, and logs each damaged entry once, however often it is read."""

    def __init__(self) -> None:
        self._logged: set[tuple[bytes, int]] = set()

    def decode(self, key: bytes, stored: bytes, version: int) -> Entry:
        """Return the entry of stored bytes. One that is damaged has no value, and its key is logged."""
        value = stored[:-_CHECKSUM_BYTES]
        if zlib.crc32(value, zlib.crc32(key)) == int.from_bytes(stored[-_CHECKSUM_BYTES:], "big"):
            return Entry(value, version)
        self._log_once(key, version)
        return Entry(None, version)

    def _log_once(self, key: bytes, version: int) -> None:
        if (key, version) in self._logged:
            return
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add((key, version))
        _log.error("the stored value of the key %r is damaged", key.decode(errors="replace"))
