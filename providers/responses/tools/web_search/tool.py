"""The hosted web search: `web_search` in all its spellings, run by the stack's ToolRuntime.

A ToolRuntime with `search` alone gives searches; one that also has `open_page` lets the model read pages and find text
in them. A model with a `browser` of its own is given that, where all three of its actions can be done.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.chat import ChatTool, NativeTool
from apis.deltas import ToolCallStart
from apis.tool_runtime import ToolRuntime
from apis.wire.tools import CustomTool, FunctionTool, WebSearchTool
from providers.responses.tools.call import HostedCall, TypedTool
from providers.responses.tools.tool_context import ToolContext
from providers.responses.tools.web_search import functions as browsing
from providers.responses.tools.web_search import native as browser
from providers.responses.tools.web_search.call import WebAccess
from providers.responses.tools.web_search.pages import PageHistory

WEB_SEARCH_NAME: Final = browsing.WEB_SEARCH_FUNCTION
_CALLS_BY_NAME: Final = {**browsing.FUNCTION_CALLS, **browser.NATIVE_BROWSER_CALLS}
_VIEW_CHARS: Final[Mapping[str, int]] = {"low": 3000, "medium": 6000, "high": 12_000}


def make_web_search(declaration: WebSearchTool, context: ToolContext) -> TypedTool | None:
    """The search of a request, where a search provider is configured."""
    if context.runtime is None or context.find_spec("search") is None:
        if declaration.external_web_access is False:
            return None  # agents declare this one always, and expect little of it
        raise context.not_configured_error(
            "No web search is configured: give the run config's `tool_runtime` a search provider and its key."
        )
    return WebSearch(declaration, context, context.runtime)


class WebSearch(TypedTool):
    """The search as one request declared it."""

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
        live = declaration.external_web_access is not False
        if not live:
            options["live"] = False
        self._web = WebAccess(
            runtime,
            context.tenant,
            {name: value for name, value in options.items() if value is not None},
            PageHistory(
                told for told in context.tool_results.values() if told.name.removeprefix("functions.") in _CALLS_BY_NAME
            ),
            _VIEW_CHARS[declaration.search_context_size or "medium"],
            context.includes("web_search_call.action.sources"),
            context.includes("web_search_call.results"),
        )
        specs = {spec.name: spec for spec in runtime.tools()}
        opens = live and "open_page" in specs
        if opens and "browser" in context.native_tools:
            self._offered_tools: list[ChatTool] = [NativeTool(type="browser")]
            return
        self._offered_tools = [browsing.build_search_function(specs["search"])]
        taken = {
            tool.name for tool in context.request.tools or () if isinstance(tool, FunctionTool | CustomTool)
        } & browsing.FUNCTION_CALLS.keys()
        if opens and not taken:  # a client's function of the same name is what its prompts mean
            self._offered_tools += browsing.build_page_functions()

    @property
    def offered_tools(self) -> Sequence[ChatTool]:
        return self._offered_tools

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return _CALLS_BY_NAME[start.name.removeprefix("functions.")](self._web, start)
