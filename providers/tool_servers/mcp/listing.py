"""The tools of an MCP server as a model can be offered them: checked, cleaned and bounded."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, Final

from mcp_types import Tool

from apis.tool_servers import ServerTool, is_tool_name
from providers.common.grammars.schemas import mend_parameters
from providers.tool_servers.mcp.texts import one_line, redact_secrets

_log = logging.getLogger(__name__)

_MAX_DESCRIPTION_BYTES: Final = 4096
_MAX_TOOL_BYTES: Final = 64 * 1024
_MAX_LOG_LINES: Final = 8
_MAX_LISTING_BYTES: Final = 2 * 1024 * 1024


async def convert_tools(
    tools: Sequence[Tool], faults: Sequence[str], server_label: str, secrets: Sequence[str]
) -> list[ServerTool]:
    """Return the tools that a model can be offered, at most 2 MiB of them; the log says which are left out and why.
    `faults` are those that were left out before."""
    offerable: list[ServerTool] = []
    rejections = [redact_secrets(fault, secrets) for fault in faults]
    available_bytes = _MAX_LISTING_BYTES
    for tool in tools:
        await asyncio.sleep(0)  # checking large schemas takes long: other streams run in between
        converted = _convert_tool(tool, secrets)
        size = _json_size(converted)
        if fault := _find_tool_fault(converted, size, secrets):
            rejections.append(f"{one_line(redact_secrets(tool.name, secrets), 64)!r}: it {fault}")
        elif size > available_bytes:
            rejections.append("all further tools: they are too much")
            break
        else:
            offerable.append(converted)
            available_bytes -= size
    for reason in rejections[:_MAX_LOG_LINES]:
        _log.warning("of the tools of MCP server %r is left out %s", server_label[:64], reason)
    if len(rejections) > _MAX_LOG_LINES:
        _log.warning("of the tools of MCP server %r are left out %d in all", server_label[:64], len(rejections))
    return offerable


def _convert_tool(tool: Tool, secrets: Sequence[str]) -> ServerTool:
    annotations: dict[str, Any] = {}
    if tool.annotations is not None:
        hints = tool.annotations.model_dump(by_alias=True, exclude_none=True)
        annotations = {name: value for name, value in hints.items() if name != "title"}
        if tool.annotations.title:
            annotations["title"] = _clean_text(tool.annotations.title, secrets)
    description = _clean_text(tool.description or "", secrets)
    return ServerTool(tool.name, description, mend_parameters(tool.input_schema), annotations)


def _json_size(tool: ServerTool) -> int:
    return len(json.dumps([tool.name, tool.description, tool.input_schema, tool.annotations]).encode())


def _find_tool_fault(tool: ServerTool, size: int, secrets: Sequence[str]) -> str:
    """Return why a model cannot be offered the tool, or an empty string."""
    if not is_tool_name(tool.name):
        return "has a name that no tool may have"
    if size > _MAX_TOOL_BYTES:
        return f"is described in more than {_MAX_TOOL_BYTES} bytes"
    text = f"{tool.name} {json.dumps(tool.input_schema)} {json.dumps(tool.annotations)}"
    if "\\u0000" in text or redact_secrets(text, secrets) != text:
        return "has a schema that cannot be stored"
    return ""


def _clean_text(text: str, secrets: Sequence[str]) -> str:
    return one_line(redact_secrets(text, secrets), _MAX_DESCRIPTION_BYTES)
