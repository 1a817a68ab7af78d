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
from providers.responses.events.tool_result import ContainerFile

_MARK: Final = re.compile(r"【(\d{1,6})(?:†([^】【\n]*))?】")
_PARTIAL_MARK: Final = re.compile(r"【(?:\d{0,6}|(\d{1,6})†[^】【\n]*)\Z")
_LINE_MARK: Final = re.compile(r"L(\d{1,4})")
_MAX_MARK_CHARS: Final = 256
_MAX_LINES: Final = 10_000
_MAX_FILES: Final = 200
_MAX_LINES_PER_RESULT: Final = 100
_CONTROL_CHARS: Final = dict.fromkeys([*range(32), *range(127, 160)], " ")
_TITLE_REPLACEMENTS: Final = _CONTROL_CHARS | str.maketrans(
    {"[": "(", "]": ")", "<": "‹", ">": "›", "\\": "/", "`": "'"}
)
"""What would end a link's text, or begin in it what Markdown reads first: an escape, code, a tag, a link of its own."""
_URL_UNSAFE: Final = re.compile(r"[\s\x00-\x1f\x7f()<>\\`]")


def line_number(page: int, line: int) -> int:
    """The number of what begins at this line of a list of results. No other number is below zero."""
    return -1 - (page * _MAX_LINES + line)


_SCHEME: Final = "sandbox:"
_END_OF_PATH: Final = r"(?![\w-]|[./]\w)"
"""Behind a file's name: then the text names another file."""

CitationTarget = int | str | None
"""The number of a source, the path of a file, or nothing."""


class CitationScanner:
    """One text part's scanner. `sources` maps the numbers a model may cite to what they stand for, `files` the paths
    that it may link to; `in_json` says that the text is to be JSON."""

    def __init__(
        self, sources: Mapping[int, Source], files: Mapping[str, ContainerFile] | None = None, *, is_json: bool = False
    ) -> None:
        self.sources = sources
        self._is_json = is_json
        self.files = files or {}
        self._held_text = ""
        newest = [*self.files][-_MAX_FILES:]
        self._file_links = {f"{_SCHEME}{form}": path for path in newest for form in (path, quote(path))}
        longest_first = sorted(self._file_links, key=len, reverse=True)
        links = f"|(?P<link>{'|'.join(map(re.escape, longest_first))}){_END_OF_PATH}" if longest_first else ""
        self._pattern = re.compile(f"{_MARK.pattern}{links}")

    def feed(self, text: str) -> list[tuple[str, CitationTarget]]:
        """Pieces of final text; what is beside a piece says what the whole piece cites."""
        text = self._held_text + text
        start = text.rfind("【")
        if not self._may_become_mark(text, start):
            start = len(text)
        if self._file_links:
            start = min(start, self._find_undecided_link(text))
        self._held_text = text[start:]
        return self._split_pieces(text, start)

    def flush(self) -> list[tuple[str, CitationTarget]]:
        """What was held back when the text ended."""
        text, self._held_text = self._held_text, ""
        return self._split_pieces(text, len(text))

    def _find_undecided_link(self, text: str) -> int:
        """Where a link begins that may still become that of a file, or of another one."""
        start = text.rfind(_SCHEME)
        if start >= 0 and any(_is_undecided(text[start:], link) for link in self._file_links):
            return start
        begun = (size for size in range(len(_SCHEME) - 1, 0, -1) if text.endswith(_SCHEME[:size]))
        return len(text) - next(begun, 0)

    def _may_become_mark(self, text: str, start: int) -> bool:
        if start < 0 or len(text) - start > _MAX_MARK_CHARS:
            return False
        begun = _PARTIAL_MARK.match(text, start)
        return begun is not None and (begun[1] is None or int(begun[1]) in self.sources)

    def _split_pieces(self, text: str, end: int) -> list[tuple[str, CitationTarget]]:
        """Of the text before `end`; whether a link ends there is told by what follows."""
        pieces: list[tuple[str, CitationTarget]] = []
        last = 0
        for mark in self._pattern.finditer(text):
            is_link = mark.lastgroup == "link"
            number = None if is_link else self._cited_number(mark)
            if mark.start() >= end:
                break
            if number is None and not is_link:
                continue
            if mark.start() > last:
                pieces.append((text[last : mark.start()], None))
            pieces.append(
                (mark[0], self._file_links[mark[0]]) if number is None else (self._render_mark(number), number)
            )
            last = mark.end()
        if last < end:
            pieces.append((text[last:end], None))
        return pieces

    def _render_mark(self, number: int) -> str:
        return "" if self._is_json else _render_link(self.sources[number])

    def _cited_number(self, mark: re.Match[str]) -> int | None:
        number = int(mark[1])
        source = self.sources.get(number)
        if source is None or len(mark[0]) > _MAX_MARK_CHARS + 1:
            return None
        if source.url or source.file_id:
            return number
        line = _LINE_MARK.match(mark[2] or "")
        if line is None:
            return None
        last = int(line[1])
        lines = range(last, max(-1, last - _MAX_LINES_PER_RESULT), -1)
        return next((found for at in lines if (found := line_number(number, at)) in self.sources), None)


def _is_undecided(partial_link: str, link: str) -> bool:
    return link.startswith(partial_link) or (partial_link.startswith(link) and partial_link[len(link) :] in (".", "/"))


def _render_link(source: Source) -> str:
    if source.file_id:
        return ""
    title = " ".join(source.title.translate(_TITLE_REPLACEMENTS).split())
    url = _URL_UNSAFE.sub(lambda found: quote(found[0], safe=""), source.url)
    return f"([{title or url}]({url}))"
