"""Values of secrets in bytes that come from hosts: they are found as servers spell them, and replaced."""

from collections.abc import Mapping
from heapq import heapify, heapreplace
from typing import Final

from providers.common.secret_spellings import list_spellings

_PRINTED: Final = bytes(range(0x21, 0x7F))
"""Bytes of which all spellings of values consist, besides the blank."""
_SEARCHES_PER_WORK: Final = 1000
"""Bytes that are searched for one spelling in a unit of the work of a turn."""


class Redaction:
    """Replaces values by the placeholders that stand for them."""

    def __init__(self, placeholders: Mapping[bytes, bytes]) -> None:
        needles = {form: name for value, name in placeholders.items() for form in list_spellings(value)}
        self._needles = tuple(needles.items())
        self._search_count = len(needles)
        self.longest = max(map(len, needles), default=0)
        self._unsplit = _PRINTED + b" " if any(b" " in value for value in placeholders) else _PRINTED

    def work(self, size: int) -> int:
        """Return the work of a turn that it takes to redact so many bytes."""
        return size * self._search_count // _SEARCHES_PER_WORK

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
        tail = data[max(0, len(data) - self.longest + 1) :] if self.longest else b""
        return len(tail) - len(tail.rstrip(self._unsplit))


class RedactedStream:
    """Redacts bytes that come in pieces; a value may be in several of them."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._rest = b""

    @property
    def longest(self) -> int:
        """The length of the longest value in its longest spelling."""
        return self._redaction.longest

    def work(self, data: bytes) -> int:
        """Return the work of a turn that `feed` takes."""
        return self._redaction.work(len(self._rest) + len(data))

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
