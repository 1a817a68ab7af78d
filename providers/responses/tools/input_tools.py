"""Tools that come in the input instead of in `tools`: from their item on they are offered, along a chain too."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from apis.errors import StackError
from apis.responses import CreateResponse
from apis.wire.items import Item
from apis.wire.tool_items import AdditionalTools
from apis.wire.tools import CustomTool, FunctionTool, McpTool, NamespaceTool, Tool

_TOOLS_INDEX = re.compile(r"tools\[(\d+)\]")


def collect_additional_tools(items: Sequence[Item]) -> list[Tool]:
    """The tools that items bring. Of two alike the last one stands."""
    found = (tool for item in items if isinstance(item, AdditionalTools) for tool in item.tools)
    return [*{_tool_identity(tool): tool for tool in found}.values()]


def add_typed_tools(request: CreateResponse, additional_tools: Sequence[Tool]) -> CreateResponse:
    """The request with those of the added tools that have items of their own, where it does not declare them itself."""
    own = {_tool_identity(tool) for tool in request.tools or ()}
    typed = [each for each in additional_tools if not isinstance(each, FunctionTool | CustomTool | NamespaceTool)]
    more = [each for each in typed if _tool_identity(each) not in own]
    return request.model_copy(update={"tools": [*(request.tools or ()), *more]}) if more else request


@contextmanager
def attribute_errors_to_input(request: CreateResponse) -> Generator[None]:
    """Names the input in the refusal of a tool that is not among the request's own."""
    try:
        yield
    except StackError as exc:
        place = _TOOLS_INDEX.match(exc.param or "")
        if place is not None and int(place[1]) >= len(request.tools or ()):
            exc.param = "input"
        raise


def _tool_identity(tool: Tool) -> tuple[str, str]:
    name = tool.server_label if isinstance(tool, McpTool) else getattr(tool, "name", "")
    return tool.type, name
