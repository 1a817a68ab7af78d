"""Keys of records: ids that sort by the time of creation, and ids that a client chose, which may not fit into a key."""

import hashlib
import os
import secrets
import time
from typing import Final

MAX_ID_CHARS: Final = 256
MAX_RECORD_ID_CHARS: Final = 128
"""Characters of an id that the server has chosen; a longer one has no record."""
NO_ID: Final = "."

_last_ms = 0
_ids_in_ms = 0
"""Ids that were made in the millisecond `_last_ms` before the newest one."""
_random_digits: Final[list[str]] = []
"""Random bits for ids, 112 each, read in advance: one at a time, they are the largest part of the time of an id."""
os.register_at_fork(after_in_child=_random_digits.clear)


def is_safe_id(client_id: str, max_chars: int = MAX_ID_CHARS) -> bool:
    """Return True if the id can be part of a key as it is: 1 to `max_chars` printable ASCII characters, slashes
    included."""
    return 0 < len(client_id) <= max_chars and client_id.isascii() and client_id.isprintable()


def record_id(client_id: str) -> str:
    """Return the id of a record that a client sent if it can be one part of a key, else NO_ID, which no record has."""
    return client_id if is_safe_id(client_id, MAX_RECORD_ID_CHARS) and "/" not in client_id else NO_ID


def id_to_key_part(client_id: str) -> str:
    """Return the id itself if it is safe, else its SHA-256 in hexadecimal."""
    return client_id if is_safe_id(client_id) else hashlib.sha256(client_id.encode()).hexdigest()


def new_id_key() -> str:
    """Return the part of a new id after its prefix: the time in ms as 12 hexadecimal digits, 4 that number the ids of
    this process within the millisecond, so that they sort in their order, and 112 random bits."""
    global _last_ms, _ids_in_ms  # noqa: PLW0603 - of all threads: two at once may get one number, and still differ
    now_ms = time.time_ns() // 1_000_000
    _ids_in_ms = _ids_in_ms + 1 if now_ms == _last_ms else 0
    _last_ms = now_ms
    return f"{now_ms:012x}{_ids_in_ms & 0xFFFF:04x}{_take_random_digits()}"


def _take_random_digits() -> str:
    try:
        return _random_digits.pop()  # one step, so that no two threads take the same
    except IndexError:
        digits = secrets.token_hex(14 * 64)
        _random_digits.extend(digits[start : start + 28] for start in range(28, len(digits), 28))
        return digits[:28]


def new_response_id() -> str:
    """Return a new id of a response."""
    return f"resp_{new_id_key()}"
