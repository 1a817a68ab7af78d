"""Search and pages as functions, for models that have no browser of their own. Each result and page has one number."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from apis.chat import Function, FunctionTool
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.tool_runtime import Source, ToolSpec
from providers.responses.events.output import Output
from providers.responses.tools.web_search.call import FindCall, OpenCall, SearchCall, Web, WebCall, as_number
from providers.responses.tools.web_search.pages import Page, find_matches, one_line, show, with_link_list

SEARCH: Final = "web_search"
OPEN: Final = "open_page"
FIND: Final = "find_in_page"
_CITE: Final = "Cite a result in the answer by its number in lenticular brackets, like 【1】."
_CITE_LINES: Final = "Cite lines of a page by its number and theirs, like 【1†L4-L6】."
_PAGE: Final = {"type": "string", "description": "The number of a search result or of an opened page, or a whole URL."}


def search_function(spec: ToolSpec) -> FunctionTool:
    return _function(SEARCH, f"{spec.description} {_CITE}", dict(spec.parameters))


def page_functions() -> list[FunctionTool]:
    from_line = {"type": "integer", "description": "The first line to show; 0 without it."}
    pattern = {"type": "string", "description": "The words to find, in any case."}
    opening = (
        "Open a page and read it from a line on. Every line has a number; [#1] behind words is a link, and the links "
        f"are listed below the lines. {_CITE_LINES}"
    )
    finding = f"Find words in a page. Shows the lines where they stand, with their numbers. {_CITE_LINES}"
    return [
        _function(OPEN, opening, _object({"page": _PAGE, "from_line": from_line}, ["page"])),
        _function(FIND, finding, _object({"pattern": pattern, "page": _PAGE}, ["pattern", "page"])),
    ]


def _object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {**properties}, "required": required, "additionalProperties": False}


def _function(name: str, description: str, parameters: dict[str, Any]) -> FunctionTool:
    return FunctionTool(function=Function(name=name, description=description, parameters=parameters))


class Search(SearchCall):
    async def work(self, output: Output) -> None:
        result = await self.search()
        numbered = output.cite(result.sources)
        self.tell(_listing(numbered) if numbered else result.text, sources=numbered)


def _listing(numbered: Mapping[int, Source]) -> str:
    """The pages as the model is shown them. The numbers go on over a whole conversation: each means one page."""
    entries = (
        f"[{number}] {one_line(page.title)}\n{page.url}\n{one_line(page.text)}" for number, page in numbered.items()
    )
    return "\n\n".join(entries)


class Open(OpenCall):
    async def work(self, output: Output) -> None:
        first = self.whole("from_line", 0)
        self.url, number = locate(self, output)
        page = await self.web.open(self.call_id, self.url)
        self.url = page.url
        if not 0 <= first <= page.text.count("\n"):
            raise ToolFailed(f"The page has lines 0 to {page.text.count(chr(10))}.")
        number, sources = _number(output, page, number)
        head, lines = show(number, page, first, max_chars=self.web.view_chars)
        self.tell(head + with_link_list(lines, page), sources=sources, state=self.web.pages.add(number, page))


class Find(FindCall):
    async def work(self, output: Output) -> None:
        self.read_pattern()
        self.url, number = locate(self, output)
        page = await self.web.open(self.call_id, self.url)
        self.url = page.url
        number, sources = _number(output, page, number)
        matches = find_matches(page, self.pattern)
        parts = ["\n".join(f"L{at + i}: {line}" for i, line in enumerate(lines)) for at, lines in matches]
        head = (
            f"[{number}] {one_line(page.title)} ({page.url})\n**{len(parts)} places with `{one_line(self.pattern)}`**"
        )
        text = "\n\n".join([head, *parts])
        self.tell(text, sources=sources, state=self.web.pages.add(number, page))


def locate(call: OpenCall | FindCall, output: Output) -> tuple[str, int | None]:
    """The URL of the page that the call means, and the number that it has already, where it has one."""
    arguments = call.arguments()
    meant: Any = arguments.get("page", arguments.get("url"))
    number = as_number(meant)
    if number is None:
        if not isinstance(meant, str) or not meant.strip():
            raise ToolFailed(f"`{call.name}` needs a `page`: a number that was shown, or a whole URL.")
        url = meant.strip()
        return url, _known_as(call.web, output, url)
    page, source = call.web.pages.get(number), output.sources.get(number)
    url = page.url if page is not None else source.url if source is not None else ""
    if number < 0 or not url:
        raise ToolFailed(f"There is no page with the number {number}.")
    return url, number


def _known_as(web: Web, output: Output, url: str) -> int | None:
    opened = web.pages.number_of(url)
    if opened is not None:
        return opened
    return next((number for number, source in output.sources.items() if number >= 0 and source.url == url), None)


def _number(output: Output, page: Page, number: int | None) -> tuple[int, Mapping[int, Source]]:
    """The page's number, a new one if it has none, and what is cited by it."""
    source = Source(page.url, page.title)
    if number is not None:
        return number, {number: output.sources.setdefault(number, source)}
    sources = output.cite([source])
    return next(iter(sources)), sources


CALLS: Final[Mapping[str, Callable[[Web, ToolCallStart], WebCall]]] = {SEARCH: Search, OPEN: Open, FIND: Find}
