"""The tools of a message as those of a response, and their names."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.errors import InvalidRequest, Unsupported
from apis.messages import CountMessageTokens, MessageTool, MessageToolChoice
from stack.http.messages.mcp_servers import TOOLSET, DeclaredServers

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
WEB_SEARCH: Final = "web_search"
WEB_FETCH: Final = "web_fetch"
CODE_EXECUTION: Final = "code_execution"
BASH_EXECUTION: Final = "bash_code_execution"
_BASH_VERSION: Final = f"{CODE_EXECUTION}_20250825"
"""The type of the tool whose programs are shell commands; those of the other versions are Python."""
_TOOL_SEARCH: Final = "tool_search_tool"
_WEB_TOOLS: Final = (WEB_SEARCH, WEB_FETCH)
_EXECUTIONS: Final = (CODE_EXECUTION, BASH_EXECUTION)
_HOSTED_TYPES: Final[Mapping[str, Sequence[str]]] = {
    WEB_SEARCH: ("web_search",),
    WEB_FETCH: ("web_search",),
    CODE_EXECUTION: ("code_interpreter", "shell"),
}
"""The types of a response's tools, by the names of Anthropic's that choose them."""


class ToolNames:
    """The names of a request's tools. Anthropic's may have 128 characters, those of functions 64: a longer one is
    shortened, always in the same way."""

    def __init__(self, tools: Sequence[MessageTool]) -> None:
        self._long_names = {shorten_name(tool.name): tool.name for tool in tools if tool.name}
        searches = (tool.name for tool in tools if tool.name and _find_kind(tool) == _TOOL_SEARCH)
        self.tool_search = next(searches, f"{_TOOL_SEARCH}_bm25")
        """The name under which the client knows the search for tools."""

    def restore(self, name: str) -> str:
        """Return the name of a called tool as the client declared it."""
        return self._long_names.get(name, name)


def shorten_name(name: str) -> str:
    """Return the name under which a model calls a tool."""
    if len(name) <= _MAX_NAME_CHARS:
        return name
    return f"{name[:_KEPT_NAME_CHARS]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def convert_tools(message: CountMessageTokens, uploads: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a response's request for the tools of a message. `uploads` are the ids of the files that its
    programs get. Raises InvalidRequest."""
    tools, servers = message.tools or (), DeclaredServers(message.mcp_servers or ())
    kinds = [_find_kind(tool) for tool in tools]
    is_searched = _TOOL_SEARCH in kinds
    converted: list[dict[str, Any]] = []
    for index, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if kind == "custom":
            converted.append(_convert_function(tool, index, is_deferred=is_searched and tool.defer_loading is True))
        elif kind == TOOLSET:
            converted += servers.convert_toolset(tool, index, is_searched=is_searched)
        elif kind == CODE_EXECUTION:
            converted.append({"type": "code_interpreter", "container": _convert_container(message, uploads)})
        elif kind == BASH_EXECUTION:
            converted.append({"type": "shell", "environment": _convert_environment(message, uploads)})
        elif kind in _WEB_TOOLS:
            if kind == WEB_SEARCH or WEB_SEARCH not in kinds:
                converted.append(_convert_web_search(tool, searches=kind == WEB_SEARCH))
        elif kind == _TOOL_SEARCH:
            if index == kinds.index(_TOOL_SEARCH):  # one search is enough for both ways to write its query
                converted.append({"type": "tool_search", "execution": "server"})
        else:
            converted.append(_convert_client_tool(tool, tool.type or "", index))
    converted += servers.convert_rest()
    if uploads and not {*_EXECUTIONS}.intersection(kinds):
        raise InvalidRequest("A 'container_upload' needs a 'code_execution' tool in 'tools'.", param="tools")
    return {**({"tools": converted} if converted else {}), **_build_options(tools, kinds, converted)}


def list_loadable(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tools of a response's request that a search for tools may find, by the names that it shows. An MCP
    server is known by its label."""
    loadable: dict[str, dict[str, Any]] = {}
    for tool in tools:
        if tool["type"] == "function":
            loadable[tool["name"]] = {**tool}
        elif tool["type"] == "mcp":
            loadable[tool["server_label"]] = {"type": "mcp", "server_label": tool["server_label"]}
    return loadable


def _build_options(
    tools: Sequence[MessageTool], kinds: Sequence[str], converted: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what is included in the items of hosted calls, and the bound of their number where every tool has one."""
    included = {WEB_SEARCH: "web_search_call.results", CODE_EXECUTION: "code_interpreter_call.outputs"}
    fields: dict[str, Any] = {}
    if include := [path for kind, path in included.items() if kind in kinds]:
        fields["include"] = include
    uses = [tool.max_uses for tool, kind in zip(tools, kinds, strict=True) if kind in _WEB_TOOLS]
    is_bounded = uses and None not in uses and not {*_EXECUTIONS, _TOOL_SEARCH}.intersection(kinds)
    if is_bounded and all(tool["type"] != "mcp" for tool in converted):
        fields["max_tool_calls"] = sum(use for use in uses if use is not None)
    return fields


def _find_kind(tool: MessageTool) -> str:
    """Return the kind of a tool: the type without its version for those that this server runs."""
    kind = tool.type or "custom"
    if kind == _BASH_VERSION:
        return BASH_EXECUTION
    hosted = (*_WEB_TOOLS, CODE_EXECUTION, _TOOL_SEARCH)
    return next((name for name in hosted if kind == name or kind.startswith(f"{name}_")), kind)


def _convert_container(message: CountMessageTokens, uploads: Sequence[str]) -> str | dict[str, Any]:
    """Return the container of programs: the one that the request names, or a new one with the files. Raises
    Unsupported."""
    container = message.container
    if container is not None and not isinstance(container, str):
        if container.skills:
            raise Unsupported("'container.skills' is not offered by this server.", param="container.skills")
        container = container.id
    if container is None:
        return {"type": "auto", **({"file_ids": [*uploads]} if uploads else {})}
    if uploads:
        raise Unsupported(
            "Files are put into new containers here: leave 'container' out, or the 'container_upload' blocks.",
            param="container",
        )
    return container


def _convert_environment(message: CountMessageTokens, uploads: Sequence[str]) -> dict[str, Any]:
    """Return the container of shell commands. Raises Unsupported."""
    container = _convert_container(message, uploads)
    if isinstance(container, str):
        return {"type": "container_reference", "container_id": container}
    return {**container, "type": "container_auto"}


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
        chosen = {"type": "function", "name": name}
        if all(tool.get("name") != name for tool in tools):
            hosted = _HOSTED_TYPES.get(choice.name, ())
            chosen = next(({"type": tool["type"]} for tool in tools if tool["type"] in hosted), chosen)
        return {**fields, "tool_choice": chosen}
    return {**fields, "tool_choice": "required" if choice.type == "any" else choice.type}


def _convert_function(tool: MessageTool, index: int, *, is_deferred: bool) -> dict[str, Any]:
    if not tool.name:
        param = f"tools[{index}].name"
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    return {
        "type": "function",
        "name": shorten_name(tool.name),
        "description": tool.description,
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
        "strict": tool.strict is True,
        **({"defer_loading": True} if is_deferred else {}),
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


def _convert_web_search(tool: MessageTool, *, searches: bool) -> dict[str, Any]:
    filters = {"allowed_domains": tool.allowed_domains, "blocked_domains": tool.blocked_domains}
    fields: dict[str, Any] = {"type": "web_search"} if searches else {"type": "web_search", "search": False}
    if any(filters.values()):
        fields["filters"] = filters
    if tool.user_location is not None:
        fields["user_location"] = {"type": "approximate", **tool.user_location.model_dump(exclude_none=True)}
    return fields
