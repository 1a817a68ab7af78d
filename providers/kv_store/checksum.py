"""The checksum that the stores on disk append to each value: a changed bit is found when the value is read.

    VALUE MARK CRC32        the CRC-32 is that of the key, then the value, in four bytes, big-endian

A value without the mark was written before there were checksums, and is returned as it is.
"""

import logging
import zlib
from typing import Final

from apis.storage.kv_store import Entry

_log = logging.getLogger(__name__)

MARK: Final = b"\0\xffcrc32\xff"
_TRAILER_BYTES: Final = len(MARK) + 4
_MAX_LOGGED: Final = 10_000
_MIN_EQUAL_BYTES: Final = 5
"""Bytes of a trailer that equal those of the mark from which it is a damaged mark, and no end of an old value."""


def add_checksum(key: bytes, value: bytes) -> bytes:
    """Return the bytes to store for the value."""
    return b"%b%b%b" % (value, MARK, zlib.crc32(value, zlib.crc32(key)).to_bytes(4, "big"))


class EntryDecoder:
    """Decodes what one store has stored, and logs each damaged entry once, however often it is read."""

    def __init__(self) -> None:
        self._logged: set[tuple[bytes, int]] = set()

    def decode(self, key: bytes, stored: bytes, version: int) -> Entry:
        """Return the entry of stored bytes. One that is damaged has no value, and its key is logged."""
        mark = stored[-_TRAILER_BYTES:-4]
        if mark == MARK:
            value = stored[:-_TRAILER_BYTES]
            if zlib.crc32(value, zlib.crc32(key)) == int.from_bytes(stored[-4:], "big"):
                return Entry(value, version)
        elif sum(map(int.__eq__, mark, MARK)) < _MIN_EQUAL_BYTES:
            return Entry(stored, version)
        self._log_once(key, version)
        return Entry(None, version)

    def _log_once(self, key: bytes, version: int) -> None:
        if (key, version) in self._logged:
            return
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add((key, version))
        _log.error("the stored value of the key %r is damaged", key.decode(errors="replace"))
