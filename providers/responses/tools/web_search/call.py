"""The common part of all calls of the web search: their items, their events and their access to the web."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from openai.types.responses import (
    ResponseFunctionWebSearch,
)
from openai.types.responses.response_function_web_search import (
    Action,
    ActionFind,
    ActionOpenPage,
    ActionSearch,
    ActionSearchSource,
)

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.call import Emit, HostedCall
from providers.responses.tools.web_search.pages import BrowsedPage, DomainFilter, PageHistory, wrap_lines

SearchStatus = Literal["in_progress", "searching", "completed", "failed", "incomplete"]
_MAX_PATTERN_CHARS = 200


@dataclass(frozen=True, slots=True)
class WebAccess:
    """The web as one request may use it. `options` are the declaration's; `view_chars` bounds one view of a page."""

    runtime: ToolRuntime
    tenant: str
    options: Mapping[str, Any]
    pages: PageHistory
    view_chars: int

    @property
    def domains(self) -> DomainFilter:
        return self.options.get("allowed_domains"), self.options.get("blocked_domains")

    async def search(self, call_id: str, query: str) -> ToolResult:
        return await self._call_runtime(call_id, "search", query=query)

    async def open_page(self, call_id: str, url: str) -> BrowsedPage:
        """Return the page at this URL: the one that the conversation opened earlier, if it did."""
        page = self.pages.find_by_url(url, self.domains)
        if page is not None:
            return page
        result = await self._call_runtime(call_id, "open_page", url=url)
        source = result.sources[0] if result.sources else Source(url, url, result.text)
        data: Mapping[str, Any] = result.data or {}
        text = f"{source.text}\n\n[The page is longer than can be shown here.]" if data.get("cut") else source.text
        links: Sequence[str] = data.get("links") or ()
        return BrowsedPage(source.url, source.title, wrap_lines(text), links, requested_url=url, domains=self.domains)

    async def _call_runtime(self, call_id: str, name: str, **arguments: str) -> ToolResult:
        return await self.runtime.call(ToolCall(call_id, name, arguments, self.options, self.tenant))


class WebCall(HostedCall):
    """One call. `execute` sets the fields of the action as soon as they are known, so that a failed item has them."""

    item_type = "web_search_call"
    opens = "when complete"

    def __init__(self, web: WebAccess, start: ToolCallStart) -> None:
        super().__init__(start)
        self.web = web

    @abstractmethod
    async def execute(self, output: ResponseOutput) -> None:
        """Run the call and record its result. Raises ToolFailed."""

    @abstractmethod
    def action(self, *, is_finished: bool) -> Action:
        """Return the action with the fields known so far."""

    def item(self, status: str) -> ResponseFunctionWebSearch:
        action = self.action(is_finished=status not in ("in_progress", "searching"))
        return ResponseFunctionWebSearch(
            id=self.id, type="web_search_call", status=cast(SearchStatus, status), action=action
        )

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        await emit([self.phase_event("searching")])
        await self.execute(output)

    def int_argument(self, name: str, default: int) -> int:
        """Return an integer argument, which models write as 3, 3.0 or "3". Raises ToolFailed."""
        value: Any = self.parse_arguments().get(name)
        if value is None:
            return default
        number = parse_int(value)
        if number is None:
            raise ToolFailed(f"`{name}` must be a whole number.")
        return number

    def text_argument(self, name: str) -> str:
        """Return a text argument. Raises ToolFailed if it is missing or empty."""
        value: Any = self.parse_arguments().get(name)
        if not isinstance(value, str) or not value.strip():
            raise ToolFailed(f"`{self.name}` needs `{name}`, a text that is not empty.")
        return value


def parse_int(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal() and len(value) < 10:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class WebSearchCall(WebCall):
    """A search."""

    query = ""
    sources: Sequence[Source] = ()

    def open(self) -> EventList:
        with suppress(ToolFailed):  # `search` reports it
            self.query = self.text_argument("query")
        return super().open()

    async def search(self) -> ToolResult:
        self.query = self.text_argument("query")
        result = await self.web.search(self.call_id, self.query)
        self.sources = result.sources
        return result

    def action(self, *, is_finished: bool) -> Action:
        action = ActionSearch(type="search", query=self.query)
        if self.query:
            action.queries = [self.query]
        if is_finished:
            action.sources = [ActionSearchSource(type="url", url=source.url) for source in self.sources]
        return action

    def item(self, status: str) -> ResponseFunctionWebSearch:
        item = super().item(status)
        if status != "completed":
            return item
        results = [{"url": source.url, "title": source.title, "text": source.text} for source in self.sources]
        return item.model_copy(update={"results": results})


class OpenPageCall(WebCall):
    """The opening of a page."""

    url: str | None = None

    def action(self, *, is_finished: bool) -> Action:
        return ActionOpenPage(type="open_page", url=self.url)


class FindInPageCall(WebCall):
    """A search for a text in a page."""

    url = ""
    pattern = ""

    def open(self) -> EventList:
        with suppress(ToolFailed):  # `execute` reports it
            self.read_pattern()
        return super().open()

    def read_pattern(self) -> None:
        pattern = self.text_argument("pattern")
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise ToolFailed(f"The `pattern` may have {_MAX_PATTERN_CHARS} characters at most.")
        self.pattern = pattern

    def action(self, *, is_finished: bool) -> Action:
        return ActionFind(type="find_in_page", pattern=self.pattern, url=self.url)
