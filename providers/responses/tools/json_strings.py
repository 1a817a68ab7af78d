"""Decodes JSON strings while a model writes them."""

import json
import re
from dataclasses import dataclass
from typing import Final, cast

_STRING_BODY: Final = re.compile(r'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+')
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAX_ESCAPE_CHARS: Final = len(r"\ud83d\ude00")


@dataclass(frozen=True, slots=True)
class DecodedPiece:
    """Text of the complete part of a string, and the `rest` that is not decoded yet. In a string that `is_closed` the
    rest follows its closing quote."""

    text: str
    rest: str
    is_closed: bool


def decode_string_piece(buffer: str) -> DecodedPiece:
    """Decode as much of a string, after its opening quote, as is complete: no escape is cut, nor a surrogate pair.
    Line breaks that the model did not escape are accepted. Raises ValueError for what no string can hold."""
    end = _STRING_BODY.match(buffer).end()  # pyright: ignore[reportOptionalMemberAccess] - it also matches nothing
    raw, rest = buffer[:end], buffer[end:]
    is_closed = rest.startswith('"')
    text = cast(str, json.loads(f'"{raw}"', strict=False))
    if is_closed:
        return DecodedPiece(replace_surrogates(text), rest[1:], is_closed=True)
    if "\ud800" <= text[-1:] <= "\udbff":
        text, rest = text[:-1], raw[-6:] + rest
    if len(rest) > _MAX_ESCAPE_CHARS:
        raise ValueError("an escape that JSON does not have")
    return DecodedPiece(replace_surrogates(text), rest, is_closed=False)


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair, which has no UTF-8."""
    return _LONE_SURROGATE.sub("\ufffd", text)
