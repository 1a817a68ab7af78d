"""Finds the citation marks that a model writes in streamed text, in time linear in the text's length, and replaces or
keeps them with a citation each.

A mark is 【n】 or 【n†anything】, where n is the number by which the model was shown a page: gpt-oss writes
【3†L1-L5】. A mark of a page that was never shown stays as it is, as in gpt-oss's own server. Only text that may
still become the mark of a shown page is held back. The mark of a page becomes a link; that of a file is
removed, because there is no URL.

In an answer in JSON every mark is removed, and the citation stands at its place. A link would have to fit the schema,
its patterns and its lengths; and a page's title is written by the page's author, so it must not reach what programs
read.

A link to a file that a program wrote, sandbox:/mnt/data/NAME, stays as it is and gets a citation of that file.

A list of search results is a page without a URL. Its lines are numbered by `line_number`, so that a mark of such lines
cites the result that they belong to; a mark without a line stays as it is.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

from openai.types.responses.response_output_text import (
    AnnotationContainerFileCitation,
    AnnotationFileCitation,
    AnnotationURLCitation,
)

from apis.tool_runtime import Source
from providers.responses.events.tool_result import ContainerFile

_MARK: Final = re.compile(r"【(\d{1,6})(?:†([^】【\n]*))?】")
_PARTIAL_MARK: Final = re.compile(r"【(?:\d{0,6}|(\d{1,6})†[^】【\n]*)\Z")
_LINE_MARK: Final = re.compile(r"L(\d{1,4})(?:-L?(\d{1,4}))?")
_MAX_MARK_CHARS: Final = 256
_MAX_LINES: Final = 10_000
_MAX_FILES: Final = 200
_MAX_LINES_PER_RESULT: Final = 100
_CONTROL_CHARS: Final = dict.fromkeys([*range(32), *range(127, 160)], " ")
_TITLE_REPLACEMENTS: Final = _CONTROL_CHARS | str.maketrans(
    {"[": "(", "]": ")", "<": "‹", ">": "›", "\\": "/", "`": "'"}
)
"""Characters that would end a link's text, or begin an escape, code, a tag or another link in it."""
_URL_UNSAFE: Final = re.compile(r"[\s\x00-\x1f\x7f()<>\\`]")


_SCHEME: Final = "sandbox:"
_END_OF_PATH: Final = r"(?![\w-]|[./]\w)"
"""After a file's name; otherwise the text names another file."""
MARK_REPLACEMENTS: Final = str.maketrans({"【": "〖", "】": "〗", "\u2028": " ", "\u2029": " "})
"""Lookalikes of the characters in text from outside that a citation mark or a line break consists of."""

Citation = AnnotationURLCitation | AnnotationFileCitation | AnnotationContainerFileCitation
CitationTarget = int | str | None
"""The number of a cited source, the path of a linked file, or None for plain text."""


class CitationScanner:
    """Scans one text part. `sources` maps the numbers that the model may cite, `files` the paths that it may link to;
    `is_json` is true for an answer in JSON."""

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
        """Return the final text in pieces, each with the target that the whole piece cites."""
        text = self._held_text + text
        start = text.rfind("【")
        if not self._may_become_mark(text, start):
            start = len(text)
        if self._file_links:
            start = min(start, self._find_undecided_link(text))
        self._held_text = text[start:]
        return self._split_pieces(text, start)

    def flush(self) -> list[tuple[str, CitationTarget]]:
        """Return the text held back, once the part ends."""
        text, self._held_text = self._held_text, ""
        return self._split_pieces(text, len(text))

    def _find_undecided_link(self, text: str) -> int:
        """Return the position of a link at the end of the text that may still become one of a file."""
        start = text.rfind(_SCHEME)
        if start >= 0 and any(_is_undecided(text[start:], link) for link in self._file_links):
            return start
        sizes = (size for size in range(len(_SCHEME) - 1, 0, -1) if text.endswith(_SCHEME[:size]))
        return len(text) - next(sizes, 0)

    def _may_become_mark(self, text: str, start: int) -> bool:
        if start < 0 or len(text) - start > _MAX_MARK_CHARS:
            return False
        match = _PARTIAL_MARK.match(text, start)
        return match is not None and (match[1] is None or int(match[1]) in self.sources)

    def _split_pieces(self, text: str, end: int) -> list[tuple[str, CitationTarget]]:
        """Return the pieces before `end`. The text after it decides whether a link ends there."""
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
        first = int(line[1])
        last = min(int(line[2] or first), first + _MAX_LINES_PER_RESULT)
        # the result that the first line belongs to; a mark that begins on the heading cites the first result below it
        lines = (*range(first, max(-1, first - _MAX_LINES_PER_RESULT), -1), *range(first + 1, last + 1))
        return next((result for at in lines if (result := line_number(number, at)) in self.sources), None)

    def build_citation(self, target: int | str, start: int, end: int) -> Citation:
        """Return the annotation of a piece that stands at these positions of the part's text."""
        if isinstance(target, str):
            file = self.files[target]
            return AnnotationContainerFileCitation(
                type="container_file_citation",
                container_id=file.container_id,
                file_id=file.file_id,
                filename=PurePosixPath(target).name,
                start_index=start,
                end_index=end,
            )
        source = self.sources[target]
        if source.file_id:
            return AnnotationFileCitation(
                type="file_citation", file_id=source.file_id, filename=source.title, index=start
            )
        return AnnotationURLCitation(
            type="url_citation", url=source.url, title=source.title, start_index=start, end_index=end
        )


def line_number(page: int, line: int) -> int:
    """Return the source number of the result that begins at this line of page `page`. Only these are negative."""
    return -1 - (page * _MAX_LINES + line)


def one_line(text: str) -> str:
    """Return the text on one line, without anything that could pass for a citation mark."""
    return " ".join(text.translate(MARK_REPLACEMENTS).split())


def _is_undecided(partial_link: str, link: str) -> bool:
    return link.startswith(partial_link) or (partial_link.startswith(link) and partial_link[len(link) :] in (".", "/"))


def _render_link(source: Source) -> str:
    if source.file_id:
        return ""
    title = " ".join(source.title.translate(_TITLE_REPLACEMENTS).split())
    url = _URL_UNSAFE.sub(lambda match: quote(match[0], safe=""), source.url)
    return f"([{title or url}]({url}))"
