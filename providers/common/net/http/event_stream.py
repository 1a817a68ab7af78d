"""Parse server-sent events: bytes from a socket in, the data of each complete event out.

Follows the HTML standard's event stream format (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

import re
from typing import Final

from apis.errors import UpstreamError

MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
BOM: Final = b"\xef\xbb\xbf"
_CR: Final = ord("\r")
"""A number, because Python looks for bytes in bytes by an error that it raises and drops, at ten times the cost."""
_BLANK_LINES: Final = re.compile(rb"\n{3,}")
"""Blank lines that end no event."""


class EventReader:
    """Incremental parser for chunks of any size; every complete event is returned once, in order. The last one may lack
    its blank line, or be cut off: only `end` returns it."""

    __slots__ = (
        "_at_start",
        "_data_bytes",
        "_data_lines",
        "_is_between_events",
        "_lines_end_in_cr",
        "_max_bytes",
        "_pending",
        "_pending_bytes",
        "_skip_lf",
    )

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._at_start = True
        self._is_between_events = False
        self._lines_end_in_cr = False
        self._skip_lf = False
        self._data_lines: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every event that `chunk` completed. Raises UpstreamError for an event over the limit."""
        # Fast path, nearly every chunk while a model generates: one event of one line.
        if (
            self._is_between_events
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.count(b"\n") == 2
            and _CR not in chunk
            and (data := chunk[6:-2])
        ):
            return [data]
        events = self._feed_any(chunk)
        self._is_between_events = not (self._at_start or self._lines_end_in_cr or self._pending)
        return events

    def end(self) -> list[bytes]:
        """Return the data of the event that the end of the body has ended, without a blank line after it."""
        return self._feed_any(b"\n\n")

    def _feed_any(self, chunk: bytes) -> list[bytes]:
        if self._pending:
            chunk = self._join_pending(chunk)
        if self._at_start:
            chunk = self._strip_bom(chunk)
        if not chunk:
            return []
        if self._lines_end_in_cr or _CR in chunk:
            return self._feed_lines(chunk)
        if chunk.startswith(b"\n"):  # blank lines before an event
            chunk = chunk.lstrip(b"\n")
        end = chunk.rfind(b"\n\n")
        if end < 0:
            self._add_pending(chunk)
            return []
        if end + 2 < len(chunk):
            self._add_pending(chunk[end + 2 :])
        # Second fast path, nearly all servers: events of one `data: ` line each.
        if chunk.startswith(b"data: "):
            events = chunk[6:end].split(b"\n\ndata: ")
            if chunk.count(b"\n", 0, end) == 2 * len(events) - 2 and all(events):
                return events
        blocks = _BLANK_LINES.sub(b"\n\n", chunk[:end]).split(b"\n\n")
        return [data for block in blocks if b"data" in block and (data := _parse_block(block))]

    def _add_pending(self, chunk: bytes) -> None:
        if not chunk:
            return
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        if self._pending_bytes > self._max_bytes:
            raise UpstreamError("The inference server sent an event that is larger than allowed.")

    def _join_pending(self, chunk: bytes) -> bytes:
        """Join the pending bytes with `chunk`, or add to them while no event can have ended: linear for long events."""
        if not self._at_start and _CR not in chunk:
            if self._lines_end_in_cr:
                ends = b"\n" in chunk
            else:
                ends = b"\n\n" in chunk or (chunk.startswith(b"\n") and self._pending[-1].endswith(b"\n"))
            if not ends:
                self._add_pending(chunk)
                return b""
        chunk = b"".join((*self._pending, chunk))
        self._pending.clear()
        self._pending_bytes = 0
        return chunk

    def _strip_bom(self, chunk: bytes) -> bytes:
        if len(chunk) < len(BOM) and BOM.startswith(chunk):
            self._add_pending(chunk)
            return b""
        self._at_start = False
        return chunk.removeprefix(BOM)

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        """Parse by the standard to the letter, for streams with a carriage return: CR, LF and CRLF all end lines."""
        self._lines_end_in_cr = True
        if self._skip_lf:
            chunk = chunk.removeprefix(b"\n")
        self._skip_lf = chunk.endswith(b"\r")
        chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, remainder = _BLANK_LINES.sub(b"\n\n", chunk).split(b"\n")
        if remainder:
            self._add_pending(remainder)
        events: list[bytes] = []
        for line in lines:
            if line:
                self._add_line(line)
            elif self._data_lines:
                if data := b"\n".join(self._data_lines):
                    events.append(data)
                self._data_lines.clear()
                self._data_bytes = 0
        return events

    def _add_line(self, line: bytes) -> None:
        data = _parse_data_line(line)
        if data is None:
            return
        self._data_lines.append(data)
        self._data_bytes += len(data) + 1
        if self._data_bytes > self._max_bytes:
            raise UpstreamError("The inference server sent an event that is larger than allowed.")


def _parse_data_line(line: bytes) -> bytes | None:
    """Return the value of a `data` field; None for every other field and for comments."""
    if line[:5] == b"data:":
        return line[6:] if line[5:6] == b" " else line[5:]
    return b"" if line == b"data" else None


def _parse_block(block: bytes) -> bytes:
    return b"\n".join(data for line in block.split(b"\n") if (data := _parse_data_line(line)) is not None)
