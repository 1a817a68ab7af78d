"""The hosted calls of an MCP server: the list of its tools, and the call of one tool."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, cast

from openai.types.responses.mcp_tool_call_error import McpProtocolError, McpToolCallError
from openai.types.responses.response_output_item import McpCall, McpListTools, McpListToolsTool

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.tool_servers import ServerTool, ToolServerFailed
from apis.wire.item_types import UNKNOWN_OUTCOME_CODE
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.call import Emit, HostedCall

_LIST_TOOLS_NAME: Final = "mcp_list_tools"
_INTERRUPTED_MESSAGE: Final = (
    "Not made again: this call was begun before and broken off. Nobody knows whether it did what it was to do, nor "
    "with what result."
)
McpCallStatus = Literal["in_progress", "completed", "incomplete", "calling", "failed"]


class McpServer(Protocol):
    """The part of a declared server that its calls use."""

    label: str
    declaration_hash: str
    """Equal for declarations with one tool list; stored with the list, which is then not requested again."""

    async def list_tools(self) -> Sequence[ServerTool]: ...

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str: ...


class McpListToolsCall(HostedCall):
    """Lists a server's tools. The item of a failed list holds the error, and the response continues without them."""

    item_type = "mcp_list_tools"
    counts_toward_limit = False

    def __init__(self, server: McpServer) -> None:
        super().__init__(ToolCallStart(_LIST_TOOLS_NAME, _LIST_TOOLS_NAME))
        self._server = server
        self._tools: Sequence[ServerTool] = ()
        self._error: str | None = None

    def item(self, status: str) -> McpListTools:
        item = McpListTools(
            id=self.id,
            type="mcp_list_tools",
            server_label=self._server.label,
            tools=[
                McpListToolsTool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.input_schema,
                    annotations=tool.annotations,
                )
                for tool in self._tools
            ],
            status=status,  # pyright: ignore[reportCallIssue]  # extra: Open Responses wants one on every item
            declaration=self._server.declaration_hash,  # pyright: ignore[reportCallIssue]  # extra: see McpServer
        )
        if self._error is not None:  # the schemas of some clients allow no null
            item.error = self._error
        return item

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        self._tools = await self._server.list_tools()

    def fail(self, error: ToolFailed) -> EventList:
        self._error = error.message
        return self.close("failed")

    def close(self, status: str) -> EventList:
        if status != "completed":
            self._error = self._error or "The response ended before the tools were listed."
        return super().close(status)


class McpToolCall(HostedCall):
    """Calls a tool. `approval` holds the arguments and the approval request's id of a call that needed approval."""

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
        self._error: McpToolCallError | None = None

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
            error=self._error,
        )

    def open(self) -> EventList:
        events = super().open()
        if self._approval:
            self.append(self._approval[0], events)
        return events

    def append(self, text: str, events: EventList) -> None:
        super().append(text, events)
        events.append(self.text_event("delta", delta=text))

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        await emit(self._finish_arguments())
        result = await self._server.call_tool(self._tool_name, self.parse_arguments())
        self._output = output.truncate_text(result)
        self.record_result(self._output)

    def fail(self, error: ToolFailed) -> EventList:
        self._error = error.error if isinstance(error, ToolServerFailed) else _protocol_error(error.message)
        return super().fail(error)

    def close(self, status: str) -> EventList:
        events = [] if self._are_arguments_done else self._finish_arguments(are_complete=status != "incomplete")
        if status == "failed":
            self._error = self._error or _protocol_error("Not made: the answer that asked for it was cut off.")
        return [*events, *super().close(status)]

    def _finish_arguments(self, *, are_complete: bool = True) -> EventList:
        """End the arguments. A model that wrote none means an empty object."""
        self._are_arguments_done = True
        events: EventList = []
        if are_complete and not self.text.strip():
            self.append("{}", events)
        return [*events, self.text_event("done", arguments=self.text)]


class InterruptedMcpCall(McpToolCall):
    """An approved call that was started before and interrupted. It fails without being repeated, because it may have
    taken effect."""

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        await emit(self._finish_arguments())
        raise ToolFailed(_INTERRUPTED_MESSAGE)


def _protocol_error(message: str) -> McpProtocolError:
    return McpProtocolError(type="mcp_protocol_error", code=UNKNOWN_OUTCOME_CODE, message=message)
