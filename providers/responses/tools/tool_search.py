"""`tool_search`: the model looks for tools that were not offered to it yet, and the client answers with them."""

from typing import Any, Final

from openai.types.responses import ResponseToolSearchCall
from pydantic import ConfigDict

from apis.chat import FunctionDefinition
from apis.wire.tools import ToolSearchTool
from providers.responses.tools.call import TypedTool
from providers.responses.tools.client import Arguments, ClientFunctionCall, ClientTool
from providers.responses.tools.schemas import check_parameters
from providers.responses.tools.tool_context import ToolContext

TOOL_SEARCH_NAME: Final = "tool_search"
_DESCRIPTION: Final = "Searches for further tools. Those that it finds can be called from then on."
_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should be able to do."}},
    "required": ["query"],
}


class _SearchArguments(Arguments):
    model_config = ConfigDict(extra="allow", frozen=True)


def make_tool_search(declaration: ToolSearchTool, context: ToolContext) -> TypedTool | None:
    """The client's search; None where the server is to search, for then all tools are offered at once."""
    if declaration.execution != "client":
        return None
    if declaration.parameters is not None:
        check_parameters([(f"{context.param}.parameters", TOOL_SEARCH_NAME, declaration.parameters, False)])
    offered = FunctionDefinition(
        name=TOOL_SEARCH_NAME,
        description=declaration.description or _DESCRIPTION,
        parameters=declaration.parameters or _PARAMETERS,
    )
    return ClientTool(offered, "tsc", _SearchArguments, _build_item)


def _build_item(call: ClientFunctionCall[Any], arguments: _SearchArguments, status: str) -> ResponseToolSearchCall:
    return ResponseToolSearchCall.model_validate(
        {
            "id": call.id,
            "type": "tool_search_call",
            "call_id": call.call_id,
            "execution": "client",
            "arguments": arguments.model_dump(),
            "status": status,
        }
    )
