"""The hosted tool `web_search`, in all its spellings, run by the stack's ToolRuntime.

A ToolRuntime with `search` alone offers searches; with `open_page` the model can also read pages and find text in them.
A model with a native `browser` is offered that if all three of its actions are available.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import orjson
from openai.types.responses import ResponseFunctionWebSearch
from openai.types.responses.response import ToolUsageWebSearch

from apis.chat import ChatTool, NativeTool, NativeToolName
from apis.deltas import ToolCallStart
from apis.tool_runtime import ToolRuntime
from apis.wire.tool_items import WebSearchCallItem
from apis.wire.tools import CustomTool, FunctionTool, WebSearchTool
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import RESULT_UNAVAILABLE, HostedCall, ToolFunctions, TypedTool
from providers.responses.tools.tool_context import ToolContext
from providers.responses.tools.web_search import functions, native
from providers.responses.tools.web_search.call import WebAccess
from providers.responses.tools.web_search.pages import PageHistory

_CALLS_BY_NAME: Final = {**functions.FUNCTION_CALLS, **native.NATIVE_BROWSER_CALLS}
_FUNCTION_NAMES: Final = {
    "search": functions.WEB_SEARCH_FUNCTION,
    "open": functions.OPEN_PAGE_FUNCTION,
    "find": functions.FIND_IN_PAGE_FUNCTION,
}
_VIEW_CHARS: Final[Mapping[str, int]] = {"low": 3000, "medium": 6000, "high": 12_000}


def _create_tool(declaration: WebSearchTool, context: ToolContext) -> TypedTool | None:
    if declaration.search is False:
        if context.runtime is None or context.find_spec("open_page") is None:
            raise context.not_configured_error(
                "No pages can be opened: give the run config's `tool_runtime` a search provider that opens pages."
            )
    elif context.runtime is None or context.find_spec("search") is None:
        if declaration.external_web_access is False:
            return None  # agents always declare this one and do not depend on it
        raise context.not_configured_error(
            "No web search is configured: give the run config's `tool_runtime` a search provider and its key."
        )
    return WebSearch(declaration, context, context.runtime)


class WebSearch(TypedTool):
    """The search as one request declares it."""

    def __init__(self, declaration: WebSearchTool, context: ToolContext, runtime: ToolRuntime) -> None:
        filters = declaration.filters
        options: dict[str, Any] = {
            "allowed_domains": filters.allowed_domains if filters else None,
            "blocked_domains": filters.blocked_domains if filters else None,
            "context_size": declaration.search_context_size,
            "user_location": declaration.user_location.model_dump(exclude_none=True)
            if declaration.user_location
            else None,
        }
        is_live = declaration.external_web_access is not False
        if not is_live:
            options["live"] = False
        self._web = WebAccess(
            runtime,
            context.tenant,
            {name: value for name, value in options.items() if value is not None},
            PageHistory(
                tool_result
                for tool_result in context.tool_results.values()
                if tool_result.name.removeprefix("functions.") in _CALLS_BY_NAME
            ),
            _VIEW_CHARS[declaration.search_context_size or "medium"],
        )
        specs = {spec.name: spec for spec in runtime.tools()}
        opens_pages, searches = is_live and "open_page" in specs, declaration.search is not False
        if opens_pages and searches and "browser" in context.native_tools:
            self._offered_tools: list[ChatTool] = [NativeTool(type="browser")]
            return
        self._offered_tools = (
            [functions.build_search_function(specs["search"], declaration.user_location)] if searches else []
        )
        client_names = {
            tool.name for tool in context.request.tools or () if isinstance(tool, FunctionTool | CustomTool)
        } & functions.FUNCTION_CALLS.keys()
        if opens_pages and not client_names:  # the client's prompts mean its own function of that name
            self._offered_tools += functions.build_page_functions()

    @property
    def offered_tools(self) -> Sequence[ChatTool]:
        return self._offered_tools

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return _CALLS_BY_NAME[start.name.removeprefix("functions.")](self._web, start)


def _call_from_item(item: WebSearchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    """A failed item shows no output, and a page is called by its URL, which is all that the item has."""
    return _read_action(item, native_tools) if item.status != "failed" else None


def _call_for_model(
    item: WebSearchCallItem, stored: ToolResultRecord, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord:
    call = _read_action(item, native_tools)
    if call is None or call.name == stored.name.removeprefix("functions."):
        return stored
    return replace(stored, name=call.name, arguments=call.arguments, custom=call.custom)


def _read_action(item: WebSearchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    if item.action is None:
        return None
    is_native = "browser" in native_tools
    fields: dict[str, Any] = item.action.model_extra or {}
    url, pattern = fields.get("url"), fields.get("pattern")
    match item.action.type:
        case "search":
            queries: Any = fields.get("queries")
            name, arguments = "search", {"query": fields.get("query") or (queries[0] if queries else None)}
        case "open_page":
            name, arguments = "open", {"id" if is_native else "page": url}
        case "find_in_page" | "find":
            name, arguments = "find", {"pattern": pattern, **({} if is_native else {"page": url})}
    if not all(isinstance(value, str) and value for value in arguments.values()):
        return None
    name = f"browser.{name}" if is_native else _FUNCTION_NAMES[name]
    return ToolResultRecord(item.id or "", name, orjson.dumps(arguments).decode(), _shown_output(item, fields))


def _shown_output(item: WebSearchCallItem, action: Mapping[str, Any]) -> str:
    """Return the part of the model's input that the item shows: results or sources, if the client included them."""
    entries = _object_entries((item.model_extra or {}).get("results"))
    texts = ["\n".join(str(entry[key]) for key in ("title", "url", "text") if entry.get(key)) for entry in entries]
    urls = [str(entry["url"]) for entry in _object_entries(action.get("sources")) if entry.get("url")]
    return "\n\n".join(texts) or (
        "\n".join(["Pages were found, whose text is not known any more:", *urls]) if urls else RESULT_UNAVAILABLE
    )


def _object_entries(value: Any) -> list[Mapping[str, Any]]:
    entries = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], entry) for entry in entries if isinstance(entry, dict)]


def _sum_usage(
    items: Sequence[ResponseFunctionWebSearch], tool_results: Mapping[str, ToolResultRecord]
) -> Mapping[str, ToolUsageWebSearch]:
    searches = sum(item.status == "completed" and item.action.type == "search" for item in items)
    return {"web_search": ToolUsageWebSearch(num_requests=searches)}


WEB_SEARCH: Final = ToolFunctions(_create_tool, _call_from_item, call_for_model=_call_for_model, sum_usage=_sum_usage)
