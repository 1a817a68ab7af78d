"""A server's tools as they may be shown to a model, and whether one is still what it was."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mcp_types import Tool

from providers.tool_runtime.mcp.texts import one_line, redact_secrets

_log = logging.getLogger(__name__)

_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""As MCP says that tools are to be named (SEP-986)."""
_MAX_DESCRIPTION_BYTES: Final = 4096
_MAX_TOOL_BYTES: Final = 64 * 1024
_MAX_LOG_LINES: Final = 8
_MAX_LISTING_BYTES: Final = 2 * 1024 * 1024
_HINT_NAMES: Final = {"readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"}


def is_tool_name(name: str) -> bool:
    return _TOOL_NAME.fullmatch(name) is not None


def tools_to_json(tools: Sequence[Tool], server_label: str, secrets: Sequence[str]) -> list[dict[str, Any]]:
    """`{name, description, input_schema, annotations}` of each that a model can be told of; not endlessly much."""
    shown: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    left_bytes = _MAX_LISTING_BYTES
    for tool in tools:
        told = _tool_to_json(tool, secrets)
        size = len(json.dumps(told).encode())
        wrong = _find_tool_fault(tool, size, secrets) or ("is there already" if tool.name in shown else "")
        if not wrong and size > left_bytes:
            left_out.append("all further tools: they are too much")
            break
        if wrong:
            left_out.append(f"{one_line(tool.name, 64)!r}: it {wrong}")
        else:
            shown[tool.name] = told
            left_bytes -= size
    for reason in left_out[:_MAX_LOG_LINES]:
        _log.warning("of the tools of MCP server %r is left out %s", server_label[:64], reason)
    if len(left_out) > _MAX_LOG_LINES:
        _log.warning("of the tools of MCP server %r are left out %d in all", server_label[:64], len(left_out))
    return list(shown.values())


def _tool_to_json(tool: Tool, secrets: Sequence[str]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if tool.annotations is not None:
        noted = tool.annotations.model_dump(by_alias=True, exclude_none=True)
        notes = {name: value for name, value in noted.items() if name in _HINT_NAMES}
        if tool.annotations.title:
            notes["title"] = _clean_text(tool.annotations.title, secrets)
    return {
        "name": tool.name,
        "description": _clean_text(tool.description or "", secrets),
        "input_schema": {"type": "object", **tool.input_schema},
        "annotations": notes,
    }


def is_unchanged(tool: Mapping[str, Any], pinned_tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the tool is what was listed before under its name."""
    before = [_tool_digest(each) for each in pinned_tools if each.get("name") == tool["name"]]
    return before == [_tool_digest(tool)]


def _tool_digest(tool: Mapping[str, Any]) -> str:
    """Equal for what went through JSON and models, where what is empty may have become null or be gone."""
    told = {name: value for name, value in tool.items() if value not in (None, "", {})}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _find_tool_fault(tool: Tool, size: int, secrets: Sequence[str]) -> str:
    """Why a model cannot be told of the tool; empty when it can."""
    if not is_tool_name(tool.name):
        return "has a name that models are not told"
    if tool.input_schema.get("type", "object") != "object":
        return "takes no object"
    if size > _MAX_TOOL_BYTES:
        return f"is described in more than {_MAX_TOOL_BYTES} bytes"
    said = f"{tool.name} {json.dumps(tool.input_schema)}"
    if "\\u0000" in said or redact_secrets(said, secrets) != said:
        return "has a schema that cannot be stored"
    return ""


def _clean_text(text: str, secrets: Sequence[str]) -> str:
    return one_line(redact_secrets(text, secrets), _MAX_DESCRIPTION_BYTES)
