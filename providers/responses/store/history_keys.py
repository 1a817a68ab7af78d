"""Keys of stored responses in a KVStore; `history.py` describes what they hold."""

from typing import Final

from apis.storage.keys import id_to_key_part
from providers.responses.store.history_cache import TurnPosition

LINE_KIND: Final = "line"
EVICTABLE_KINDS: Final = frozenset({"response", LINE_KIND})
"""The kinds of entries that a full store may lose. That of a line is only needed by responses that were begun before
its turns were deleted, so it goes when all responses of that time have gone."""
_DEPTH_DIGITS: Final = 8


def record_key(tenant: str, kind: str, client_id: str) -> str:
    """Return the key of a record by an id that a client may have chosen."""
    return f"{tenant}/{kind}/{id_to_key_part(client_id)}"


def run_key(tenant: str, response_id: str) -> str:
    """Return the key of the record that exists until a background response has ended."""
    return f"/run/{tenant}/{response_id}"


def turn_key(tenant: str, position: TurnPosition) -> str:
    """Return the key of the turn at that position."""
    return f"{tenant}/turn/{position.line}/{position.depth:0{_DEPTH_DIGITS}d}"


def branch_key(tenant: str, position: TurnPosition, line: str) -> str:
    """Return the key that records that `line` branches off from the turn at that position."""
    return f"{tenant}/branch/{position.line}/{position.depth:0{_DEPTH_DIGITS}d}/{line}"


def line_key(tenant: str, line: str) -> str:
    """Return the key of the state of a line."""
    return f"{tenant}/{LINE_KIND}/{line}"


def parse_branch_key(key: str) -> tuple[TurnPosition, str]:
    """Return the position of the fork, and the line that begins there."""
    *_, line, depth, new_line = key.split("/")
    return TurnPosition(line, int(depth)), new_line
