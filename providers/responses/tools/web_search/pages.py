"""The pages of a conversation, by the numbers that the model cites, and their text for the model.

Each call stores the page that it shows in `ToolResultRecord.state`, so that a number means the same page in every later
turn: `{"number": 3, "page": {...}}`, or `{"number": 4, "same": 3}` for a page that is shown again.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal
from urllib.parse import urldefrag, urlsplit

import msgspec

from providers.responses.events.citations import MARK_REPLACEMENTS, one_line
from providers.responses.events.tool_result import ToolResultRecord

MAX_PAGE_CHARS: Final = 150_000
MAX_CHAIN_CHARS: Final = 2_000_000
"""Maximum characters of all pages that one chain of responses stores. Later pages are fetched again when needed."""
_MAX_LINK_LIST_CHARS: Final = 10_000
_MAX_MATCHES: Final = 50
_SNIPPET_LINES: Final = 4
_LINE_CHARS: Final = 80

_WRAPPED_LINE: Final = re.compile(rf".{{1,{_LINE_CHARS}}}(?:\s|\Z)|.{{{_LINE_CHARS}}}")
_LINK_MARK: Final = re.compile(r"\[#(\d{1,4})\]")

DomainFilter = tuple[list[str] | None, list[str] | None]


class BrowsedPage(msgspec.Struct, frozen=True):
    """A page as lines of text, where `[#1]` means the first of `links`. `requested_url` led to it; it passed the filter
    `domains` of its request.

    The `results` of a search and the `matches` of a find are pages too: each of their links is one entry, and `lines`
    has the line where the entry begins, or the line of the page that it leads to. Results have no URL; `found_in` is
    the title of the page of the matches. A page without text was too large to store.
    """

    url: str
    title: str
    text: str
    links: Sequence[str] = ()
    kind: Literal["page", "results", "matches"] = "page"
    lines: Sequence[int] = ()
    requested_url: str = ""
    found_in: str = ""
    domains: DomainFilter = (None, None)

    @property
    def size_chars(self) -> int:
        return len(self.text) + sum(map(len, self.links))


class PageHistory:
    """All pages of a conversation. `last_number` is the number of the page shown last."""

    def __init__(self, tool_results: Iterable[ToolResultRecord] = ()) -> None:
        self._pages: dict[int, BrowsedPage] = {}
        self._remaining_chars = MAX_CHAIN_CHARS
        self.last_number: int | None = None
        for tool_result in tool_results:
            match tool_result.state:
                case {"number": int() as number, "page": page}:
                    self._put(number, msgspec.convert(page, BrowsedPage))
                case {"number": int() as number, "same": int() as same} if same in self._pages:
                    self._put(number, self._pages[same])
                case _:
                    pass
        self._remaining_chars -= sum({id(page): page.size_chars for page in self._pages.values()}.values())

    def get(self, number: int) -> BrowsedPage | None:
        return self._pages.get(number)

    def number_of(self, url: str) -> int | None:
        """Return the number under which the page of this URL was shown, or None."""
        return next((number for number, page in self._pages.items() if _has_url(page, url)), None)

    def find_by_url(self, url: str, domains: DomainFilter) -> BrowsedPage | None:
        """Return the stored page at this URL, or None. A page that was opened under another filter than `domains` is
        skipped, because only a fetch can decide whether it passes."""
        pages = (
            page
            for page in self._pages.values()
            if page.text and _has_url(page, url) and domains in ((None, None), page.domains)
        )
        return next(pages, None)

    def add(self, number: int, page: BrowsedPage) -> Mapping[str, Any]:
        """Add a page that is shown under this number. Return the state that its call has to store."""
        same = next((earlier for earlier, opened in self._pages.items() if opened is page), None)
        self._put(number, page)
        if same is not None:
            return {"number": number, "same": same}
        if page.size_chars > self._remaining_chars:
            page = msgspec.structs.replace(page, text="", links=() if page.kind == "page" else page.links)
        self._remaining_chars -= page.size_chars
        return {"number": number, "page": msgspec.to_builtins(page)}

    def _put(self, number: int, page: BrowsedPage) -> None:
        self._pages[number] = page
        self.last_number = number


def _has_url(page: BrowsedPage, url: str) -> bool:
    return page.kind == "page" and urldefrag(url).url in (urldefrag(page.url).url, urldefrag(page.requested_url).url)


def wrap_lines(text: str) -> str:
    """Return the text in lines of 80 characters, to be cited by number, without characters of citation marks."""
    lines: list[str] = []
    for line in text[:MAX_PAGE_CHARS].translate(MARK_REPLACEMENTS).split("\n"):
        lines += [part.rstrip() for part in _WRAPPED_LINE.findall(line)] if len(line) > _LINE_CHARS else [line]
    return "\n".join(lines)


def render_page(
    number: int, page: BrowsedPage, first: int, *, max_chars: int, num_lines: int = 0
) -> tuple[str, Sequence[str]]:
    """Return a page's head and its numbered lines from `first` on: `num_lines` of them, or up to `max_chars`."""
    lines = page.text.split("\n")
    first = max(0, first)
    end = _view_end(lines, first, num_lines, max_chars)
    head = f"{_render_header(number, page)}\n**viewing lines [{first} - {end - 1}] of {len(lines) - 1}**\n\n"
    return head, [f"L{first + at}: {line}" for at, line in enumerate(lines[first:end])]


def _render_header(number: int, page: BrowsedPage) -> str:
    return f"[{number}] {one_line(page.title)}{f' ({page.url})' if page.url else ''}"


def _view_end(lines: Sequence[str], first: int, num_lines: int, max_chars: int) -> int:
    last = min(first + num_lines, len(lines)) if num_lines > 0 else len(lines)
    for at in range(first, last):
        max_chars -= len(lines[at]) + 6
        if max_chars < 0:
            return at + 1
    return last


def append_link_list(lines: Sequence[str], page: BrowsedPage) -> str:
    """Return the lines of a page, followed by the URLs of the links in them, up to 10,000 characters of URLs."""
    text = "\n".join(lines)
    links: list[str] = []
    available_chars = _MAX_LINK_LIST_CHARS
    for number in dict.fromkeys(int(match[1]) for match in _LINK_MARK.finditer(text)):
        if 0 < number <= len(page.links) and len(page.links[number - 1]) <= available_chars:
            links.append(f"[#{number}] {page.links[number - 1]}")
            available_chars -= len(links[-1])
    return "\n".join([text, "", "Links:", *links] if links else [text])


def render_link_ids(lines: Sequence[str], page: BrowsedPage) -> str:
    """Return the lines of a page with its links in the form of gpt-oss: 【id†domain】."""

    def mark(match: re.Match[str]) -> str:
        number = int(match[1]) - 1
        return f"【{number}†{url_host(page.links[number])}】" if 0 <= number < len(page.links) else match[0]

    text = "\n".join(lines)
    return _LINK_MARK.sub(mark, text) if page.kind == "page" else text


def url_host(url: str) -> str:
    try:
        return one_line(urlsplit(url).hostname or "")
    except ValueError:
        return ""


def find_matches(page: BrowsedPage, pattern: str) -> Sequence[tuple[int, Sequence[str]]]:
    """Return the places of the pattern, ignoring case and line breaks: for each the number of the line, and that line
    with those that follow it."""
    lines = page.text.split("\n")
    plain = [_normalize(strip_links(line)) for line in lines]
    text, needle = " ".join(plain), _normalize(pattern.translate(MARK_REPLACEMENTS))
    starts = [0, *accumulate(len(line) + 1 for line in plain)]
    matches: list[int] = []
    at = text.find(needle)
    while at >= 0 and len(matches) < _MAX_MATCHES:
        matches.append(bisect_right(starts, at) - 1)
        next_start = starts[min(matches[-1] + _SNIPPET_LINES, len(lines))]
        at = text.find(needle, next_start)
    return [(line, lines[line : line + _SNIPPET_LINES]) for line in matches]


def _normalize(text: str) -> str:
    return " ".join(text.split()).casefold()


def strip_links(text: str) -> str:
    return _LINK_MARK.sub("", text)
