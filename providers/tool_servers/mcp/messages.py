"""Brings the messages of MCP servers into the form that the SDK takes: bodies of JSON, and event streams."""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final, cast

from mcp_types import INTERNAL_ERROR, INVALID_REQUEST
from pydantic_core import from_json

from apis.errors import FetchFailed

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
BOM: Final = b"\xef\xbb\xbf"
NESTED_TOO_DEEPLY: Final = "[nested too deeply]"
"""Stands for a value that is nested too deeply for the SDK."""
_MAX_DEPTH: Final = 128
_MAX_CUT_CHARS: Final = 512 * 1024
"""Length from which a message that is nested too deeply is not cut: to look for its levels takes long."""
_LEVEL: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
"""A text, in which brackets do not count and which may lack its end, or a bracket."""
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LIST_FIELDS: Final = {"tools/list": "tools", "tools/call": "content"}
"""Fields of results, by method, that some servers send in place of the result."""

Json = dict[str, Any]


def mend_messages(body: bytes, request: Json) -> list[bytes]:
    """Return the messages in a body of JSON, one or a list of them. An answer gets the id of the request; one without
    an id can answer no other. What is no message is left out."""
    try:
        text = body.removeprefix(BOM).decode()
    except UnicodeDecodeError:
        text = body.removeprefix(BOM).decode("utf-8", "replace")
    try:
        value = json.loads(cut_deep_values(text))
    except (ValueError, RecursionError):
        return []
    entries = cast(list[Any], value) if isinstance(value, list) else [value]
    objects = [cast(Json, entry) for entry in entries if isinstance(entry, dict)]
    return [_to_json(message) for each in objects if (message := _mend(each, request))]


def cut_deep_values(text: str) -> str:
    """Return the JSON text with a text in place of each value below the 128th level, if it is nested more deeply than
    the SDK reads: one value does not take the whole message."""
    if text.count("{") + text.count("[") <= _MAX_DEPTH or len(text) > _MAX_CUT_CHARS or not _is_too_deep(text):
        return text
    pieces: list[str] = []
    depth = end = 0
    for level in _LEVEL.finditer(text):
        bracket = text[level.start()]
        if bracket in "[{":
            if depth == _MAX_DEPTH:
                pieces += text[end : level.start()], json.dumps(NESTED_TOO_DEEPLY)
            depth += 1
        elif bracket in "]}":
            depth -= 1
            if depth == _MAX_DEPTH:
                end = level.end()
    return "".join((*pieces, text[end:]))


def _is_too_deep(text: str) -> bool:
    try:
        from_json(text)
    except ValueError as exc:
        return "recursion limit" in str(exc)
    return False


def _mend(message: Json, request: Json) -> Json | None:
    """Return one message; None for an object that is none."""
    if isinstance(method := message.get("method"), str):
        params, message_id = message.get("params"), message.get("id")
        fields: Json = {"jsonrpc": "2.0", "method": method}
        if isinstance(params, dict):
            fields["params"] = params
        return fields if message_id is None else {**fields, "id": message_id}
    if message.get("error") is None and "result" not in message:
        return None
    answer: Json = {"jsonrpc": "2.0", "id": request.get("id", message.get("id"))}
    if message.get("error") is not None:
        return {**answer, "error": _mend_error(message["error"])}
    if _names_another(message.get("id"), request):
        return {**answer, "error": {"code": INVALID_REQUEST, "message": "It answers another request."}}
    result = message["result"]
    if not isinstance(result, dict):
        result = {} if result is None else {_LIST_FIELDS.get(str(request.get("method")), "value"): result}
    return {**answer, "result": result}


def _names_another(message_id: Any, request: Json) -> bool:
    """Return True for an id that is not that of the request. Its type does not matter."""
    if message_id is None or "id" not in request:
        return False
    return message_id != request["id"] and str(message_id) != str(request["id"])


def _mend_error(error: Any) -> Json:
    match error:
        case {"code": int(code), **rest}:
            text, data = rest.get("message"), rest.get("data")
        case {"message": str(text)}:
            code, data = INTERNAL_ERROR, error
        case _:
            code, text, data = INTERNAL_ERROR, error, None
    return {"code": code, "message": text if isinstance(text, str) else json.dumps(text), "data": data}


def _to_json(message: Json) -> bytes:
    text = json.dumps(message, ensure_ascii=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


async def mend_events(chunks: AsyncIterator[bytes], mender: "EventMender") -> AsyncGenerator[bytes]:
    """Yield the bytes of an event stream, mended. Raises FetchFailed for an event that is too large."""
    async for chunk in chunks:
        yield mender.feed(chunk)
    yield mender.end()


class EventMender:
    """Mends an event stream as it arrives. All its events with data are messages, but those of other names where it
    `has_names`. The last event need not have a blank line after it."""

    def __init__(self, request: Json, *, has_names: bool = False) -> None:
        self._request = request
        self._has_names = has_names
        self._is_at_start = True
        self._pending: list[bytes] = []
        self._pending_bytes = self._data_bytes = 0
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> bytes:
        """Return the mended bytes of the lines that the chunk completes."""
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        if self._pending_bytes + self._data_bytes > MAX_MESSAGE_BYTES:
            raise FetchFailed("The MCP server sends an event that is larger than allowed.")
        if b"\n" not in chunk and b"\r" not in chunk:
            return b""
        *lines, rest = _LINE_END.split(b"".join(self._pending))
        self._pending, self._pending_bytes = [rest] if rest else [], len(rest)
        return b"".join(piece for line in lines for piece in self._read_line(line))

    def end(self) -> bytes:
        """Return the mended bytes of what the end of the stream completes."""
        return self.feed(b"\n\n")

    def _read_line(self, line: bytes) -> Iterator[bytes]:
        if self._is_at_start:
            self._is_at_start, line = False, line.removeprefix(BOM)
        name, _, value = line.partition(b":")
        if not line:
            yield from self._end_event()
        elif name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(line)
        elif name == b"event":
            self._name = value.strip()
        elif name in (b"id", b"retry"):
            yield line + b"\n"

    def _end_event(self) -> Iterator[bytes]:
        name, self._name = self._name, b""
        data, self._data = self._data, []
        self._data_bytes = 0
        if not data:
            return
        if self._has_names and name not in (b"", b"message"):
            yield b"event: %b\n%b\n" % (name, b"".join(b"data: %b\n" % line for line in data))
        elif not any(data):
            yield b"data:\n\n"
        for message in mend_messages(b"\n".join(data), self._request):
            yield b"event: message\ndata: %b\n\n" % message
