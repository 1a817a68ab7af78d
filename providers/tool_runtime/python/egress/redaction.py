"""Values of secrets in bytes that come from hosts: they are found as servers spell them, and replaced."""

import base64
from collections.abc import Iterable, Mapping
from heapq import heapify, heapreplace
from typing import Final
from urllib.parse import quote

_PRINTED: Final = bytes(range(0x21, 0x7F))
"""Bytes of which all spellings of values consist, besides the blank."""
_SEARCHES_PER_WORK: Final = 1000
"""Bytes that are searched for one spelling in a unit of the work of a turn."""

# Escapes by character. Each table is about some encoders: all of the first JSON, with Go's, Gson's, .NET's, PHP's.
_IN_JSON: Final = {'"': '\\"', "\\": "\\\\"}
_IN_SAFE_JSON: Final = {**_IN_JSON, "<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_IN_CAPITAL_JSON: Final = {char: f"\\u{ord(char):04X}" for char in "\"&'<>"}
_JSON_TABLES: Final = (
    _IN_JSON,
    {**_IN_JSON, "/": "\\/"},
    _IN_SAFE_JSON,
    {**_IN_SAFE_JSON, "'": "\\u0027"},
    {**_IN_SAFE_JSON, "'": "\\u0027", "=": "\\u003d"},
    {**_IN_CAPITAL_JSON, "\\": "\\\\", "+": "\\u002B", "`": "\\u0060"},
    {**_IN_CAPITAL_JSON, "\\": "\\\\", "/": "\\/"},
)
_IN_HTML: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_HTML_TABLES: Final = (
    *({**_IN_HTML, "'": escape} for escape in ("'", "&#x27;", "&#39;", "&#039;", "&apos;")),
    {**_IN_HTML, '"': "&#34;", "'": "&#39;"},
    {**_IN_HTML, '"': "&#34;", "'": "&#39;", "+": "&#43;"},
    {**_IN_HTML, "'": "&#x27;", "/": "&#x2F;"},
    {**_IN_HTML, "'": "&#x27;", "`": "&#x60;", "=": "&#x3D;"},
)
_IN_URLS: Final = {chr(code): quote(chr(code), safe="") for code in range(0x20, 0x7F)}
_SMALL_IN_URLS: Final = {char: text.lower() if text[0] == "%" else text for char, text in _IN_URLS.items()}
_URL_TABLES: Final = tuple(
    {**table, **other} for table in (_IN_URLS, _SMALL_IN_URLS) for other in ({}, {"/": "/"}, {" ": "+"})
)
_TABLES: Final = tuple(str.maketrans(table) for table in ({}, *_JSON_TABLES, *_HTML_TABLES, *_URL_TABLES))


class Redaction:
    """Replaces values by the placeholders that stand for them."""

    def __init__(self, placeholders: Mapping[bytes, bytes]) -> None:
        needles = {form: name for value, name in placeholders.items() for form in _spellings(value)}
        self._needles = tuple(needles.items())
        self.search_count = len(needles)
        self._longest = max(map(len, needles), default=0)
        self._unsplit = _PRINTED + b" " if any(b" " in value for value in placeholders) else _PRINTED

    def redact(self, data: bytes) -> bytes:
        """Return bytes with placeholders in place of values."""
        redacted, end = self.redact_before(data, len(data))
        return redacted + data[end:]

    def redact_before(self, data: bytes, limit: int) -> tuple[bytes, int]:
        """Return the bytes up to the end of the last value that begins before `limit`, redacted, and that end. Of
        values that begin at the same place, the longest counts."""
        pieces, end = list[bytes](), 0
        places = [
            (place, -len(needle), index)
            for index, (needle, _) in enumerate(self._needles)
            if 0 <= (place := data.find(needle)) < limit
        ]
        heapify(places)
        while places and places[0][0] < limit:
            place, _, index = places[0]
            needle, name = self._needles[index]
            if place >= end:
                pieces += data[end:place], name
                end = place + len(needle)
            following = data.find(needle, end)
            heapreplace(places, (following if following >= 0 else limit, -len(needle), index))
        return b"".join(pieces), end

    def open_length(self, data: bytes) -> int:
        """Return the length of the end of the bytes in which a value may have begun. It depends on the lengths of the
        values alone: a program that sees which bytes wait could otherwise guess a value letter by letter."""
        tail = data[max(0, len(data) - self._longest + 1) :] if self._longest else b""
        return len(tail) - len(tail.rstrip(self._unsplit))


class RedactedStream:
    """Redacts bytes that come in pieces; a value may be in several of them."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._rest = b""

    def work(self, data: bytes) -> int:
        """Return the work of a turn that `feed` takes."""
        return (len(self._rest) + len(data)) * self._redaction.search_count // _SEARCHES_PER_WORK

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on: all but an end in which a value may have begun."""
        data, pieces = self._rest + data, list[bytes]()
        while True:
            limit = len(data) - self._redaction.open_length(data)
            redacted, end = self._redaction.redact_before(data, limit)
            pieces.append(redacted)
            if end <= limit:
                self._rest = data[limit:]
                return b"".join([*pieces, data[end:limit]])
            data = data[end:]

    def finish(self) -> bytes:
        """Return the rest after the last piece."""
        rest, self._rest = self._rest, b""
        return self._redaction.redact(rest)


def _spellings(value: bytes) -> Iterable[bytes]:
    """Return a value as servers may spell it: as it is, in small letters as in the name of a header, and in JSON, HTML,
    URLs and Base64."""
    text = value.decode("ascii")
    spellings = {text.translate(table).encode() for table in _TABLES} | {value.lower()}
    for offset, mixed_chars in enumerate((0, 2, 3)):
        # A value is at one of three offsets of a longer text; characters that mix it with its neighbours are left out.
        core = base64.b64encode(bytes(offset) + value)[mixed_chars : (offset + len(value)) * 8 // 6]
        spellings |= {core, core.replace(b"+", b"-").replace(b"/", b"_")}
    return spellings
