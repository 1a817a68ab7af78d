"""The stored record of a response, and what listings show of it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from openai.types.responses import Response

_PREVIEW_CHARS: Final = 160
"""Characters of a question, and of a text, that listings show."""
_SEARCHED_CHARS: Final = 2000
"""Characters of a question, and of a text, that searches look at."""
_SUMMARY_FIELDS: Final = (
    *("id", "object", "created_at", "completed_at", "status", "model", "background", "conversation"),
    *("previous_response_id", "error", "incomplete_details", "metadata", "usage"),
)


class ResponseRecord(msgspec.Struct):
    """A response without its output, the position of its turn, the beginnings of its text and its question, and the
    bytes of the items in its turn. `has_mailbox` says that input was left for the response that follows it
    (`run/mailbox.py`)."""

    line: str
    depth: int
    response: msgspec.Raw
    preview: str = ""
    turn_bytes: int = 0
    question: str = ""
    has_mailbox: bool = False


class _InputItem(msgspec.Struct):
    role: str | None = None
    content: msgspec.Raw = msgspec.Raw(b'""')


class _Part(msgspec.Struct):
    text: str | None = None


_INPUT_DECODER: Final = msgspec.json.Decoder(list[_InputItem])
_CONTENT_DECODER: Final = msgspec.json.Decoder(str | list[_Part])


def first_words(response: Response) -> str:
    """Return the beginning of the first text of a response."""
    for item in response.output:
        if item.type == "message" and item.content and item.content[0].type == "output_text":
            return item.content[0].text[:_SEARCHED_CHARS]
    return ""


def question_of(input_json: bytes) -> str:
    """Return the beginning of the last user message of a turn's input, a JSON array of items; empty without one."""
    for item in reversed(_INPUT_DECODER.decode(input_json)):
        if item.role == "user":
            content = _CONTENT_DECODER.decode(item.content)
            text = content if isinstance(content, str) else "\n".join(part.text for part in content if part.text)
            return text[:_SEARCHED_CHARS]
    return ""


def summarize_response(fields: Mapping[str, Any], preview: str = "", question: str = "") -> dict[str, Any]:
    """Return the row of a listing for a response, by its fields and the beginnings of its text and question."""
    beginnings = {"preview": preview[:_PREVIEW_CHARS], "question": question[:_PREVIEW_CHARS]}
    return {**{name: fields.get(name) for name in _SUMMARY_FIELDS}, **beginnings}
