"""Finds a model's citation marks in streamed text and makes a citation of each, in time linear in the text's length.

A mark is 【n】 or 【n†anything】, n being the number of a page as the model was shown it: gpt-oss writes 【3†L1-L5】. A
mark of a page that was never shown is left as it is, as gpt-oss's own server leaves it. Only what may still become the
mark of a known page is held back. The mark of a page becomes a link; that of a file has nothing to lead to and goes.

In an answer that is to be JSON every mark goes, and is cited at the place where it was. A link would have to fit the
schema, its patterns and its lengths; and a page's title is written by whoever made the page: nothing of it gets into
what programs will read.

A link to a file that a program wrote, sandbox:/mnt/data/NAME, stays as it is, and is cited as that file.

A list of search results is a page that has no URL of its own. What its lines tell of is known by `line_number`, so that
a mark of such lines cites the result that they belong to; without a line it is left as it is.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from apis.tool_runtime import Source
from providers.responses.events.tool_result import MadeFile

_MARK: Final = re.compile(r"【(\d{1,6})(?:†([^】【\n]*))?】")
_BEGUN: Final = re.compile(r"【(?:\d{0,6}|(\d{1,6})†[^】【\n]*)\Z")
_LINE: Final = re.compile(r"L(\d{1,4})")
_LONGEST: Final = 256
_MAX_LINES: Final = 10_000
_MAX_FILES: Final = 200
_MAX_LINES_OF_A_RESULT: Final = 100
_CONTROLS: Final = dict.fromkeys([*range(32), *range(127, 160)], " ")
_NOT_IN_A_TITLE: Final = _CONTROLS | str.maketrans({"[": "(", "]": ")", "<": "‹", ">": "›", "\\": "/", "`": "'"})
"""What would end a link's text, or begin in it what Markdown reads first: an escape, code, a tag, a link of its own."""
_NOT_IN_A_URL: Final = re.compile(r"[\s\x00-\x1f\x7f()<>\\`]")


def line_number(page: int, line: int) -> int:
    """The number of what begins at this line of a list of results. No other number is below zero."""
    return -1 - (page * _MAX_LINES + line)


_SCHEME: Final = "sandbox:"
_GOES_ON: Final = r"(?![\w-]|[./]\w)"
"""Behind a file's name: then the text names another file."""

Cited = int | str | None
"""The number of a source, the path of a file, or nothing."""


class CitationScanner:
    """One text part's scanner. `sources` maps the numbers a model may cite to what they stand for, `files` the paths
    that it may link to; `in_json` says that the text is to be JSON."""

    def __init__(
        self, sources: Mapping[int, Source], files: Mapping[str, MadeFile] | None = None, *, in_json: bool = False
    ) -> None:
        self.sources = sources
        self._in_json = in_json
        self.files = files or {}
        self._held = ""
        newest = [*self.files][-_MAX_FILES:]
        self._links = {f"{_SCHEME}{form}": path for path in newest for form in (path, quote(path))}
        longest_first = sorted(self._links, key=len, reverse=True)
        links = f"|(?P<link>{'|'.join(map(re.escape, longest_first))}){_GOES_ON}" if longest_first else ""
        self._pattern = re.compile(f"{_MARK.pattern}{links}")

    def feed(self, text: str) -> list[tuple[str, Cited]]:
        """Pieces of final text; what is beside a piece says what the whole piece cites."""
        text = self._held + text
        start = text.rfind("【")
        if not self._may_become_a_mark(text, start):
            start = len(text)
        if self._links:
            start = min(start, self._undecided_link(text))
        self._held = text[start:]
        return self._pieces(text, start)

    def flush(self) -> list[tuple[str, Cited]]:
        """What was held back when the text ended."""
        text, self._held = self._held, ""
        return self._pieces(text, len(text))

    def _undecided_link(self, text: str) -> int:
        """Where a link begins that may still become that of a file, or of another one."""
        start = text.rfind(_SCHEME)
        if start >= 0 and any(_is_undecided(text[start:], link) for link in self._links):
            return start
        begun = (size for size in range(len(_SCHEME) - 1, 0, -1) if text.endswith(_SCHEME[:size]))
        return len(text) - next(begun, 0)

    def _may_become_a_mark(self, text: str, start: int) -> bool:
        if start < 0 or len(text) - start > _LONGEST:
            return False
        begun = _BEGUN.match(text, start)
        return begun is not None and (begun[1] is None or int(begun[1]) in self.sources)

    def _pieces(self, text: str, end: int) -> list[tuple[str, Cited]]:
        """Of the text before `end`; whether a link ends there is told by what follows."""
        pieces: list[tuple[str, Cited]] = []
        last = 0
        for mark in self._pattern.finditer(text):
            is_link = mark.lastgroup == "link"
            number = None if is_link else self._cited(mark)
            if mark.start() >= end:
                break
            if number is None and not is_link:
                continue
            if mark.start() > last:
                pieces.append((text[last : mark.start()], None))
            pieces.append((mark[0], self._links[mark[0]]) if number is None else (self._link(number), number))
            last = mark.end()
        if last < end:
            pieces.append((text[last:end], None))
        return pieces

    def _link(self, number: int) -> str:
        return "" if self._in_json else _link(self.sources[number])

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


def _is_undecided(begun: str, link: str) -> bool:
    return link.startswith(begun) or (begun.startswith(link) and begun[len(link) :] in (".", "/"))


def _link(source: Source) -> str:
    if source.file_id:
        return ""
    title = " ".join(source.title.translate(_NOT_IN_A_TITLE).split())
    url = _NOT_IN_A_URL.sub(lambda found: quote(found[0], safe=""), source.url)
    return f"([{title or url}]({url}))"
