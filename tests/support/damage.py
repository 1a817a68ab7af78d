"""Damage to stored records: what a failing disk, a bad copy or a foreign program does to a value."""

import sqlite3
from collections.abc import Mapping
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
    stored = read_stored(database, key)
    assert stored is not None
    write_stored(database, {key: damaged_bytes(stored, damage)})


def read_stored(database: Path, key: str) -> bytes | None:
    """Return the stored bytes of a key, with the checksum; None where it is absent."""
    with closing(_connect(database)) as db:
        row = db.execute("SELECT value FROM entries WHERE key = ?", (key.encode(),)).fetchone()
        return None if row is None else row[0]


def write_stored(database: Path, values: Mapping[str, bytes]) -> None:
    """Replace the stored bytes of keys that are there."""
    with closing(_connect(database)) as db:
        db.execute("BEGIN IMMEDIATE")
        rows = [(value, key.encode()) for key, value in values.items()]
        db.executemany("UPDATE entries SET value = ? WHERE key = ?", rows)
        db.execute("COMMIT")


def stored_values(database: Path) -> dict[str, bytes]:
    """Return all stored values of an SQLite store, with their checksums, by key."""
    with closing(_connect(database)) as db:
        rows = db.execute("SELECT key, value FROM entries WHERE key != x'' ORDER BY key")
        return {key.decode(): value for key, value in rows}


def stored_keys(database: Path) -> list[str]:
    """Return all keys of an SQLite store."""
    return [*stored_values(database)]


def _connect(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(database, isolation_level=None, timeout=10)
