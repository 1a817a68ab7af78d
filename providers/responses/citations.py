"""Finds a model's citation marks in streamed text and makes a citation of each, in time linear in the text's length.

A mark is 【n】 or 【n†anything】, n being the number of a page as the model was shown it: gpt-oss writes 【3†L1-L5】. A
mark of a page that was never shown is left as it is, as gpt-oss's own server leaves it. Only what may still become the
mark of a known page is held back. The mark of a page becomes a link; that of a file has nothing to lead to and goes.

A list of search results is a page that has no URL of its own. What its lines tell of is known by `line_number`, so that
a mark of such lines cites the result that they belong to; without a line it is left as it is.
"""

import re
from collections.abc import Mapping
from typing import Final

from apis.tool_runtime import Source

_MARK: Final = re.compile(r"【(\d{1,6})(?:†([^】【\n]*))?】")
_BEGUN: Final = re.compile(r"【(?:\d{0,6}|(\d{1,6})†[^】【\n]*)\Z")
_LINE: Final = re.compile(r"L(\d{1,4})")
_LONGEST: Final = 256
_MAX_LINES: Final = 10_000
_MAX_LINES_OF_A_RESULT: Final = 100


def line_number(page: int, line: int) -> int:
    """The number of what begins at this line of a list of results. No other number is below zero."""
    return -1 - (page * _MAX_LINES + line)


class CitationScanner:
    """One text part's scanner. `sources` maps the numbers a model may cite to what they stand for."""

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self.sources = sources
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, int | None]]:
        """Pieces of final text; the number beside a piece says which source the whole piece cites."""
        text = self._held + text
        start = text.rfind("【")
        self._held, text = (text[start:], text[:start]) if self._may_become_a_mark(text, start) else ("", text)
        return self._pieces(text)

    def flush(self) -> list[tuple[str, int | None]]:
        """What was held back when the text ended."""
        text, self._held = self._held, ""
        return [(text, None)] if text else []

    def _may_become_a_mark(self, text: str, start: int) -> bool:
        if start < 0 or len(text) - start > _LONGEST:
            return False
        begun = _BEGUN.match(text, start)
        return begun is not None and (begun[1] is None or int(begun[1]) in self.sources)

    def _pieces(self, text: str) -> list[tuple[str, int | None]]:
        pieces: list[tuple[str, int | None]] = []
        last = 0
        for mark in _MARK.finditer(text):
            number = self._cited(mark)
            if number is None:
                continue
            if mark.start() > last:
                pieces.append((text[last : mark.start()], None))
            pieces.append((_link(self.sources[number]), number))
            last = mark.end()
        if last < len(text):
            pieces.append((text[last:], None))
        return pieces

    def _cited(self, mark: re.Match[str]) -> int | None:
        number = int(mark[1])
        source = self.sources.get(number)
        if source is None or len(mark[0]) > _LONGEST + 1:
            return None
        if source.url or source.file_id:
            return number
        line = _LINE.match(mark[2] or "")
        if line is None:
            return None
        last = int(line[1])
        lines = range(last, max(-1, last - _MAX_LINES_OF_A_RESULT), -1)
        return next((found for at in lines if (found := line_number(number, at)) in self.sources), None)


def _link(source: Source) -> str:
    if source.file_id:
        return ""
    title = (source.title or source.url).replace("[", "(").replace("]", ")")
    url = source.url.replace("(", "%28").replace(")", "%29")
    return f"([{title}]({url}))"
