"""The registry of tool types: one line for each. The functions of a type are imported when the first one is used."""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, get_args

from openai.types.responses import ResponseOutputItem
from openai.types.responses.response import ToolUsage

from apis.errors import InvalidRequest
from apis.imports import import_from_string
from apis.responses import CreateResponse
from apis.wire.base import ToolWire
from apis.wire.computer import ComputerCallItem
from apis.wire.item_parts import ItemWire
from apis.wire.tool_items import (
    ApplyPatchCallItem,
    ApplyPatchCallOutput,
    CodeInterpreterCallItem,
    FileSearchCallItem,
    ImageGenerationCallItem,
    LocalShellCallItem,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpCallItem,
    ShellCallItem,
    ShellCallOutput,
    ToolSearchCallItem,
    ToolSearchOutput,
    WebSearchCallItem,
)
from apis.wire.tools import (
    ApplyPatchTool,
    CodeInterpreterTool,
    ComputerTool,
    ComputerUsePreviewTool,
    CustomTool,
    FileSearchTool,
    FunctionTool,
    ImageGenerationTool,
    LocalShellTool,
    McpTool,
    NamespaceTool,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
)
from providers.responses.events.response_object import NO_TOOL_USAGE
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ToolFunctions, TypedTool
from providers.responses.tools.tool_context import ToolContext

_HERE: Final = "providers.responses.tools"


@dataclass(frozen=True, slots=True)
class ToolType:
    """A type of tool: what is known of it before it is used."""

    declaration: type[ToolWire]
    functions_name: str
    """The ToolFunctions of the type, as "module:NAME"."""
    call_items: tuple[type[ItemWire], ...]
    _: KW_ONLY
    output_item: type[ItemWire] | None = None
    """The item of a client's output."""
    depends_on_model: bool = False
    """True if models with native tools or namespaces are offered the tool in another way."""
    needs_modalities: bool = False
    """True if the tool is created by the modalities of the model."""
    counts_usage: bool = False
    """True if the functions of the type have a `sum_usage`."""

    @property
    def functions(self) -> ToolFunctions:
        """The functions of the type, whose modules are imported for the first use."""
        return import_from_string(self.functions_name)

    @property
    def is_imported(self) -> bool:
        return self.functions_name.partition(":")[0] in sys.modules


TOOL_TYPES: Final[Sequence[ToolType]] = (
    ToolType(
        ApplyPatchTool, f"{_HERE}.apply_patch:APPLY_PATCH", (ApplyPatchCallItem,), output_item=ApplyPatchCallOutput
    ),
    ToolType(
        CodeInterpreterTool,
        f"{_HERE}.code_interpreter.tool:CODE_INTERPRETER",
        (CodeInterpreterCallItem,),
        depends_on_model=True,
    ),
    ToolType(ComputerTool, f"{_HERE}.computer.tool:COMPUTER", (ComputerCallItem,), needs_modalities=True),
    ToolType(ComputerUsePreviewTool, f"{_HERE}.computer.tool:COMPUTER_USE_PREVIEW", (), needs_modalities=True),
    ToolType(FileSearchTool, f"{_HERE}.file_search:FILE_SEARCH", (FileSearchCallItem,)),
    ToolType(
        ImageGenerationTool,
        f"{_HERE}.image_generation.tool:IMAGE_GENERATION",
        (ImageGenerationCallItem,),
        counts_usage=True,
    ),
    ToolType(
        LocalShellTool,
        f"{_HERE}.shell.local_shell:LOCAL_SHELL",
        (LocalShellCallItem,),
        output_item=LocalShellCallOutput,
    ),
    ToolType(McpTool, f"{_HERE}.mcp.tool:MCP", (McpCallItem, McpApprovalRequest), depends_on_model=True),
    ToolType(ShellTool, f"{_HERE}.shell.tool:SHELL", (ShellCallItem,), output_item=ShellCallOutput),
    ToolType(
        ToolSearchTool,
        f"{_HERE}.tool_search:TOOL_SEARCH",
        (ToolSearchCallItem,),
        output_item=ToolSearchOutput,
        depends_on_model=True,
    ),
    ToolType(
        WebSearchTool,
        f"{_HERE}.web_search.tool:WEB_SEARCH",
        (WebSearchCallItem,),
        depends_on_model=True,
        counts_usage=True,
    ),
)
_TYPES_BY_DECLARATION: Final[Mapping[type[ToolWire], ToolType]] = {row.declaration: row for row in TOOL_TYPES}
TYPES_BY_CALL_ITEM: Final[Mapping[type[ItemWire], ToolType]] = {
    item: row for row in TOOL_TYPES for item in row.call_items
}
TYPES_BY_OUTPUT_ITEM: Final[Mapping[type[ItemWire], ToolType]] = {
    row.output_item: row for row in TOOL_TYPES if row.output_item is not None
}
MODEL_DEPENDENT_TOOLS: Final = (NamespaceTool, *(row.declaration for row in TOOL_TYPES if row.depends_on_model))
"""Declarations that are offered in another way to a model with native tools or namespaces."""
MODALITY_DEPENDENT_TOOLS: Final = tuple(row.declaration for row in TOOL_TYPES if row.needs_modalities)
_USAGE_SUMS: Final = [
    (get_args(item.model_fields["type"].annotation)[0], row)
    for row in TOOL_TYPES
    for item in row.call_items
    if row.counts_usage
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
    declared = {_TYPES_BY_DECLARATION.get(type(tool)) for tool in request.tools or ()}
    if names := [row.functions_name for row in declared if row is not None and not row.is_imported]:
        await asyncio.to_thread(_import_all, names)
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
        tool = tool_type.functions.create(declaration, tool_context)
        if tool is not None:
            bindings[type(declaration), label] = ToolBinding(declaration, tool)
    return [*bindings.values()]


def sum_tool_usage(output: Sequence[ResponseOutputItem], tool_results: Mapping[str, ToolResultRecord]) -> ToolUsage:
    """Return the `tool_usage` of a finished response. `tool_results` are the results of its calls by item id."""
    fields: dict[str, Any] = {}
    for item_type, tool_type in _USAGE_SUMS:
        items = [item for item in output if item.type == item_type]
        if items and (sum_usage := tool_type.functions.sum_usage) is not None:
            fields |= sum_usage(items, tool_results)
    return ToolUsage(**{**dict(NO_TOOL_USAGE), **fields}) if fields else NO_TOOL_USAGE


def _import_all(names: Iterable[str]) -> None:
    for name in names:
        import_from_string(name)


def _options(declaration: ToolWire) -> Mapping[str, Any]:
    """Return the fields except the type, which may have several spellings for one tool."""
    return {**dict(declaration), "type": None}
