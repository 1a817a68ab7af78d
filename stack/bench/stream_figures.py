"""StreamFigures: reads the event stream of one response as cheaply as its figures allow."""

import re
import time
from typing import Any, Final

import orjson

from stack.bench.figures import RequestFailed, Tally

_DELTA_LINE: Final = b".delta\n"
"""End of the line `event: response.output_text.delta` and its kind; JSON has no line breaks, so no text contains it."""
_END_LINE: Final = re.compile(rb"(?:^|\n)event: (?:response\.(?:completed|failed|incomplete)|error)\n")
_TAIL_BYTES: Final = 40
"""Bytes of the last read that are searched again: more than the longest line that ends a stream."""
_MAX_END_BYTES: Final = 64 * 1024 * 1024


class StreamFigures:
    """Counts the deltas of one stream and holds its last event; `started` is when the request was sent."""

    __slots__ = ("_end", "_last_delta_at", "_started", "_tail", "_tally")

    def __init__(self, tally: Tally, started: float) -> None:
        self._tally = tally
        self._started = started
        self._last_delta_at = 0.0
        self._tail = b""
        self._end: bytearray | None = None

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream. Raises nothing: it runs in the callback of the connection."""
        if self._end is not None:
            if len(self._end) < _MAX_END_BYTES:
                self._end += data
            return
        window = self._tail + data
        if window.find(_DELTA_LINE, max(0, len(self._tail) - len(_DELTA_LINE) + 1)) >= 0:
            now = time.perf_counter()
            if self._last_delta_at:
                self._tally.inter_token.record(now - self._last_delta_at)
            else:
                self._tally.first_token.record(now - self._started)
            self._last_delta_at = now
        end_line = _END_LINE.search(window)
        if end_line is not None:
            self._end = bytearray(window[end_line.end() :])
            self._tail = b""
        else:
            self._tail = window[-_TAIL_BYTES:]

    def response(self) -> dict[str, Any]:
        """Return the response of the last event. Raises RequestFailed if it failed, or if the stream broke off."""
        frame = bytes(self._end or b"").partition(b"\n\n")[0].removeprefix(b"data: ")
        try:
            event: dict[str, Any] = orjson.loads(frame)
        except orjson.JSONDecodeError:
            raise RequestFailed("stream broke off", "The stream ended without a last event.") from None
        if event.get("type") == "error":
            raise RequestFailed(f"stream {event.get('code') or 'error'}", str(event.get("message") or ""))
        return check_response(event["response"])


def check_response(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response object that ended well. Raises RequestFailed for one that failed or was cancelled."""
    status = response.get("status")
    if status in ("completed", "incomplete"):
        return response
    error: Any = response.get("error") or {}
    raise RequestFailed(f"{status} {error.get('code') or ''}".rstrip(), str(error.get("message") or ""))
