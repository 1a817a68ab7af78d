"""The hosted web search: `web_search` in all its spellings, run by the stack's ToolRuntime.

A ToolRuntime with `search` alone gives searches; one that also has `open_page` lets the model read pages and find text
in them. A model with a `browser` of its own is given that, where all three of its actions can be done.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.chat import NativeTool, Tool
from apis.deltas import ToolCallStart
from apis.tool_runtime import ToolRuntime
from apis.wire.tools import CustomTool, FunctionTool, WebSearchTool
from providers.responses.tools.call import HostedCall, TypedTool
from providers.responses.tools.tool_context import Setting
from providers.responses.tools.web_search import functions as browsing
from providers.responses.tools.web_search import native as browser
from providers.responses.tools.web_search.call import Web
from providers.responses.tools.web_search.pages import Pages

NAME: Final = browsing.SEARCH
_CALLS: Final = {**browsing.CALLS, **browser.CALLS}
_VIEW_CHARS: Final[Mapping[str, int]] = {"low": 3000, "medium": 6000, "high": 12_000}


def make_web_search(declared: WebSearchTool, setting: Setting) -> TypedTool | None:
    """The search of a request, where a search provider is configured."""
    if setting.runtime is None or setting.spec("search") is None:
        if declared.external_web_access is False:
            return None  # agents declare this one always, and expect little of it
        raise setting.missing(
            "No web search is configured: give the run config's `tool_runtime` a search provider and its key."
        )
    return WebSearch(declared, setting, setting.runtime)


class WebSearch(TypedTool):
    """The search as one request declared it."""

    def __init__(self, declared: WebSearchTool, setting: Setting, runtime: ToolRuntime) -> None:
        filters = declared.filters
        options: dict[str, Any] = {
            "allowed_domains": filters.allowed_domains if filters else None,
            "blocked_domains": filters.blocked_domains if filters else None,
            "context_size": declared.search_context_size,
            "user_location": declared.user_location.model_dump(exclude_none=True) if declared.user_location else None,
        }
        live = declared.external_web_access is not False
        if not live:
            options["live"] = False
        self._web = Web(
            runtime,
            setting.tenant,
            {name: value for name, value in options.items() if value is not None},
            Pages(told for told in setting.told.values() if told.name.removeprefix("functions.") in _CALLS),
            _VIEW_CHARS[declared.search_context_size or "medium"],
            setting.includes("web_search_call.action.sources"),
            setting.includes("web_search_call.results"),
        )
        specs = {spec.name: spec for spec in runtime.tools()}
        opens = live and "open_page" in specs
        if opens and "browser" in setting.native:
            self._offered: list[Tool] = [NativeTool(type="browser")]
            return
        self._offered = [browsing.search_function(specs["search"])]
        taken = {
            tool.name for tool in setting.request.tools or () if isinstance(tool, FunctionTool | CustomTool)
        } & browsing.CALLS.keys()
        if opens and not taken:  # a client's function of the same name is what its prompts mean
            self._offered += browsing.page_functions()

    @property
    def offered(self) -> Sequence[Tool]:
        return self._offered

    def begin(self, start: ToolCallStart) -> HostedCall:
        return _CALLS[start.name.removeprefix("functions.")](self._web, start)
