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


def is_allowed(declared: McpTool, tool: Mapping[str, Any]) -> bool:
    """Whether `allowed_tools` has the tool among them."""
    allowed = declared.allowed_tools
    return allowed is None or _matches(ToolFilter(tool_names=allowed) if isinstance(allowed, list) else allowed, tool)


def needs_approval(declared: McpTool, tool: Mapping[str, Any]) -> bool:
    """Whether a call must be approved first. It must, unless the request says otherwise."""
    required = declared.require_approval
    if isinstance(required, Approvals):
        if _is_named_by(required.always, tool):
            return True
        return not _is_named_by(required.never, tool)
    return required != "never"


@dataclass(frozen=True, slots=True)
class Approved:
    """A call that the request approves. `begun` says that it was before, and that nobody knows what became of it."""

    request: McpApprovalRequest
    begun: bool


def approved_requests(request: CreateResponse, items: Sequence[Item]) -> Sequence[Approved]:
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
                raise _wrong(index, f"No approval request has the id '{identity[:256]}'.")
            if index is not None and answers.get(identity, item.approve) != item.approve:
                before = "approved" if answers[identity] else "refused"
                raise _wrong(index, f"The approval request '{identity[:256]}' was {before} before.")
            answers[identity] = item.approve
            if index is not None and item.approve:
                open_[identity] = index
        elif isinstance(item, McpCallItem) and item.approval_request_id is not None:
            calls[item.approval_request_id] = item
            open_.pop(item.approval_request_id, None)
    for identity, index in open_.items():
        if asked[identity].server_label not in labels and not _has_ended(calls.get(identity)):
            label = asked[identity].server_label[:64]
            raise _wrong(index, f"The approved call is one of the MCP server '{label}', which is not declared.")
    return [Approved(asked[each], each in calls) for each in open_ if not _has_ended(calls.get(each))]


def _has_ended(call: McpCallItem | None) -> bool:
    """Whether it is known what became of it. One that was broken off may have done what it does."""
    return call is not None and (call.output is not None or call.error is not None)


def _wrong(index: int, why: str) -> InvalidRequest:
    return InvalidRequest(why, param=f"input[{index}].approval_request_id", code="invalid_value")


class ApprovalRequest(ClientCall):
    """A call that the client is to approve."""

    prefix = "mcpr"

    def __init__(self, start: ToolCallStart, label: str, tool: str) -> None:
        super().__init__(start)
        self._label = label
        self._tool = tool

    def take(self) -> None:
        self.arguments()
        self._pieces = self._pieces if self.text else ["{}"]
        self.tell("")  # the name and the arguments as they were written, for later turns

    def item(self, status: str) -> ResponseOutputItem:
        return ApprovalRequestItem(
            id=self.id,
            type="mcp_approval_request",
            server_label=self._label,
            name=self._tool,
            arguments=self.text,
            status=status,  # pyright: ignore[reportCallIssue]  # extra: Open Responses wants one on every item
        )


def _is_named_by(among: ToolFilter | None, tool: Mapping[str, Any]) -> bool:
    """Here an empty filter names nothing: it would lift the approval of all."""
    return among is not None and (among.tool_names, among.read_only) != (None, None) and _matches(among, tool)


def _matches(among: ToolFilter, tool: Mapping[str, Any]) -> bool:
    notes: Any = tool.get("annotations")  # a client may have sent anything
    read_only = isinstance(notes, dict) and cast(Mapping[str, Any], notes).get("readOnlyHint") is True
    return (among.tool_names is None or tool["name"] in among.tool_names) and (
        among.read_only is None or among.read_only == read_only
    )
