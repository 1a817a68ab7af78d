"""AnswerBody: the payloads of an answer. Its first bytes decide what the body is, and not its content type."""

import json
from typing import Final

import msgspec

from apis.errors import UpstreamError
from providers.common.net.http.event_stream import BOM, MAX_EVENT_BYTES, EventReader

_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class AnswerBody:
    """Reader of a body until its form is known; `reader` is then the one that has taken over.

    JSON begins with a brace or a bracket, a page of HTML with `<`. Everything else is an event stream, in which lines
    that are no fields are skipped.
    """

    __slots__ = ("_start", "reader")

    def __init__(self) -> None:
        self._start = b""
        self.reader: EventReader | JsonReader | None = None

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return every payload that `chunk` completed: the data of an event, or a JSON text. Raises UpstreamError for
        one that is too large, and for a page of HTML."""
        if self.reader is None:
            chunk = self._start + chunk
            text = chunk.removeprefix(BOM).lstrip()
            if not text or BOM.startswith(chunk):
                self._start = chunk[-MAX_EVENT_BYTES:]
                return []
            self._start = b""
            if text.startswith(b"<"):
                error = UpstreamError(
                    "The inference server answered with a page of HTML. The base_url may be wrong: it usually ends "
                    "with /v1."
                )
                error.add_note(text[:1024].decode("utf-8", "replace"))
                raise error
            if text.startswith((b"{", b"[")):
                self.reader, chunk = JsonReader(), text
            else:
                self.reader = EventReader()
        return self.reader.feed(chunk)


class JsonReader:
    """Reads JSON texts: one for each line where the first line is one, otherwise one that the end of the body ends.

    `is_whole` says that the body is one text, which is complete because it has been decoded to its end.
    """

    __slots__ = ("_has_lines", "_pending", "_pending_bytes", "_text_count")

    def __init__(self) -> None:
        self._has_lines: bool | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._text_count = 0

    @property
    def is_whole(self) -> bool:
        return self._text_count <= 1

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return every JSON text that `chunk` completed. A line that may be the whole body is kept until more follows
        it. Raises UpstreamError for one that is too large."""
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        if self._pending_bytes > MAX_EVENT_BYTES:
            raise UpstreamError("The inference server sent an answer that is larger than allowed.")
        if b"\n" not in chunk or self._has_lines is False:
            return []
        *lines, rest = b"".join(self._pending).split(b"\n")
        lines = [text for line in lines if (text := line.strip().removeprefix(b"data:"))]
        if self._has_lines is None and lines:
            self._has_lines = is_json(lines[0])
            if not self._has_lines:
                return []
        if self._text_count == 0 and len(lines) == 1 and not rest.strip():
            return []  # this may be all
        self._pending = [rest]
        self._pending_bytes = len(rest)
        self._text_count += len(lines)
        return lines

    def end(self) -> list[bytes]:
        """Return the last payloads after the body ended cleanly."""
        body = b"".join(self._pending).strip().removeprefix(b"data:")
        self._pending.clear()
        self._pending_bytes = 0
        if not body:
            return []
        if body.startswith(b"["):
            try:
                texts = [bytes(text) for text in msgspec.json.decode(body, type=list[msgspec.Raw])]
            except _DECODE_ERRORS:
                texts = [body]
        else:
            texts = [body]
        self._text_count += len(texts)
        return texts


def is_json(line: bytes) -> bool:
    """Return true for one whole JSON text."""
    try:
        json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True
