"""Damage to stored records: what a failing disk, a bad copy or a foreign program does to a value."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

DAMAGES: Final = ("crc", "junk", "json")
"""One changed bit, which the checksum finds; bytes that are not UTF-8; JSON of another shape."""
_TRAILER_BYTES: Final = 13


def damaged_bytes(stored: bytes, damage: str) -> bytes:
    """Return the stored bytes of a value after the damage."""
    if damage == "junk":
        return b"\xff\xfe\x00junk\x80"
    if damage == "json":
        return b'[{"a":1}]'
    position = max(0, (len(stored) - _TRAILER_BYTES) // 2)
    return stored[:position] + bytes([stored[position] ^ 1]) + stored[position + 1 :]


def damage_record(database: Path, key: str, damage: str) -> None:
    """Change the stored value of a key in an SQLite store that a server may have open."""
    with closing(sqlite3.connect(database, isolation_level=None, timeout=10)) as db:
        [stored] = db.execute("SELECT value FROM entries WHERE key = ?", (key.encode(),)).fetchone()
        db.execute("UPDATE entries SET value = ? WHERE key = ?", (damaged_bytes(stored, damage), key.encode()))


def stored_keys(database: Path) -> list[str]:
    """Return all keys of an SQLite store."""
    with closing(sqlite3.connect(database, isolation_level=None, timeout=10)) as db:
        return [key.decode() for [key] in db.execute("SELECT key FROM entries WHERE key != x'' ORDER BY key")]
