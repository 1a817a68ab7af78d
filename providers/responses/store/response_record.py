"""The stored record of a response, what listings show of it, and the keys of all that is stored of responses.

`history.py` describes what the keys hold.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from openai.types.responses import Response

from apis.storage.keys import id_to_key_part
from providers.responses.store.history_cache import TurnPosition

LINE_KIND: Final = "line"
EVICTABLE_KINDS: Final = frozenset({"response", LINE_KIND})
"""The kinds of entries that a full store may lose. That of a line is only needed by responses that were begun before
its turns were deleted, so it goes when all responses of that time have gone."""
_DEPTH_DIGITS: Final = 8
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
