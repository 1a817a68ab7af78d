"""The registry of tool types: one line for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from openai.types.responses import ResponseOutputItem
from openai.types.responses.response import ToolUsage

from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from apis.wire.base import ToolWire
from apis.wire.item_parts import ItemWire
from apis.wire.tools import CustomTool, FunctionTool, McpTool, NamespaceTool
from providers.responses.events.response_object import NO_TOOL_USAGE
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.apply_patch import APPLY_PATCH
from providers.responses.tools.call import ToolType, TypedTool
from providers.responses.tools.code_interpreter.tool import CODE_INTERPRETER
from providers.responses.tools.computer.tool import COMPUTER, COMPUTER_USE_PREVIEW
from providers.responses.tools.file_search import FILE_SEARCH
from providers.responses.tools.image_generation.tool import IMAGE_GENERATION
from providers.responses.tools.mcp.tool import MCP
from providers.responses.tools.shell.local_shell import LOCAL_SHELL
from providers.responses.tools.shell.tool import SHELL
from providers.responses.tools.tool_context import ToolContext
from providers.responses.tools.tool_search import TOOL_SEARCH
from providers.responses.tools.web_search.tool import WEB_SEARCH

_TOOL_TYPES: Final[Sequence[ToolType]] = (
    APPLY_PATCH,
    CODE_INTERPRETER,
    COMPUTER,
    COMPUTER_USE_PREVIEW,
    FILE_SEARCH,
    IMAGE_GENERATION,
    LOCAL_SHELL,
    MCP,
    SHELL,
    TOOL_SEARCH,
    WEB_SEARCH,
)
_TYPES_BY_DECLARATION: Final[Mapping[type[ToolWire], ToolType]] = {row.declaration: row for row in _TOOL_TYPES}
TYPES_BY_CALL_ITEM: Final[Mapping[type[ItemWire], ToolType]] = {
    item: row for row in _TOOL_TYPES for item in row.call_items
}
TYPES_BY_OUTPUT_ITEM: Final[Mapping[type[ItemWire], ToolType]] = {
    row.output_item: row for row in _TOOL_TYPES if row.output_item is not None
}
MODEL_DEPENDENT_TOOLS: Final = (NamespaceTool, *(row.declaration for row in _TOOL_TYPES if row.depends_on_model))
"""Declarations that are offered in another way to a model with native tools or namespaces."""
MODALITY_DEPENDENT_TOOLS: Final = tuple(row.declaration for row in _TOOL_TYPES if row.needs_modalities)
_USAGE_SUMS: Final = [
    (get_args(item.model_fields["type"].annotation)[0], row.sum_usage)
    for row in _TOOL_TYPES
    for item in row.call_items
    if row.sum_usage is not None
]
_MAX_MCP_SERVERS: Final = 32
"""Maximum MCP servers in one request; more are an InvalidRequest."""


@dataclass(frozen=True, slots=True)
class ToolBinding:
    """A declaration and the tool built from it."""

    declaration: ToolWire
    tool: TypedTool


async def build_checked_tools(request: CreateResponse, context: ToolContext) -> Sequence[ToolBinding]:
    """Return the typed tools of a request after looking up the objects that they name. Raises as `build_tools`, and
    NotFound or another InvalidRequest that names the field of a missing object."""
    bindings = build_tools(request, context)
    for binding in bindings:
        await binding.tool.check_declaration()
    return bindings


def build_tools(request: CreateResponse, context: ToolContext) -> Sequence[ToolBinding]:
    """Return the typed tools of a request. Raises Unsupported, naming the tool, for one that this server does not
    offer, and InvalidRequest for two that contradict each other."""
    bindings: dict[tuple[type[ToolWire], str], ToolBinding] = {}
    if sum(isinstance(tool, McpTool) for tool in request.tools or ()) > _MAX_MCP_SERVERS:
        message = f"A request may declare {_MAX_MCP_SERVERS} MCP servers at most."
        raise InvalidRequest(message, param="tools", code="array_above_max_length")
    for index, declaration in enumerate(request.tools or ()):
        if isinstance(declaration, FunctionTool | CustomTool | NamespaceTool):
            continue
        tool_context = replace(context, param=f"tools[{index}]")
        tool_type = _TYPES_BY_DECLARATION.get(type(declaration))
        if tool_type is None:
            raise tool_context.not_configured_error(f"No '{declaration.type}' tool is configured on this server.")
        label = declaration.server_label if isinstance(declaration, McpTool) else ""
        if label and (McpTool, label) in bindings:
            raise InvalidRequest(
                f"Two servers are labelled '{label}'.", param=f"{tool_context.param}.server_label", code="invalid_value"
            )
        earlier = bindings.get((type(declaration), label))
        if earlier is not None and _options(earlier.declaration) != _options(declaration):
            raise InvalidRequest(
                f"Two tools of type '{declaration.type}' are declared, and not alike: there can be one.",
                param=f"{tool_context.param}.type",
                code="invalid_value",
            )
        tool = tool_type.create(declaration, tool_context)
        if tool is not None:
            bindings[type(declaration), label] = ToolBinding(declaration, tool)
    return [*bindings.values()]


def sum_tool_usage(output: Sequence[ResponseOutputItem], tool_results: Mapping[str, ToolResultRecord]) -> ToolUsage:
    """Return the `tool_usage` of a finished response. `tool_results` are the results of its calls by item id."""
    fields: dict[str, Any] = {}
    for item_type, sum_usage in _USAGE_SUMS:
        if items := [item for item in output if item.type == item_type]:
            fields |= sum_usage(items, tool_results)
    return ToolUsage(**{**dict(NO_TOOL_USAGE), **fields}) if fields else NO_TOOL_USAGE


def _options(declaration: ToolWire) -> Mapping[str, Any]:
    """Return the fields except the type, which may have several spellings for one tool."""
    return {**dict(declaration), "type": None}
