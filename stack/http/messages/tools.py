"""The tools of a message as those of a response, and their names."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.errors import InvalidRequest, Unsupported
from apis.messages import MessageTool, MessageToolChoice

_MAX_NAME_CHARS: Final = 64
_KEPT_NAME_CHARS: Final = 55
_STRING: Final = {"type": "string"}
_EDITS: Final = {
    "path": _STRING,
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": {"type": "integer"},
    "insert_text": _STRING,
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
_CLIENT_TOOLS: Final[Mapping[str, tuple[str, str, Mapping[str, Any], Sequence[str]]]] = {
    "bash_": ("bash", "Run a command in a shell.", {"command": _STRING, "restart": {"type": "boolean"}}, ()),
    "text_editor_": (
        "str_replace_based_edit_tool",
        "View, create and edit files.",
        {"command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]}, **_EDITS},
        ("command", "path"),
    ),
    "memory_": (
        "memory",
        "View, create and edit the files of your memory, below /memories.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITS,
            "old_path": _STRING,
            "new_path": _STRING,
        },
        ("command",),
    ),
}
"""The tools of Anthropic that clients run, by the beginning of their types: the usual name, a description, the
properties of the input, and those that it needs."""
_WEB_SEARCH: Final = "web_search"
_WEB_SEARCH_PREFIX: Final = "web_search_"
_WEB_FETCH_PREFIX: Final = "web_fetch_"


class ToolNames:
    """The names of a request's tools. Anthropic's may have 128 characters, those of functions 64: a longer one is
    shortened, always in the same way."""

    def __init__(self, tools: Sequence[MessageTool]) -> None:
        self._long_names = {shorten_name(tool.name): tool.name for tool in tools if tool.name}

    def restore(self, name: str) -> str:
        """Return the name of a called tool as the client declared it."""
        return self._long_names.get(name, name)


def shorten_name(name: str) -> str:
    """Return the name under which a model calls a tool."""
    if len(name) <= _MAX_NAME_CHARS:
        return name
    return f"{name[:_KEPT_NAME_CHARS]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def convert_tools(tools: Sequence[MessageTool]) -> dict[str, Any]:
    """Return the fields of a response's request for these tools. Raises InvalidRequest."""
    converted: list[dict[str, Any]] = []
    types = [tool.type or "custom" for tool in tools]
    for index, (tool, kind) in enumerate(zip(tools, types, strict=True)):
        if kind == "custom":
            converted.append(_convert_function(tool, index))
        elif kind.startswith(_WEB_SEARCH_PREFIX):
            converted.append(_convert_web_search(tool))
        elif not kind.startswith(_WEB_FETCH_PREFIX):
            converted.append(_convert_client_tool(tool, kind, index))
        elif not any(each.startswith(_WEB_SEARCH_PREFIX) for each in types):
            raise Unsupported(
                "Pages are opened by the web search here: declare a 'web_search' tool, too.",
                param=f"tools[{index}].type",
            )
    fields: dict[str, Any] = {"tools": converted} if converted else {}
    if any(tool["type"] == _WEB_SEARCH for tool in converted):
        fields["include"] = ["web_search_call.results"]
    uses = [tool.max_uses for tool, kind in zip(tools, types, strict=True) if kind.startswith("web_")]
    if uses and None not in uses:
        fields["max_tool_calls"] = sum(use for use in uses if use is not None)
    return fields


def convert_choice(choice: MessageToolChoice | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a response's request for the choice among its tools. Raises InvalidRequest."""
    if choice is None or not tools:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest(
                "Missing required parameter: 'tool_choice.name'.",
                param="tool_choice.name",
                code="missing_required_parameter",
            )
        name = shorten_name(choice.name)
        is_hosted = choice.name == _WEB_SEARCH and all(tool.get("name") != name for tool in tools)
        return {**fields, "tool_choice": {"type": _WEB_SEARCH} if is_hosted else {"type": "function", "name": name}}
    return {**fields, "tool_choice": "required" if choice.type == "any" else choice.type}


def _convert_function(tool: MessageTool, index: int) -> dict[str, Any]:
    if not tool.name:
        param = f"tools[{index}].name"
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    return {
        "type": "function",
        "name": shorten_name(tool.name),
        "description": tool.description,
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
        "strict": tool.strict is True,
    }


def _convert_client_tool(tool: MessageTool, kind: str, index: int) -> dict[str, Any]:
    """Return one of Anthropic's tools as the function that its client runs. Raises Unsupported for those that a server
    runs, or that no model here has learned."""
    for prefix, (name, description, properties, required) in _CLIENT_TOOLS.items():
        if kind.startswith(prefix):
            schema = {"type": "object", "properties": dict(properties), "required": list(required)}
            return {
                "type": "function",
                "name": shorten_name(tool.name or name),
                "description": tool.description or description,
                "parameters": schema,
                "strict": False,
            }
    raise Unsupported(f"Tools of the type '{kind}' are not offered by this server.", param=f"tools[{index}].type")


def _convert_web_search(tool: MessageTool) -> dict[str, Any]:
    filters = {"allowed_domains": tool.allowed_domains, "blocked_domains": tool.blocked_domains}
    fields: dict[str, Any] = {"type": _WEB_SEARCH}
    if any(filters.values()):
        fields["filters"] = filters
    if tool.user_location is not None:
        fields["user_location"] = {"type": "approximate", **tool.user_location.model_dump(exclude_none=True)}
    return fields
