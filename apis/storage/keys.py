"""Keys of records whose id a client chose: such an id may hold characters that no key may, or be too long."""

import hashlib
from typing import Final

MAX_ID_CHARS: Final = 256


def is_safe_id(client_id: str, max_chars: int = MAX_ID_CHARS) -> bool:
    """Return True if the id can be part of a key as it is: 1 to `max_chars` printable ASCII characters, slashes
    included."""
    return 0 < len(client_id) <= max_chars and client_id.isascii() and client_id.isprintable()


def id_to_key_part(client_id: str) -> str:
    """Return the id itself if it is safe, else its SHA-256 in hexadecimal."""
    return client_id if is_safe_id(client_id) else hashlib.sha256(client_id.encode()).hexdigest()
