"""The stored record of a response, and what listings show of it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from openai.types.responses import Response

_PREVIEW_CHARS: Final = 160
_SUMMARY_FIELDS: Final = (
    *("id", "object", "created_at", "completed_at", "status", "model", "background", "conversation"),
    *("previous_response_id", "error", "incomplete_details", "metadata", "usage"),
)


class ResponseRecord(msgspec.Struct):
    """A response without its output, the position of its turn, the first words of its text, and the bytes of the items
    in its turn."""

    line: str
    depth: int
    response: msgspec.Raw
    preview: str = ""
    turn_bytes: int = 0


def first_words(response: Response) -> str:
    """Return the beginning of the first text of a response."""
    for item in response.output:
        if item.type == "message" and item.content and item.content[0].type == "output_text":
            return item.content[0].text[:_PREVIEW_CHARS]
    return ""


def summarize_response(fields: Mapping[str, Any], preview: str) -> dict[str, Any]:
    """Return what a listing shows of a response."""
    return {**{name: fields.get(name) for name in _SUMMARY_FIELDS}, "preview": preview}
