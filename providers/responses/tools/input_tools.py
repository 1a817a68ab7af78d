"""Tools that items of the input add to the request's `tools`, for the rest of the conversation."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from apis.errors import StackError
from apis.responses import CreateResponse
from apis.wire.tool_items import AdditionalTools
from apis.wire.tools import CustomTool, FunctionTool, McpTool, NamespaceTool, Tool
from providers.responses.item_index import ItemIndex

_TOOLS_INDEX = re.compile(r"tools\[(\d+)\]")


def collect_additional_tools(index: ItemIndex) -> list[Tool]:
    """Return the tools that items add. The last of several with one identity replaces the others."""
    tools = (tool for item in index.of(AdditionalTools) for tool in item.tools)
    return [*{_tool_identity(tool): tool for tool in tools}.values()]


def add_typed_tools(request: CreateResponse, additional_tools: Sequence[Tool]) -> CreateResponse:
    """Return the request with the added typed tools that it does not declare itself."""
    declared = {_tool_identity(tool) for tool in request.tools or ()}
    typed = [tool for tool in additional_tools if not isinstance(tool, FunctionTool | CustomTool | NamespaceTool)]
    new = [tool for tool in typed if _tool_identity(tool) not in declared]
    return request.model_copy(update={"tools": [*(request.tools or ()), *new]}) if new else request


@contextmanager
def attribute_errors_to_input(request: CreateResponse) -> Generator[None]:
    """Set `param` to `input` in an error about a tool that the request itself does not declare."""
    try:
        yield
    except StackError as exc:
        match = _TOOLS_INDEX.match(exc.param or "")
        if match is not None and int(match[1]) >= len(request.tools or ()):
            exc.param = "input"
        raise


def _tool_identity(tool: Tool) -> tuple[str, str]:
    name = tool.server_label if isinstance(tool, McpTool) else getattr(tool, "name", "")
    return tool.type, name
