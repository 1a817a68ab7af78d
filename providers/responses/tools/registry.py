"""Which declared tool is made by what: one line for each type of tool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from apis.errors import InvalidRequest
from apis.responses import CreateResponse
from apis.wire.base import Wire
from apis.wire.tools import (
    ApplyPatchTool,
    CodeInterpreterTool,
    CustomTool,
    FileSearchTool,
    FunctionTool,
    LocalShellTool,
    McpTool,
    NamespaceTool,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
)
from providers.responses.tools.apply_patch import make_apply_patch
from providers.responses.tools.call import TypedTool
from providers.responses.tools.code_interpreter.tool import make_code_interpreter
from providers.responses.tools.file_search import make_file_search
from providers.responses.tools.local_shell import make_local_shell
from providers.responses.tools.mcp.tool import make_mcp
from providers.responses.tools.shell import make_shell
from providers.responses.tools.tool_context import ToolContext
from providers.responses.tools.tool_search import make_tool_search
from providers.responses.tools.web_search.tool import make_web_search

_MAX_MCP_SERVERS: Final = 32
ToolFactory = Callable[[Any, ToolContext], TypedTool | None]

FACTORIES: Mapping[type[Wire], ToolFactory] = {
    ApplyPatchTool: make_apply_patch,
    CodeInterpreterTool: make_code_interpreter,
    FileSearchTool: make_file_search,
    LocalShellTool: make_local_shell,
    McpTool: make_mcp,
    ShellTool: make_shell,
    ToolSearchTool: make_tool_search,
    WebSearchTool: make_web_search,
}
"""A factory gives None for a tool that is left out silently, and raises `setting.missing(...)` for one that is not
configured here."""

MODEL_DEPENDENT_TOOLS: Final = (WebSearchTool, CodeInterpreterTool, NamespaceTool, McpTool, ToolSearchTool)
"""Tools that are offered in another way to a model that has tools or namespaces of its own."""


@dataclass(frozen=True, slots=True)
class ToolBinding:
    """A declared tool and what was made of it."""

    declaration: Wire
    tool: TypedTool


def _options_without_type(declaration: Wire) -> Mapping[str, Any]:
    """Without the type, of which one tool may have several spellings."""
    return {**dict(declaration), "type": None}


async def build_checked_tools(request: CreateResponse, context: ToolContext) -> Sequence[ToolBinding]:
    """The same, and all that they name is there. Raises NotFound, or another refusal, naming what is not."""
    made = build_tools(request, context)
    for each in made:
        await each.tool.check_declaration()
    return made


def build_tools(request: CreateResponse, context: ToolContext) -> Sequence[ToolBinding]:
    """The typed tools of a request. Raises Unsupported, naming the tool, for what is not offered here."""
    made: dict[tuple[type[Wire], str], ToolBinding] = {}
    if sum(isinstance(tool, McpTool) for tool in request.tools or ()) > _MAX_MCP_SERVERS:
        message = f"A request may declare {_MAX_MCP_SERVERS} MCP servers at most."
        raise InvalidRequest(message, param="tools", code="array_above_max_length")
    for index, declared in enumerate(request.tools or ()):
        if isinstance(declared, FunctionTool | CustomTool | NamespaceTool):
            continue
        here = replace(context, param=f"tools[{index}]")
        factory: ToolFactory | None = FACTORIES.get(type(declared))
        if factory is None:
            raise here.not_configured_error(f"No '{declared.type}' tool is configured on this server.")
        label = declared.server_label if isinstance(declared, McpTool) else ""
        if label and (McpTool, label) in made:
            raise InvalidRequest(
                f"Two servers are labelled '{label}'.", param=f"{here.param}.server_label", code="invalid_value"
            )
        before = made.get((type(declared), label))
        if before is not None and _options_without_type(before.declaration) != _options_without_type(declared):
            raise InvalidRequest(
                f"Two tools of type '{declared.type}' are declared, and not alike: there can be one.",
                param=f"{here.param}.type",
                code="invalid_value",
            )
        tool = factory(declared, here)
        if tool is not None:
            made[type(declared), label] = ToolBinding(declared, tool)
    return [*made.values()]
