"""Arguments of calls as models write them: a JSON object, or a text that can mean one object only."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, cast

from apis.wire.base import load_json

EMPTY_ARGUMENTS: Final = "{}"
RAW_FIELD: Final = "raw_arguments"
"""Field in which a server is sent arguments that are no object."""

_NOTHING: Final = frozenset(("", "null", "none", "undefined", "[]", "{}", '""'))
"""Ways to write the arguments of a function that takes none."""
_MAX_NOTHING_CHARS: Final = 64
_FENCE: Final = re.compile(r"```[a-zA-Z]*\s(.*)```", re.DOTALL)
_EMPTY_START: Final = re.compile(r"(?:\{\}|null)\s*(?=\{)")
"""The empty arguments with which some servers begin a call, before the arguments themselves."""
_MAX_LAYERS: Final = 4
"""Fences and encodings around one object."""
_STRUCTURE: Final = re.compile(r'[{}\[\]"]')
_STRING_END: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def means_nothing(text: str) -> bool:
    """Return true for the arguments of a function that is given none."""
    return len(text) < _MAX_NOTHING_CHARS and text.strip().lower() in _NOTHING


def read_object(text: str) -> str | None:
    """Return the object that arguments mean, as JSON: an object as it stands, without a fence or an encoding around
    it or an empty one before it, and an empty one for nothing. Return None for arguments that mean no object."""
    for _ in range(_MAX_LAYERS):
        stripped = text.strip()
        if means_nothing(stripped):
            return EMPTY_ARGUMENTS
        if start := _EMPTY_START.match(stripped):
            text = stripped[start.end() :]
            continue
        if fence := _FENCE.fullmatch(stripped):
            text = fence[1]
            continue
        value = _decode(text)
        if isinstance(value, dict):
            return text
        if isinstance(value, list) and len(entries := cast(list[object], value)) == 1 and isinstance(entries[0], dict):
            return json.dumps(entries[0], ensure_ascii=False)
        if not isinstance(value, str):
            return None
        text = value
    return None


def to_object(text: str) -> str:
    """Return arguments as the JSON of an object for a server, which may parse every call of a history: those that mean
    no object are the text in the field `raw_arguments`."""
    if text.startswith("{") and isinstance(_decode(text), dict):
        return text
    return read_object(text) or json.dumps({RAW_FIELD: text}, ensure_ascii=False)


def _decode(text: str) -> Any:
    try:
        return load_json(text)
    except (ValueError, RecursionError):
        return None


class JsonDepth:
    """Finds the end of a JSON value that arrives in pieces. Each piece is read once, and only when it is asked for."""

    __slots__ = ("_count", "_depth", "_is_in_string", "_pending", "is_closed")

    def __init__(self) -> None:
        self._count = self._depth = 0
        self._is_in_string = False
        self._pending = ""
        self.is_closed = False

    def is_closed_by(self, pieces: Sequence[str]) -> bool:
        """Return true if a value has ended within the pieces, of which earlier ones may have been read before."""
        while self._count < len(pieces) and not self.is_closed:
            self._read(pieces[self._count])
            self._count += 1
        return self.is_closed

    def _read(self, piece: str) -> None:
        text, at = self._pending + piece, 0
        self._pending = ""
        while at < len(text) and not self.is_closed:
            if self._is_in_string:
                end = _STRING_END.match(text, at)
                if end is None:
                    backslashes = len(text) - len(text.rstrip("\\"))
                    self._pending = "\\" if backslashes % 2 else ""
                    return
                self._is_in_string, at = False, end.end()
                self.is_closed = self._depth == 0
                continue
            mark = _STRUCTURE.search(text, at)
            if mark is None:
                return
            at = mark.end()
            if mark[0] == '"':
                self._is_in_string = True
            elif mark[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                self.is_closed = self._depth <= 0
