"""The browser that gpt-oss was trained on: `browser.search`, `browser.open` and `browser.find`, in its own terms.

Each view (results, a page, another part of it, matches) has a cursor of its own, which counts up from 0 over the whole
conversation; the default is the last one. Links are numbered on each page: 【id†...】. The arguments are those of the
tool's description in the Harmony format, except `view_source`, which would show the same text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.tool_runtime import Source
from providers.responses.events.citations import line_number, one_line
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.web_search.call import (
    FindInPageCall,
    OpenPageCall,
    WebAccess,
    WebCall,
    WebSearchCall,
    parse_int,
)
from providers.responses.tools.web_search.pages import (
    BrowsedPage,
    DomainFilter,
    find_matches,
    render_link_ids,
    render_page,
    strip_links,
    url_host,
    wrap_lines,
)

_LINES_ABOVE: Final = 4
_MAX_VIEW_CHARS: Final = 20_000


class BrowserSearch(WebSearchCall):
    async def execute(self, output: ResponseOutput) -> None:
        await self.search()
        _show_page(self, output, _build_results_page(self.query, self.sources, self.web.domains), sources=self.sources)


class BrowserOpen(OpenPageCall):
    async def execute(self, output: ResponseOutput) -> None:
        loc = self.int_argument("loc", -1)
        num_lines = self.int_argument("num_lines", -1)
        page, line = await self._resolve_page()
        _show_page(self, output, page, first=loc if loc >= 0 else line, num_lines=num_lines)

    async def _resolve_page(self) -> tuple[BrowsedPage, int]:
        """Return the page that the call names, and the default line to show it from."""
        value: Any = self.parse_arguments().get("id", -1)
        link = parse_int(value)
        if link is None:
            self.url = self.text_argument("id").strip()
            return await self._open_url(self.url), 0
        page = _page_at_cursor(self)
        self.url = page.url or None
        if link < 0:
            return (page if _is_viewable(self, page) else await self._open_url(page.url)), 0
        if link >= len(page.links):
            raise ToolFailed(f"Invalid link id `{link}`.")
        self.url = page.links[link]
        line = page.lines[link] if page.kind == "matches" else 0
        return await self._open_url(self.url), line - _LINES_ABOVE if line > _LINES_ABOVE else line

    async def _open_url(self, url: str) -> BrowsedPage:
        if not url:
            raise ToolFailed("These results cannot be shown any more. Search again.")
        page = await self.web.open_page(self.call_id, url)
        self.url = page.url
        return page


class BrowserFind(FindInPageCall):
    async def execute(self, output: ResponseOutput) -> None:
        self.read_pattern()
        page = _page_at_cursor(self)
        if not page.url:
            raise ToolFailed("`find` works on opened pages, not on search results.")
        self.url = page.url
        if page.kind == "matches" or not _is_viewable(self, page):
            page = await self.web.open_page(self.call_id, page.url)
        _show_page(self, output, _build_matches_page(page, self.pattern))


def _is_viewable(call: OpenPageCall | FindInPageCall, page: BrowsedPage) -> bool:
    """Return True if the stored text may be shown. A page fetched under another filter must pass this request's."""
    return bool(page.text) and call.web.domains in ((None, None), page.domains)


def _page_at_cursor(call: OpenPageCall | FindInPageCall) -> BrowsedPage:
    """Return the page at the call's cursor. Raises ToolFailed."""
    pages = call.web.pages
    cursor = call.int_argument("cursor", -1)
    if pages.last_number is None:
        raise ToolFailed("No pages to access!")
    page = pages.get(pages.last_number if cursor < 0 else cursor)
    if page is None:
        raise ToolFailed(f"There is no page with the cursor `{cursor}`. The last one is `{pages.last_number}`.")
    return page


def _build_results_page(query: str, sources: Sequence[Source], domains: DomainFilter) -> BrowsedPage:
    lines = ["# Search Results", ""]
    begins: list[int] = []
    for link, source in enumerate(sources):
        begins.append(len(lines))
        title = one_line(source.title).replace("†", "‡")
        lines.append(f"  * 【{link}†{title}†{url_host(source.url)}】")
        lines += wrap_lines(one_line(source.text)).split("\n")
    if not sources:
        lines.append("The search found no results.")
    urls = [source.url for source in sources]
    return BrowsedPage("", one_line(query), "\n".join(lines), urls, "results", begins, domains=domains)


def _build_matches_page(page: BrowsedPage, pattern: str) -> BrowsedPage:
    pattern = one_line(pattern)
    matches = find_matches(page, pattern)
    entries = [
        "\n".join([f"# 【{link}†match at L{line}】", *map(strip_links, lines)])
        for link, (line, lines) in enumerate(matches)
    ]
    text = "\n\n".join(entries) or f"No `find` results for pattern: `{pattern}`"
    title = f"Find results for text: `{pattern}` in `{one_line(page.title)}`"
    lines = [line for line, _ in matches]
    links = [page.url] * len(matches)
    return BrowsedPage(page.url, title, text, links, "matches", lines, found_in=page.title, domains=page.domains)


def _show_page(
    call: WebCall,
    output: ResponseOutput,
    page: BrowsedPage,
    *,
    first: int = 0,
    num_lines: int = -1,
    sources: Sequence[Source] = (),
) -> None:
    """Record the page as the result, under a new cursor. `sources` are the results of a search, cited by its lines."""
    last = page.text.count("\n")
    if first > last:
        raise ToolFailed(f"Invalid location parameter: `{first}`. Cannot exceed page maximum of {last}.")
    cursor = max(output.sources, default=-1) + 1
    numbered = {cursor: Source(page.url, page.found_in or page.title)}
    for line, source in zip(page.lines, sources, strict=False):
        numbered[line_number(cursor, line)] = Source(source.url, source.title)
    output.sources.update(numbered)
    max_chars = _MAX_VIEW_CHARS if num_lines > 0 else call.web.view_chars
    head, lines = render_page(cursor, page, first, max_chars=max_chars, num_lines=num_lines)
    call.record_result(head + render_link_ids(lines, page), sources=numbered, state=call.web.pages.add(cursor, page))


NATIVE_BROWSER_CALLS: Final[Mapping[str, Callable[[WebAccess, ToolCallStart], WebCall]]] = {
    "browser.search": BrowserSearch,
    "browser.open": BrowserOpen,
    "browser.find": BrowserFind,
}
