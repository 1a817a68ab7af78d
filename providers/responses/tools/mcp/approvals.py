"""Approval of MCP tool calls: which calls need one, how it is requested, and which were approved."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
from openai.types.responses import ResponseOutputItem
from openai.types.responses.response_output_item import McpApprovalRequest as ApprovalRequestItem

from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from apis.tool_servers import ServerPolicy, ServerTool, matches_filter
from apis.wire.tool_items import McpApprovalRequest, McpApprovalResponse, McpCallItem
from apis.wire.tools import Approvals, McpTool, ToolFilter
from providers.responses.item_index import ItemIndex
from providers.responses.tools.call import ClientCall


def needs_approval(declaration: McpTool, policy: ServerPolicy, tool: ServerTool) -> bool:
    """Return False only where the request exempts the tool from approval, and the operator does not require one."""
    if policy.requires_approval(tool.name):
        return True
    required = declaration.require_approval
    if isinstance(required, Approvals):
        return _is_selected_by(required.always, tool) or not _is_selected_by(required.never, tool)
    return required != "never"


def server_fingerprint(declaration: McpTool) -> str:
    """Return a hash of the declared server, without its label and its credentials, which may change."""
    fields = (declaration.server_url, declaration.connector_id)
    return hashlib.sha256(orjson.dumps(fields)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that the request approves. `was_started` means that it was started before and has no known outcome."""

    request: McpApprovalRequest
    was_started: bool


def find_approved_calls(request: CreateResponse, items: ItemIndex) -> Sequence[ApprovedCall]:
    """Return the calls that the request's input approves and that have no outcome yet. `items` are those of the whole
    conversation in their order. Raises InvalidRequest for an approval of an unknown request or an undeclared server,
    for one of a call to another server than is declared now under its label, and for one that contradicts an earlier
    approval."""
    if not items.has(McpApprovalResponse) or not isinstance(request.input, list):
        return ()
    input_indexes = {id(item): index for index, item in enumerate(request.input) if type(item) is McpApprovalResponse}
    if not input_indexes:
        return ()
    approval_requests = {item.id: item for item in items.of(McpApprovalRequest)}
    decisions: dict[str, bool] = {}
    calls: dict[str, McpCallItem] = {}
    open_approvals: dict[str, int] = {}
    for position in items.positions(McpApprovalResponse, McpCallItem):
        item = items.items[position]
        if isinstance(item, McpApprovalResponse):
            request_id, index = item.approval_request_id, input_indexes.get(id(item))
            if index is not None and request_id not in approval_requests:
                raise _invalid_approval(index, f"No approval request has the id '{request_id[:256]}'.")
            if index is not None and decisions.get(request_id, item.approve) != item.approve:
                earlier = "approved" if decisions[request_id] else "refused"
                raise _invalid_approval(index, f"The approval request '{request_id[:256]}' was {earlier} before.")
            decisions[request_id] = item.approve
            if index is not None and item.approve:
                open_approvals[request_id] = index
        elif isinstance(item, McpCallItem) and item.approval_request_id is not None:
            calls[item.approval_request_id] = item
            open_approvals.pop(item.approval_request_id, None)
    unfinished = {key: index for key, index in open_approvals.items() if not _has_outcome(calls.get(key))}
    servers = {tool.server_label: server_fingerprint(tool) for tool in request.tools or () if isinstance(tool, McpTool)}
    for request_id, index in unfinished.items():
        _check_server(approval_requests[request_id], servers, index)
    return [ApprovedCall(approval_requests[request_id], request_id in calls) for request_id in unfinished]


def _check_server(approval_request: McpApprovalRequest, servers: Mapping[str, str], index: int) -> None:
    """Raise InvalidRequest unless the request declares the server of the approved call; `servers` are the fingerprints
    of the declared servers by label."""
    label = approval_request.server_label
    if label not in servers:
        raise _invalid_approval(
            index, f"The approved call is one of the MCP server '{label[:64]}', which is not declared."
        )
    # a client may drop the field, which it does not know: then it vouches for the server that it declares
    if (approval_request.model_extra or {}).get("server", servers[label]) != servers[label]:
        raise _invalid_approval(
            index, f"The call was approved for another MCP server than is declared as '{label[:64]}' now."
        )


def _has_outcome(call: McpCallItem | None) -> bool:
    """Return False for an interrupted call, which may have taken effect."""
    return call is not None and (call.output is not None or call.error is not None)


def _invalid_approval(index: int, reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param=f"input[{index}].approval_request_id", code="invalid_value")


class ApprovalRequestCall(ClientCall):
    """A call that waits for the client's approval."""

    item_type = "mcp_approval_request"

    def __init__(self, start: ToolCallStart, declaration: McpTool, tool_name: str) -> None:
        super().__init__(start)
        self._server_label = declaration.server_label
        self._server_fingerprint = server_fingerprint(declaration)
        self._tool_name = tool_name

    def validate_arguments(self) -> None:
        self.parse_arguments()
        if not self.text.strip():
            self._argument_text.append("{}")
        self.record_result("")  # stores the name and the arguments as the model wrote them, for later turns

    def item(self, status: str) -> ResponseOutputItem:
        return ApprovalRequestItem(
            id=self.id,
            type="mcp_approval_request",
            server_label=self._server_label,
            name=self._tool_name,
            arguments=self.text,
            status=status,  # pyright: ignore[reportCallIssue]  # extra: Open Responses wants one on every item
            server=self._server_fingerprint,  # pyright: ignore[reportCallIssue]  # extra: binds the approval to it
        )


def _is_selected_by(tool_filter: ToolFilter | None, tool: ServerTool) -> bool:
    """Return False for an empty filter, which would exempt every tool from approval."""
    return (
        tool_filter is not None
        and (tool_filter.tool_names, tool_filter.read_only) != (None, None)
        and matches_filter(tool_filter, tool)
    )
