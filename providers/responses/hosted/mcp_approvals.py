"""Leave to call a tool of an MCP server: which calls need it, how it is asked for, and which were given it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from openai.types.responses import ResponseOutputItem
from openai.types.responses.response_output_item import McpApprovalRequest as ApprovalRequestItem

from apis.errors import InvalidRequest
from apis.inference import ToolCallStart
from apis.items import Item
from apis.responses import CreateResponse
from apis.tool_items import McpApprovalRequest, McpApprovalResponse, McpCallItem
from apis.tools import Approvals, McpTool, ToolFilter
from providers.responses.hosted.call import ClientCall


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


def approved_requests(request: CreateResponse, items: Sequence[Item]) -> Sequence[McpApprovalRequest]:
    """The calls that the request's input approves and that were not made yet; `items` are the whole conversation. One
    that is refused and approved at once is refused. Raises InvalidRequest for an approval that cannot be acted on."""
    given = request.input if isinstance(request.input, list) else []
    if not any(isinstance(item, McpApprovalResponse) for item in given):
        return ()
    asked = {item.id: item for item in items if isinstance(item, McpApprovalRequest)}
    made = {item.approval_request_id for item in items if isinstance(item, McpCallItem)}
    labels = {tool.server_label for tool in request.tools or () if isinstance(tool, McpTool)}
    approved: dict[str, bool] = {}
    for index, item in enumerate(given):
        if not isinstance(item, McpApprovalResponse) or item.approval_request_id in made:
            continue
        call = asked.get(item.approval_request_id)
        why = None
        if call is None:
            why = f"No approval request has the id '{item.approval_request_id[:256]}'."
        elif item.approve and call.server_label not in labels:
            why = f"The approved call is one of the MCP server '{call.server_label[:64]}', which is not declared."
        if why is not None:
            raise InvalidRequest(why, param=f"input[{index}].approval_request_id", code="invalid_value")
        approved[item.approval_request_id] = item.approve and approved.get(item.approval_request_id, True)
    return [asked[identity] for identity, approve in approved.items() if approve]


class ApprovalRequest(ClientCall):
    """A call that the client is to approve."""

    prefix = "mcpr"

    def __init__(self, start: ToolCallStart, label: str, tool: str) -> None:
        super().__init__(start)
        self._label = label
        self._tool = tool

    def take(self) -> None:
        self.arguments()
        self.tell("")  # the name and the arguments as they were written, for later turns

    def item(self, status: str) -> ResponseOutputItem:
        return ApprovalRequestItem(
            id=self.id,
            type="mcp_approval_request",
            server_label=self._label,
            name=self._tool,
            arguments=self.text or "{}",
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
