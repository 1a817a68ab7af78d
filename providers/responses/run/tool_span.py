"""tool_span: the `execute_tool` span of one hosted call."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from apis.telemetry import NO_SPAN, AttributeValue, Span, SpanType, current_agent, open_span, telemetry
from providers.responses.tools.call import HostedCall

_LIST_TOOLS_TYPE: Final = "mcp_list_tools"
_MAX_DESCRIPTION_CHARS: Final = 1024
"""Length at which the description of a tool is cut: that of an MCP tool is its server's text."""
_DATASTORE_TYPES: Final = frozenset({"file_search_call"})


@contextmanager
def tool_span(call: HostedCall) -> Generator[Span]:
    """Open the span of a hosted call, current within the context. The listing of an MCP server's tools is no tool."""
    if call.item_type == _LIST_TOOLS_TYPE or not telemetry().is_on:
        yield NO_SPAN
        return
    name = call.name or call.item_type
    if (calls := current_agent()) is not None:
        calls.tool_calls += 1
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "datastore" if call.item_type in _DATASTORE_TYPES else "extension",
    }
    if call.tool is not None and (description := call.tool.find_description(call.name)):
        attributes["gen_ai.tool.description"] = description[:_MAX_DESCRIPTION_CHARS]
    if call.call_id:
        attributes["gen_ai.tool.call.id"] = call.call_id
    with open_span(SpanType.EXECUTE_TOOL, name, attributes) as span:
        yield span
        result = call.tool_result.output if call.tool_result is not None else None
        span.set(telemetry().describe_tool(call.text, result))
