"""Calls of an MCP server that end before their end: what is open is closed by the laws of the stream."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from apis.deltas import ToolCallStart
from apis.events import EventList
from apis.tool_servers import ServerTool
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.call import HostedCall
from providers.responses.tools.mcp.calls import McpListToolsCall, McpToolCall
from tests.support.models.recorded_turns import check_laws

Ending = Literal["incomplete", "failed"]


class Silent:
    """A server that is never asked."""

    label = "a"
    declaration_hash = "d"

    async def list_tools(self) -> Sequence[ServerTool]:
        raise NotImplementedError

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise NotImplementedError


def ended(call: HostedCall, pieces: Sequence[str], status: Ending) -> tuple[EventList, ResponseOutput]:
    output = ResponseOutput(ResponseIds())
    events = call.place(output)
    for piece in pieces:
        call.append(piece, events)
    events += call.close(status)
    output.items[call.index] = call.item(status)
    return events, output


@pytest.mark.parametrize("status", ["incomplete", "failed"])
def test_an_interrupted_list_has_failed(status: Ending) -> None:
    events, output = ended(McpListToolsCall(Silent()), [], status)
    assert [event.type.removeprefix("response.") for event in events[1:]] == [
        "mcp_list_tools.in_progress",
        "mcp_list_tools.failed",
        "output_item.done",
    ]
    item: Any = output.finished_items()[0]
    assert item.error
    check_laws(events, output, "failed")


@pytest.mark.parametrize("pieces", [[], ['{"a"', ": 1"]])
@pytest.mark.parametrize("status", ["incomplete", "failed"])
def test_an_interrupted_call_has_the_arguments_written_so_far(status: Ending, pieces: list[str]) -> None:
    events, output = ended(McpToolCall(Silent(), "t", ToolCallStart("c1", "a__t")), pieces, status)
    item: Any = output.finished_items()[0]
    nothing = "{}" if status == "failed" else ""
    assert (item.status, item.arguments, item.output) == (status, "".join(pieces) or nothing, None)
    assert (item.error is not None) == (status == "failed")
    check_laws(events, output, status)
