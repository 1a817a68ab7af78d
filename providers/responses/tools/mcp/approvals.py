"""Leave to call a tool of an MCP server: which calls need it, how it is asked for, and which were given it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from openai.types.responses import ResponseOutputItem
from openai.types.responses.response_output_item import McpApprovalRequest as ApprovalRequestItem

from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from apis.wire.items import Item
from apis.wire.tool_items import McpApprovalRequest, McpApprovalResponse, McpCallItem
from apis.wire.tools import Approvals, McpTool, ToolFilter
from providers.responses.tools.call import ClientCall


def is_allowed(declaration: McpTool, tool: Mapping[str, Any]) -> bool:
    """Whether `allowed_tools` has the tool among them."""
    allowed = declaration.allowed_tools
    return allowed is None or _matches_filter(
        ToolFilter(tool_names=allowed) if isinstance(allowed, list) else allowed, tool
    )


def needs_approval(declaration: McpTool, tool: Mapping[str, Any]) -> bool:
    """Whether a call must be approved first. It must, unless the request says otherwise."""
    required = declaration.require_approval
    if isinstance(required, Approvals):
        if _is_selected_by(required.always, tool):
            return True
        return not _is_selected_by(required.never, tool)
    return required != "never"


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that the request approves. `begun` says that it was before, and that nobody knows what became of it."""

    request: McpApprovalRequest
    was_started: bool


def find_approved_calls(request: CreateResponse, items: Sequence[Item]) -> Sequence[ApprovedCall]:
    """The calls that the request's input approves and that have no outcome yet; `items` are the whole conversation, in
    their order. Raises InvalidRequest for an answer that cannot be acted on, or that an earlier one contradicts."""
    given = request.input if isinstance(request.input, list) else []
    places = {id(item): index for index, item in enumerate(given) if isinstance(item, McpApprovalResponse)}
    if not places:
        return ()
    asked = {item.id: item for item in items if isinstance(item, McpApprovalRequest)}
    labels = {tool.server_label for tool in request.tools or () if isinstance(tool, McpTool)}
    answers: dict[str, bool] = {}
    calls: dict[str, McpCallItem] = {}
    open_: dict[str, int] = {}
    for item in items:
        if isinstance(item, McpApprovalResponse):
            identity, index = item.approval_request_id, places.get(id(item))
            if index is not None and identity not in asked:
                raise _invalid_approval(index, f"No approval request has the id '{identity[:256]}'.")
            if index is not None and answers.get(identity, item.approve) != item.approve:
                before = "approved" if answers[identity] else "refused"
                raise _invalid_approval(index, f"The approval request '{identity[:256]}' was {before} before.")
            answers[identity] = item.approve
            if index is not None and item.approve:
                open_[identity] = index
        elif isinstance(item, McpCallItem) and item.approval_request_id is not None:
            calls[item.approval_request_id] = item
            open_.pop(item.approval_request_id, None)
    for identity, index in open_.items():
        if asked[identity].server_label not in labels and not _has_ended(calls.get(identity)):
            label = asked[identity].server_label[:64]
            raise _invalid_approval(
                index, f"The approved call is one of the MCP server '{label}', which is not declared."
            )
    return [ApprovedCall(asked[each], each in calls) for each in open_ if not _has_ended(calls.get(each))]


def _has_ended(call: McpCallItem | None) -> bool:
    """Whether it is known what became of it. One that was broken off may have done what it does."""
    return call is not None and (call.output is not None or call.error is not None)


def _invalid_approval(index: int, reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param=f"input[{index}].approval_request_id", code="invalid_value")


class ApprovalRequestCall(ClientCall):
    """A call that the client is to approve."""

    item_type = "mcp_approval_request"

    def __init__(self, start: ToolCallStart, server_label: str, tool_name: str) -> None:
        super().__init__(start)
        self._server_label = server_label
        self._tool_name = tool_name

    def validate_arguments(self) -> None:
        self.parse_arguments()
        self._argument_chunks = self._argument_chunks if self.text else ["{}"]
        self.record_result("")  # the name and the arguments as they were written, for later turns

    def item(self, status: str) -> ResponseOutputItem:
        return ApprovalRequestItem(
            id=self.id,
            type="mcp_approval_request",
            server_label=self._server_label,
            name=self._tool_name,
            arguments=self.text,
            status=status,  # pyright: ignore[reportCallIssue]  # extra: Open Responses wants one on every item
        )


def _is_selected_by(tool_filter: ToolFilter | None, tool: Mapping[str, Any]) -> bool:
    """Here an empty filter names nothing: it would lift the approval of all."""
    return (
        tool_filter is not None
        and (tool_filter.tool_names, tool_filter.read_only) != (None, None)
        and _matches_filter(tool_filter, tool)
    )


def _matches_filter(tool_filter: ToolFilter, tool: Mapping[str, Any]) -> bool:
    notes: Any = tool.get("annotations")  # a client may have sent anything
    read_only = isinstance(notes, dict) and cast(Mapping[str, Any], notes).get("readOnlyHint") is True
    return (tool_filter.tool_names is None or tool["name"] in tool_filter.tool_names) and (
        tool_filter.read_only is None or tool_filter.read_only == read_only
    )
