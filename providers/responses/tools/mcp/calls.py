"""The calls that an MCP server gets: one for the list of its tools, and one for each use of a tool."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, cast

from openai.types.responses import (
    ResponseMcpCallArgumentsDeltaEvent,
    ResponseMcpCallArgumentsDoneEvent,
    ResponseMcpCallCompletedEvent,
    ResponseMcpCallFailedEvent,
    ResponseMcpCallInProgressEvent,
    ResponseMcpListToolsCompletedEvent,
    ResponseMcpListToolsFailedEvent,
    ResponseMcpListToolsInProgressEvent,
)
from openai.types.responses.response_output_item import McpCall, McpListTools, McpListToolsTool

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.tool_runtime import ToolCall
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.call import HostedCall

MCP_LIST_TOOLS: Final = "mcp_list_tools"
MCP_CALL: Final = "mcp_call"
MCP_CHECK_SERVER: Final = "mcp_check_server"
_NOT_EXECUTED_CODE: Final = -32000
"""JSON-RPC leaves these codes to the implementation: the call was never made, or its outcome was not waited for."""
_INTERRUPTED_MESSAGE: Final = (
    "Not made again: this call was begun before and broken off. Nobody knows whether it did what it was to do, nor "
    "with what result."
)
McpCallStatus = Literal["in_progress", "completed", "incomplete", "calling", "failed"]


class McpServer(Protocol):
    """What the calls of a server need of it."""

    label: str
    declaration_hash: str
    """Of all that decides which tools the server is asked for: equal where a list need not be asked for again."""

    async def list_tools(self, call: ToolCall) -> Sequence[Mapping[str, Any]]: ...

    async def call_tool(self, call: ToolCall) -> str: ...


class McpListToolsCall(HostedCall):
    """Asks a server for its tools. Where that fails the item says so, and the response goes on without them."""

    item_type = "mcp_list_tools"
    counts_toward_limit = False

    def __init__(self, server: McpServer) -> None:
        super().__init__(ToolCallStart(MCP_LIST_TOOLS, MCP_LIST_TOOLS))
        self._server = server
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._error: str | None = None

    def item(self, status: str) -> McpListTools:
        item = McpListTools(
            id=self.id,
            type="mcp_list_tools",
            server_label=self._server.label,
            tools=[McpListToolsTool.model_validate(tool) for tool in self._tools],
            status=status,  # pyright: ignore[reportCallIssue]  # extra: Open Responses wants one on every item
            declaration=self._server.declaration_hash,  # pyright: ignore[reportCallIssue]  # extra: see McpServer
        )
        if self._error is not None:  # a null, some clients' schemas do not know
            item.error = self._error
        return item

    def open(self) -> EventList:
        begun = ResponseMcpListToolsInProgressEvent(
            type="response.mcp_list_tools.in_progress", item_id=self.id, output_index=self.index, sequence_number=0
        )
        return [*super().open(), begun]

    async def run(self, output: ResponseOutput) -> AsyncGenerator[EventList]:
        self._tools = await self._server.list_tools(ToolCall(self.call_id, MCP_LIST_TOOLS, {}))
        yield self.close("completed")

    def fail(self, error: ToolFailed) -> EventList:
        self._error = error.message
        return self.close("failed")

    def close(self, status: str) -> EventList:
        if status == "completed":
            ended = ResponseMcpListToolsCompletedEvent(
                type="response.mcp_list_tools.completed", item_id=self.id, output_index=self.index, sequence_number=0
            )
        else:
            self._error = self._error or "The response ended before the tools were listed."
            ended = ResponseMcpListToolsFailedEvent(
                type="response.mcp_list_tools.failed", item_id=self.id, output_index=self.index, sequence_number=0
            )
        return [ended, *super().close(status)]


class McpToolCall(HostedCall):
    """Calls a tool. `approved` are the arguments, and the id of the approval request, of a call that had to wait."""

    item_type = "mcp_call"

    def __init__(
        self, server: McpServer, tool_name: str, start: ToolCallStart, approval: tuple[str, str] | None = None
    ) -> None:
        super().__init__(start)
        self._server = server
        self._tool_name = tool_name
        self._approval = approval
        self._are_arguments_done = False
        self._output: str | None = None
        self._error: dict[str, Any] | None = None

    def item(self, status: str) -> McpCall:
        return McpCall(
            id=self.id,
            type="mcp_call",
            status=cast(McpCallStatus, status),
            server_label=self._server.label,
            name=self._tool_name,
            arguments=self.text,
            approval_request_id=self._approval[1] if self._approval else None,
            output=self._output,
            error=self._error,  # pyright: ignore[reportArgumentType]  # validated from the dict
        )

    def open(self) -> EventList:
        begun = ResponseMcpCallInProgressEvent(
            type="response.mcp_call.in_progress", item_id=self.id, output_index=self.index, sequence_number=0
        )
        events = [*super().open(), begun]
        if self._approval:
            self.append(self._approval[0], events)
        return events

    def append(self, text: str, events: EventList) -> None:
        super().append(text, events)
        events.append(
            ResponseMcpCallArgumentsDeltaEvent(
                type="response.mcp_call_arguments.delta",
                item_id=self.id,
                output_index=self.index,
                delta=text,
                sequence_number=0,
            )
        )

    async def run(self, output: ResponseOutput) -> AsyncGenerator[EventList]:
        yield self._finish_arguments()
        arguments = {"name": self._tool_name, "arguments": self.parse_arguments()}
        self._output = output.truncate_text(await self._server.call_tool(ToolCall(self.call_id, MCP_CALL, arguments)))
        self.record_result(self._output)
        yield self.close("completed")

    def fail(self, error: ToolFailed) -> EventList:
        self._error = error.detail or _protocol_error(error.message)
        return super().fail(error)

    def close(self, status: str) -> EventList:
        events = [] if self._are_arguments_done else self._finish_arguments(are_complete=status != "incomplete")
        if status == "completed":
            events.append(
                ResponseMcpCallCompletedEvent(
                    type="response.mcp_call.completed", item_id=self.id, output_index=self.index, sequence_number=0
                )
            )
        elif status == "failed":
            self._error = self._error or _protocol_error("Not made: the answer that asked for it was cut off.")
            events.append(
                ResponseMcpCallFailedEvent(
                    type="response.mcp_call.failed", item_id=self.id, output_index=self.index, sequence_number=0
                )
            )
        return [*events, *super().close(status)]

    def _finish_arguments(self, *, are_complete: bool = True) -> EventList:
        """No more arguments come. A model that has written none means an empty object."""
        self._are_arguments_done = True
        events: EventList = []
        if are_complete and not self.text:
            self.append("{}", events)
        return [
            *events,
            ResponseMcpCallArgumentsDoneEvent(
                type="response.mcp_call_arguments.done",
                item_id=self.id,
                output_index=self.index,
                arguments=self.text,
                sequence_number=0,
            ),
        ]


class InterruptedMcpCall(McpToolCall):
    """One that was approved and begun before, and broken off: it is not made again, for it may have done what it does.
    The client and the model are told so."""

    async def run(self, output: ResponseOutput) -> AsyncGenerator[EventList]:
        yield self._finish_arguments()
        raise ToolFailed(_INTERRUPTED_MESSAGE)


def _protocol_error(message: str) -> dict[str, Any]:
    return {"type": "mcp_protocol_error", "code": _NOT_EXECUTED_CODE, "message": message}
