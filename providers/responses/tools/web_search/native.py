"""The browser that gpt-oss was trained on: `browser.search`, `browser.open` and `browser.find`, in its own terms.

Each thing that is shown (results, a page, another part of it, matches) has a cursor of its own, counting up over the
whole conversation from 0; without a `cursor` the last one is meant. Links are numbered on each page: 【id†...】. The
arguments are those of the tool's description in the Harmony format; `view_source` is not offered: it shows the text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.tool_runtime import Source
from providers.responses.events.citations import line_number
from providers.responses.events.output import Output
from providers.responses.tools.web_search.call import FindCall, OpenCall, SearchCall, Web, WebCall, as_number
from providers.responses.tools.web_search.pages import (
    Domains,
    Page,
    find_matches,
    host_of,
    one_line,
    show,
    with_link_ids,
    without_links,
    wrap,
)

_LINES_ABOVE: Final = 4
_MAX_VIEW_CHARS: Final = 20_000


class Search(SearchCall):
    async def work(self, output: Output) -> None:
        await self.search()
        _tell(self, output, _results(self.query, self.found, self.web.domains), sources=self.found)


class Open(OpenCall):
    async def work(self, output: Output) -> None:
        loc = self.whole("loc", -1)
        num_lines = self.whole("num_lines", -1)
        page, line = await self._page()
        _tell(self, output, page, first=loc if loc >= 0 else line, num_lines=num_lines)

    async def _page(self) -> tuple[Page, int]:
        """The page that is meant, and the line at which to show it unless the call says one."""
        meant: Any = self.arguments().get("id", -1)
        link = as_number(meant)
        if link is None:
            self.url = self.words("id").strip()
            return await self._open(self.url), 0
        page = _current(self)
        self.url = page.url or None
        if link < 0:
            return (page if _is_shown(self, page) else await self._open(page.url)), 0
        if link >= len(page.links):
            raise ToolFailed(f"Invalid link id `{link}`.")
        self.url = page.links[link]
        line = page.lines[link] if page.kind == "matches" else 0
        return await self._open(self.url), line - _LINES_ABOVE if line > _LINES_ABOVE else line

    async def _open(self, url: str) -> Page:
        if not url:
            raise ToolFailed("These results cannot be shown any more. Search again.")
        page = await self.web.open(self.call_id, url)
        self.url = page.url
        return page


class Find(FindCall):
    async def work(self, output: Output) -> None:
        self.read_pattern()
        page = _current(self)
        if not page.url:
            raise ToolFailed("`find` works on opened pages, not on search results.")
        self.url = page.url
        if page.kind == "matches" or not _is_shown(self, page):
            page = await self.web.open(self.call_id, page.url)
        _tell(self, output, _matches(page, self.pattern))


def _is_shown(call: OpenCall | FindCall, page: Page) -> bool:
    """Whether what is kept of the page may be shown. One that came through another filter has to come through this."""
    return bool(page.text) and call.web.domains in ((None, None), page.domains)


def _current(call: OpenCall | FindCall) -> Page:
    """The page that the call's cursor means."""
    pages = call.web.pages
    cursor = call.whole("cursor", -1)
    if pages.last is None:
        raise ToolFailed("No pages to access!")
    page = pages.get(pages.last if cursor < 0 else cursor)
    if page is None:
        raise ToolFailed(f"There is no page with the cursor `{cursor}`. The last one is `{pages.last}`.")
    return page


def _results(query: str, sources: Sequence[Source], domains: Domains) -> Page:
    lines = ["# Search Results", ""]
    begins: list[int] = []
    for link, source in enumerate(sources):
        begins.append(len(lines))
        title = one_line(source.title).replace("†", "‡")
        lines.append(f"  * 【{link}†{title}†{host_of(source.url)}】")
        lines += wrap(one_line(source.text)).split("\n")
    if not sources:
        lines.append("The search found no results.")
    urls = [source.url for source in sources]
    return Page("", one_line(query), "\n".join(lines), urls, "results", begins, domains=domains)


def _matches(page: Page, pattern: str) -> Page:
    pattern = one_line(pattern)
    found = find_matches(page, pattern)
    entries = [
        "\n".join([f"# 【{link}†match at L{line}】", *map(without_links, lines)])
        for link, (line, lines) in enumerate(found)
    ]
    text = "\n\n".join(entries) or f"No `find` results for pattern: `{pattern}`"
    title = f"Find results for text: `{pattern}` in `{one_line(page.title)}`"
    lines = [line for line, _ in found]
    links = [page.url] * len(found)
    return Page(page.url, title, text, links, "matches", lines, found_in=page.title, domains=page.domains)


def _tell(
    call: WebCall, output: Output, page: Page, *, first: int = 0, num_lines: int = -1, sources: Sequence[Source] = ()
) -> None:
    """Show the page by a new cursor. `sources` are those of a search, which its lines are cited by."""
    last = page.text.count("\n")
    if first > last:
        raise ToolFailed(f"Invalid location parameter: `{first}`. Cannot exceed page maximum of {last}.")
    cursor = max(output.sources, default=-1) + 1
    numbered = {cursor: Source(page.url, page.found_in or page.title)}
    for line, source in zip(page.lines, sources, strict=False):
        numbered[line_number(cursor, line)] = Source(source.url, source.title)
    output.sources.update(numbered)
    max_chars = _MAX_VIEW_CHARS if num_lines > 0 else call.web.view_chars
    head, lines = show(cursor, page, first, max_chars=max_chars, num_lines=num_lines)
    call.tell(head + with_link_ids(lines, page), sources=numbered, state=call.web.pages.add(cursor, page))


CALLS: Final[Mapping[str, Callable[[Web, ToolCallStart], WebCall]]] = {
    "browser.search": Search,
    "browser.open": Open,
    "browser.find": Find,
}
