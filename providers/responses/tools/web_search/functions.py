"""Search and pages as functions, for models without a native browser. Each result and page has one number."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from apis.chat import ChatFunctionTool, FunctionDefinition
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.tool_runtime import Source, ToolSpec
from apis.wire.tools import UserLocation
from providers.responses.events.citations import one_line
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.web_search.call import (
    FindInPageCall,
    OpenPageCall,
    WebAccess,
    WebCall,
    WebSearchCall,
    parse_int,
)
from providers.responses.tools.web_search.pages import BrowsedPage, append_link_list, find_matches, render_page

WEB_SEARCH_FUNCTION: Final = "web_search"
OPEN_PAGE_FUNCTION: Final = "open_page"
FIND_IN_PAGE_FUNCTION: Final = "find_in_page"
_CITE_INSTRUCTION: Final = "Cite a result in the answer by its number in lenticular brackets, like 【1】."
_CITE_LINES_INSTRUCTION: Final = "Cite lines of a page by its number and theirs, like 【1†L4-L6】."
_MAX_LOCATION_CHARS: Final = 200
_PAGE_PARAMETER: Final = {
    "type": "string",
    "description": "The number of a search result or of an opened page, or a whole URL.",
}


def build_search_function(spec: ToolSpec, user_location: UserLocation | None = None) -> ChatFunctionTool:
    """Return the function of searches. Its description says where the user is, for queries about what is near."""
    sentences = (spec.description, _describe_location(user_location), _CITE_INSTRUCTION)
    return _build_function(WEB_SEARCH_FUNCTION, " ".join(filter(None, sentences)), dict(spec.parameters))


def _describe_location(location: UserLocation | None) -> str:
    if location is None:
        return ""
    country = location.country.upper() if location.country else None
    place = ", ".join(filter(None, (location.city, location.region, country)))
    sentences = (
        f"The user is in {one_line(place)[:_MAX_LOCATION_CHARS]}." if place else "",
        f"The user's time zone is {one_line(location.timezone)[:_MAX_LOCATION_CHARS]}." if location.timezone else "",
    )
    return " ".join(filter(None, sentences))


def build_page_functions() -> list[ChatFunctionTool]:
    from_line = {"type": "integer", "description": "The first line to show; 0 without it."}
    pattern = {"type": "string", "description": "The words to find, in any case."}
    opening = (
        "Open a page and read it from a line on. Every line has a number; [#1] behind words is a link, and the links "
        f"are listed below the lines. {_CITE_LINES_INSTRUCTION}"
    )
    finding = f"Find words in a page. Shows the lines where they stand, with their numbers. {_CITE_LINES_INSTRUCTION}"
    return [
        _build_function(
            OPEN_PAGE_FUNCTION, opening, _object_schema({"page": _PAGE_PARAMETER, "from_line": from_line}, ["page"])
        ),
        _build_function(
            FIND_IN_PAGE_FUNCTION,
            finding,
            _object_schema({"pattern": pattern, "page": _PAGE_PARAMETER}, ["pattern", "page"]),
        ),
    ]


def _object_schema(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {**properties}, "required": required, "additionalProperties": False}


def _build_function(name: str, description: str, parameters: dict[str, Any]) -> ChatFunctionTool:
    return ChatFunctionTool(function=FunctionDefinition(name=name, description=description, parameters=parameters))


class FunctionSearch(WebSearchCall):
    async def execute(self, output: ResponseOutput) -> None:
        result = await self.search()
        numbered = output.number_sources(result.sources)
        self.record_result(_render_results(numbered) if numbered else result.text, sources=numbered)


def _render_results(sources_by_number: Mapping[int, Source]) -> str:
    """Return the results for the model. A number means one page in the whole conversation."""
    entries = (
        f"[{number}] {one_line(page.title)}\n{page.url}\n{one_line(page.text)}"
        for number, page in sources_by_number.items()
    )
    return "\n\n".join(entries)


class FunctionOpenPage(OpenPageCall):
    async def execute(self, output: ResponseOutput) -> None:
        first = self.int_argument("from_line", 0)
        self.url, number = locate_page(self, output)
        page = await self.web.open_page(self.call_id, self.url)
        self.url = page.url
        if not 0 <= first <= page.text.count("\n"):
            raise ToolFailed(f"The page has lines 0 to {page.text.count(chr(10))}.")
        number, sources = _number_page(output, page, number)
        head, lines = render_page(number, page, first, max_chars=self.web.view_chars)
        self.record_result(
            head + append_link_list(lines, page), sources=sources, state=self.web.pages.add(number, page)
        )


class FunctionFind(FindInPageCall):
    async def execute(self, output: ResponseOutput) -> None:
        self.read_pattern()
        self.url, number = locate_page(self, output)
        page = await self.web.open_page(self.call_id, self.url)
        self.url = page.url
        number, sources = _number_page(output, page, number)
        matches = find_matches(page, self.pattern)
        parts = ["\n".join(f"L{at + i}: {line}" for i, line in enumerate(lines)) for at, lines in matches]
        head = (
            f"[{number}] {one_line(page.title)} ({page.url})\n**{len(parts)} places with `{one_line(self.pattern)}`**"
        )
        text = "\n\n".join([head, *parts])
        self.record_result(text, sources=sources, state=self.web.pages.add(number, page))


def locate_page(call: OpenPageCall | FindInPageCall, output: ResponseOutput) -> tuple[str, int | None]:
    """Return the URL of the page that the call names, and the page's number if it has one."""
    arguments = call.parse_arguments()
    value: Any = arguments.get("page", arguments.get("url"))
    number = parse_int(value)
    if number is None:
        if not isinstance(value, str) or not value.strip():
            raise ToolFailed(f"`{call.name}` needs a `page`: a number that was shown, or a whole URL.")
        url = value.strip()
        return url, _find_number(call.web, output, url)
    page, source = call.web.pages.get(number), output.sources.get(number)
    url = page.url if page is not None else source.url if source is not None else ""
    if number < 0 or not url:
        raise ToolFailed(f"There is no page with the number {number}.")
    return url, number


def _find_number(web: WebAccess, output: ResponseOutput, url: str) -> int | None:
    number = web.pages.number_of(url)
    if number is not None:
        return number
    return next((number for number, source in output.sources.items() if number >= 0 and source.url == url), None)


def _number_page(output: ResponseOutput, page: BrowsedPage, number: int | None) -> tuple[int, Mapping[int, Source]]:
    """Return the page's number, a new one if it has none, and the source that the number cites."""
    source = Source(page.url, page.title)
    if number is not None:
        return number, {number: output.sources.setdefault(number, source)}
    sources = output.number_sources([source])
    return next(iter(sources)), sources


FUNCTION_CALLS: Final[Mapping[str, Callable[[WebAccess, ToolCallStart], WebCall]]] = {
    WEB_SEARCH_FUNCTION: FunctionSearch,
    OPEN_PAGE_FUNCTION: FunctionOpenPage,
    FIND_IN_PAGE_FUNCTION: FunctionFind,
}
