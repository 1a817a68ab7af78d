"""The tool `tool_search`: the model searches for deferred tools, and the client, or this server, answers with those
that match."""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from openai.types.responses import ResponseToolSearchCall
from pydantic import ConfigDict

from apis.chat import FunctionDefinition, NativeToolName
from apis.wire.tool_items import ToolSearchCallItem, ToolSearchOutput
from apis.wire.tools import ToolSearchTool
from providers.common.grammars.schemas import check_parameters
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ToolFunctions, TypedTool
from providers.responses.tools.client import Arguments, ClientFunctionCall, ClientTool, build_call_record
from providers.responses.tools.server_tool_search import create_server_search
from providers.responses.tools.tool_context import ToolContext

_NAME: Final = "tool_search"
_DESCRIPTION: Final = "Searches for further tools. Those that it finds can be called from then on."
_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should be able to do."}},
    "required": ["query"],
}


class _SearchArguments(Arguments):
    model_config = ConfigDict(extra="allow", frozen=True)


def _create_tool(declaration: ToolSearchTool, context: ToolContext) -> TypedTool | None:
    """Return the search by the client or by this server; None where this server has nothing to search."""
    if declaration.execution != "client":
        return create_server_search(declaration, context)
    if declaration.parameters is not None:
        check_parameters([(f"{context.param}.parameters", _NAME, declaration.parameters, False)])
    function = FunctionDefinition(
        name=_NAME,
        description=declaration.description or _DESCRIPTION,
        parameters=declaration.parameters or _PARAMETERS,
    )
    return ClientTool(function, "tool_search_call", _SearchArguments, _build_item)


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


def _call_from_item(item: ToolSearchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    return build_call_record(item.call_id, _NAME, item.arguments) if item.call_id is not None else None


def _output_from_item(item: ToolSearchOutput, call_ids: Mapping[str, str]) -> tuple[str, str] | None:
    if item.call_id is None:
        return None
    unseen = {"defer_loading", "server_url", "is_async"}
    tools = [tool.model_dump(exclude_none=True, exclude=unseen) for tool in item.tools]
    return item.call_id, orjson.dumps(tools).decode() if tools else "No tool was found."


TOOL_SEARCH: Final = ToolFunctions(_create_tool, _call_from_item, output_from_item=_output_from_item)
