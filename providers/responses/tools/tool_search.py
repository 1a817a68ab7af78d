"""`tool_search`: the model looks for tools that were not offered to it yet, and the client answers with them."""

from typing import Any, Final

from openai.types.responses import ResponseToolSearchCall
from pydantic import ConfigDict

from apis.chat import Function
from apis.wire.tools import ToolSearchTool
from providers.responses.tools.call import TypedTool
from providers.responses.tools.client import Arguments, ClientTool, FunctionOfClient
from providers.responses.tools.schemas import check_parameters
from providers.responses.tools.tool_context import Setting

NAME: Final = "tool_search"
_DESCRIPTION: Final = "Searches for further tools. Those that it finds can be called from then on."
_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should be able to do."}},
    "required": ["query"],
}


class _Wanted(Arguments):
    model_config = ConfigDict(extra="allow", frozen=True)


def make_tool_search(declared: ToolSearchTool, setting: Setting) -> TypedTool | None:
    """The client's search; None where the server is to search, for then all tools are offered at once."""
    if declared.execution != "client":
        return None
    if declared.parameters is not None:
        check_parameters([(f"{setting.param}.parameters", NAME, declared.parameters, False)])
    offered = Function(
        name=NAME, description=declared.description or _DESCRIPTION, parameters=declared.parameters or _PARAMETERS
    )
    return ClientTool(offered, "tsc", _Wanted, _item)


def _item(call: FunctionOfClient[Any], given: _Wanted, status: str) -> ResponseToolSearchCall:
    return ResponseToolSearchCall.model_validate(
        {
            "id": call.id,
            "type": "tool_search_call",
            "call_id": call.call_id,
            "execution": "client",
            "arguments": given.model_dump(),
            "status": status,
        }
    )
