"""Finds a model's citation marks in streamed text and turns each into a link, in time linear in the text's length.

A mark is 【n】 or 【n†anything】, n being the number of a source as the model was shown it. Only a piece that may still
become a mark is held back.
"""

import re
from collections.abc import Mapping

from apis.tool_runtime import Source

_MARK = re.compile(r"【(\d{1,6})(?:†[^】【\n]*)?】")
_LONGEST = 256


class CitationScanner:
    """One text part's scanner. `sources` maps the numbers a model may cite to what they stand for."""

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self.sources = sources
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, int | None]]:
        """Pieces of final text; the number beside a piece says which source the whole piece cites."""
        text = self._held + text
        start = text.rfind("【")
        whole = start < 0 or "】" in text[start:] or "\n" in text[start:] or len(text) - start > _LONGEST
        self._held, text = ("", text) if whole else (text[start:], text[:start])
        return self._pieces(text)

    def flush(self) -> list[tuple[str, int | None]]:
        """What was held back when the text ended."""
        text, self._held = self._held, ""
        return [(text, None)] if text else []

    def _pieces(self, text: str) -> list[tuple[str, int | None]]:
        pieces: list[tuple[str, int | None]] = []
        last = 0
        for mark in _MARK.finditer(text):
            number = int(mark[1])
            if number not in self.sources or len(mark[0]) > _LONGEST + 1:
                continue
            if mark.start() > last:
                pieces.append((text[last : mark.start()], None))
            source = self.sources[number]
            title = (source.title or source.url).replace("[", "(").replace("]", ")")
            pieces.append((f"([{title}]({source.url}))", number))
            last = mark.end()
        if last < len(text):
            pieces.append((text[last:], None))
        return pieces
