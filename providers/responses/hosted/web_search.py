"""The hosted web search: `web_search` in all its spellings, run by the stack's ToolRuntime."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import orjson
from openai.types.responses import (
    ResponseFunctionWebSearch,
    ResponseWebSearchCallCompletedEvent,
    ResponseWebSearchCallInProgressEvent,
    ResponseWebSearchCallSearchingEvent,
)
from openai.types.responses.response_function_web_search import ActionSearch, ActionSearchSource

from apis.errors import ToolFailed
from apis.inference import Function, FunctionTool
from apis.responses import CreateResponse, WebSearchTool
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime
from providers.responses.hosted.call import Events, HostedCall, HostedTool, Told
from providers.responses.open_items import item_added, item_done

NAME = "web_search"
_CITE = "Cite a result in the answer by its number in lenticular brackets, like 【1】."
SearchStatus = Literal["in_progress", "searching", "completed", "failed", "incomplete"]


class WebSearch(HostedTool):
    """The search as one request declared it."""

    prefix = "ws"

    def __init__(self, declared: WebSearchTool, request: CreateResponse, runtime: ToolRuntime) -> None:
        self.runtime = runtime
        self.shows_sources = "web_search_call.action.sources" in (request.include or ())
        self.shows_results = "web_search_call.results" in (request.include or ())
        filters = declared.filters
        options: dict[str, Any] = {
            "allowed_domains": filters.allowed_domains if filters else None,
            "blocked_domains": filters.blocked_domains if filters else None,
            "context_size": declared.search_context_size,
            "user_location": declared.user_location.model_dump(exclude_none=True) if declared.user_location else None,
        }
        if declared.external_web_access is False:
            options["live"] = False
        self.options = {name: value for name, value in options.items() if value is not None}

    def functions(self) -> Mapping[str, FunctionTool]:
        spec = next(tool for tool in self.runtime.tools() if tool.name == "search")
        function = Function(
            name=NAME, description=f"{spec.description} {_CITE}", parameters=cast(dict[str, Any], spec.parameters)
        )
        return {NAME: FunctionTool(function=function)}

    def begin(self, item_id: str, index: int, call_id: str, name: str) -> HostedCall:
        return _Search(self, item_id, index, call_id)


class _Search(HostedCall):
    def __init__(self, tool: WebSearch, item_id: str, index: int, call_id: str) -> None:
        self.id = item_id
        self.index = index
        self.call_id = call_id
        self._tool = tool
        self._found: Sequence[Source] = ()
        self._arguments: list[str] = []
        self._query = ""

    def item(self, status: str) -> ResponseFunctionWebSearch:
        action = ActionSearch(type="search", query=self._query)
        if self._query:
            action.queries = [self._query]
        if self._tool.shows_sources and status not in ("in_progress", "searching"):
            action.sources = [ActionSearchSource(type="url", url=source.url) for source in self._found]
        item = ResponseFunctionWebSearch(
            id=self.id, type="web_search_call", status=cast(SearchStatus, status), action=action
        )
        if self._tool.shows_results and status == "completed":
            results = [{"url": each.url, "title": each.title, "text": each.text} for each in self._found]
            return item.model_copy(update={"results": results})
        return item

    def open(self) -> Events:
        return [
            item_added(self.index, self.item("in_progress")),
            ResponseWebSearchCallInProgressEvent(
                type="response.web_search_call.in_progress",
                item_id=self.id,
                output_index=self.index,
                sequence_number=0,
            ),
        ]

    def append(self, text: str, events: Events) -> None:
        self._arguments.append(text)

    async def run(self, sources: Mapping[int, Source]) -> AsyncGenerator[Events]:
        written = "".join(self._arguments)
        yield [
            ResponseWebSearchCallSearchingEvent(
                type="response.web_search_call.searching",
                item_id=self.id,
                output_index=self.index,
                sequence_number=0,
            )
        ]
        status = "completed"
        try:
            result = await self._search(written)
        except ToolFailed as exc:
            result, status = ToolResult(exc.message), "failed"
        self._found = result.sources
        numbered = dict(enumerate(result.sources, max(sources, default=0) + 1))
        text = _listing(numbered) if numbered else result.text
        shown = {number: replace(source, text="") for number, source in numbered.items()}
        self.told = Told(self.call_id, NAME, written, text, shown)
        completed = ResponseWebSearchCallCompletedEvent(
            type="response.web_search_call.completed", item_id=self.id, output_index=self.index, sequence_number=0
        )
        yield [*([completed] if status == "completed" else []), item_done(self.index, self.item(status))]

    def close(self, status: str) -> Events:
        return [item_done(self.index, self.item(status))]

    def refuse(self, reason: str) -> Events:
        self.told = Told(self.call_id, NAME, "".join(self._arguments), reason)
        return self.close("failed")

    async def _search(self, written: str) -> ToolResult:
        try:
            arguments: Any = orjson.loads(written or "{}")
        except orjson.JSONDecodeError as exc:
            raise ToolFailed("The arguments of the search are not JSON.") from exc
        query: Any = cast(dict[str, Any], arguments).get("query") if isinstance(arguments, dict) else None
        if not isinstance(query, str) or not query.strip():
            raise ToolFailed("The search needs a `query` of text.")
        self._query = query
        return await self._tool.runtime.call(ToolCall(self.call_id, "search", {"query": query}, self._tool.options))


def _listing(numbered: Mapping[int, Source]) -> str:
    """The pages as the model is shown them. The numbers go on over a whole conversation: each means one page."""
    return "\n\n".join(f"[{number}] {page.title}\n{page.url}\n{page.text}" for number, page in numbered.items())
