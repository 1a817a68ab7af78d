"""The pages that a conversation has looked at, by the numbers that the model knows them by, and how it is shown them.

Each call keeps with what it told (`Told.state`) the page that it showed, so that a number means the same page in every
later turn: `{"number": 3, "page": {...}}`, or `{"number": 4, "same": 3}` where a page is shown again.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Final, Literal
from urllib.parse import urldefrag, urlsplit

import msgspec

from providers.responses.events.tool_result import Told

MAX_PAGE_CHARS: Final = 150_000
MAX_CHAIN_CHARS: Final = 2_000_000
"""Of all pages that one chain of responses keeps. What comes later is fetched anew where a later turn wants it."""
_MAX_LINK_LIST_CHARS: Final = 10_000
_MAX_MATCHES: Final = 50
_SNIPPET_LINES: Final = 4
_WIDTH: Final = 80

_PIECE: Final = re.compile(rf".{{1,{_WIDTH}}}(?:\s|\Z)|.{{{_WIDTH}}}")
_LINK: Final = re.compile(r"\[#(\d{1,4})\]")
_PLAIN: Final = str.maketrans({"【": "〖", "】": "〗", "\u2028": " ", "\u2029": " "})

Domains = tuple[list[str] | None, list[str] | None]


@dataclass(frozen=True, slots=True)
class Page:
    """A page as lines of text, where `[#1]` means the first of `links`. `asked` is the URL that led to it, `domains`
    the request's filter that let it through.

    The list of a search's `results` and of the `matches` of a find are pages too: each of their links is one entry,
    and `lines` says at which line it begins, or to which line of the page it leads. Results have no URL; matches were
    `found_in` the page of that title. A page without text was too much to keep.
    """

    url: str
    title: str
    text: str
    links: Sequence[str] = ()
    kind: Literal["page", "results", "matches"] = "page"
    lines: Sequence[int] = ()
    asked: str = ""
    found_in: str = ""
    domains: Domains = (None, None)

    @property
    def size(self) -> int:
        return len(self.text) + sum(map(len, self.links))


class Pages:
    """All pages of a conversation. `last` is the number of the one that was shown last."""

    def __init__(self, told: Iterable[Told] = ()) -> None:
        self._pages: dict[int, Page] = {}
        self._room = MAX_CHAIN_CHARS
        self.last: int | None = None
        for each in told:
            match each.state:
                case {"number": int() as number, "page": page}:
                    self._put(number, msgspec.convert(page, Page))
                case {"number": int() as number, "same": int() as same} if same in self._pages:
                    self._put(number, self._pages[same])
                case _:
                    pass
        self._room -= sum({id(page): page.size for page in self._pages.values()}.values())

    def get(self, number: int) -> Page | None:
        return self._pages.get(number)

    def number_of(self, url: str) -> int | None:
        """By which number a page of this URL was shown."""
        return next((number for number, page in self._pages.items() if _is_at(page, url)), None)

    def find(self, url: str, domains: Domains) -> Page | None:
        """The page at this URL, where its text is kept. One that was opened under another filter than the request's is
        none: only who fetches can say whether it would come through this one."""
        fits = (
            page
            for page in self._pages.values()
            if page.text and _is_at(page, url) and domains in ((None, None), page.domains)
        )
        return next(fits, None)

    def add(self, number: int, page: Page) -> Mapping[str, Any]:
        """The page is shown by this number. Gives what the call has to keep of it."""
        same = next((known for known, each in self._pages.items() if each is page), None)
        self._put(number, page)
        if same is not None:
            return {"number": number, "same": same}
        if page.size > self._room:
            page = replace(page, text="", links=() if page.kind == "page" else page.links)
        self._room -= page.size
        return {"number": number, "page": asdict(page)}

    def _put(self, number: int, page: Page) -> None:
        self._pages[number] = page
        self.last = number


def _is_at(page: Page, url: str) -> bool:
    return page.kind == "page" and urldefrag(url).url in (urldefrag(page.url).url, urldefrag(page.asked).url)


def wrap(text: str) -> str:
    """Text as lines short enough to be cited by number. What could pass for a citation mark or a link is changed."""
    lines: list[str] = []
    for line in text[:MAX_PAGE_CHARS].translate(_PLAIN).split("\n"):
        lines += [piece.rstrip() for piece in _PIECE.findall(line)] if len(line) > _WIDTH else [line]
    return "\n".join(lines)


def one_line(text: str) -> str:
    """The same for what stands on a line with other things."""
    return " ".join(text.translate(_PLAIN).split())


def show(number: int, page: Page, first: int, *, max_chars: int, num_lines: int = 0) -> tuple[str, Sequence[str]]:
    """A page's head and its numbered lines, from `first` on: as many as `num_lines` says, or as have room."""
    lines = page.text.split("\n")
    first = max(0, first)
    end = _end(lines, first, num_lines, max_chars)
    head = f"{_head(number, page)}\n**viewing lines [{first} - {end - 1}] of {len(lines) - 1}**\n\n"
    return head, [f"L{first + at}: {line}" for at, line in enumerate(lines[first:end])]


def _head(number: int, page: Page) -> str:
    return f"[{number}] {one_line(page.title)}{f' ({page.url})' if page.url else ''}"


def _end(lines: Sequence[str], first: int, num_lines: int, max_chars: int) -> int:
    last = min(first + num_lines, len(lines)) if num_lines > 0 else len(lines)
    for at in range(first, last):
        max_chars -= len(lines[at]) + 6
        if max_chars < 0:
            return at + 1
    return last


def with_link_list(lines: Sequence[str], page: Page) -> str:
    """Lines of a page, followed by the URLs of the links in them, as far as there is room for those."""
    text = "\n".join(lines)
    links: list[str] = []
    room = _MAX_LINK_LIST_CHARS
    for number in dict.fromkeys(int(found[1]) for found in _LINK.finditer(text)):
        if 0 < number <= len(page.links) and len(page.links[number - 1]) <= room:
            links.append(f"[#{number}] {page.links[number - 1]}")
            room -= len(links[-1])
    return "\n".join([text, "", "Links:", *links] if links else [text])


def with_link_ids(lines: Sequence[str], page: Page) -> str:
    """Lines of a page, with its links as gpt-oss knows them: 【id†domain】."""

    def mark(found: re.Match[str]) -> str:
        number = int(found[1]) - 1
        return f"【{number}†{host_of(page.links[number])}】" if 0 <= number < len(page.links) else found[0]

    text = "\n".join(lines)
    return _LINK.sub(mark, text) if page.kind == "page" else text


def host_of(url: str) -> str:
    try:
        return one_line(urlsplit(url).hostname or "")
    except ValueError:
        return ""


def find_matches(page: Page, pattern: str) -> Sequence[tuple[int, Sequence[str]]]:
    """Where the pattern stands, whatever its case and wherever lines break: each time the number of the line, and that
    line with those that follow it."""
    lines = page.text.split("\n")
    plain = [_folded(without_links(line)) for line in lines]
    text, wanted = " ".join(plain), _folded(pattern.translate(_PLAIN))
    starts = [0, *accumulate(len(line) + 1 for line in plain)]
    found: list[int] = []
    at = text.find(wanted)
    while at >= 0 and len(found) < _MAX_MATCHES:
        found.append(bisect_right(starts, at) - 1)
        behind = starts[min(found[-1] + _SNIPPET_LINES, len(lines))]
        at = text.find(wanted, behind)
    return [(line, lines[line : line + _SNIPPET_LINES]) for line in found]


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def without_links(text: str) -> str:
    return _LINK.sub("", text)
