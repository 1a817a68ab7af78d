"""The tool `tool_search` run by this server: the model searches the client's deferred tools and MCP servers, which it
can then call."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from openai.types.responses import ResponseToolSearchCall, ResponseToolSearchOutputItem

from apis.chat import ChatFunctionTool, FunctionDefinition
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.wire.item_types import id_prefix
from apis.wire.tool_items import ToolSearchOutput
from apis.wire.tools import CustomTool, FunctionTool, McpTool, NamespaceTool, ToolSearchTool
from providers.responses.events.open_items import item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.call import Emit, HostedCall, TypedTool
from providers.responses.tools.input_tools import collect_additional_tools
from providers.responses.tools.names import qualified_name
from providers.responses.tools.tool_context import ToolContext

_NAME: Final = "tool_search"
_DESCRIPTION: Final = "Searches for further tools by what they do. Those that it finds can be called from then on."
_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should be able to do, or its name."}},
    "required": ["query"],
    "additionalProperties": False,
}
_MAX_FOUND: Final = 8
"""Most tools that one search loads."""
_MAX_LISTED_CHARS: Final = 2_000
"""Longest list of names in the description of the search and in a result without a tool."""
_WORD: Final = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class _DeferredTool:
    """A deferred tool of the client's, the name by which the model calls it, and the words that find it; or a deferred
    MCP server, by its label."""

    tool: FunctionTool | CustomTool | McpTool
    namespace: NamespaceTool | None
    name: str
    name_words: frozenset[str]
    words: frozenset[str]


def create_server_search(declaration: ToolSearchTool, context: ToolContext) -> "ServerToolSearch | None":
    """Return the search; None where no tool is deferred that earlier turns have not found."""
    deferred = _list_deferred_tools(context)
    return ServerToolSearch(declaration, deferred, context.loaded_servers) if deferred else None


class ServerToolSearch(TypedTool):
    """The search over the deferred tools of one request."""

    def __init__(
        self, declaration: ToolSearchTool, deferred: Sequence[_DeferredTool], loaded_servers: set[str]
    ) -> None:
        self._deferred = deferred
        self._loaded_servers = loaded_servers
        self._loaded_names: set[str] = set()
        groups = dict.fromkeys(entry.namespace.name if entry.namespace else entry.name for entry in deferred)
        about = declaration.description or _DESCRIPTION
        self._function = FunctionDefinition(
            name=_NAME,
            description=f"{about} There are: {', '.join(groups)[:_MAX_LISTED_CHARS]}.",
            parameters=_PARAMETERS,
        )

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return [ChatFunctionTool(function=self._function)]

    @property
    def loaded_names(self) -> Collection[str]:
        return self._loaded_names

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return ServerSearchCall(self, start)

    def search(self, query: str) -> Sequence[_DeferredTool]:
        """Return the tools that share most words with the query, best first, and load them."""
        words = _words(query)
        scored = [(2 * len(words & entry.name_words) + len(words & entry.words), entry) for entry in self._deferred]
        matches = [entry for score, entry in sorted(scored, key=lambda pair: -pair[0]) if score][:_MAX_FOUND]
        for entry in matches:
            (self._loaded_servers if isinstance(entry.tool, McpTool) else self._loaded_names).add(entry.name)
        return matches

    @property
    def listing(self) -> str:
        """The names of all tools that can be found."""
        return ", ".join(entry.name for entry in self._deferred)[:_MAX_LISTED_CHARS]


class ServerSearchCall(HostedCall):
    """One search: its item, then one with the tools that it found."""

    item_type = "tool_search_call"
    opens = "when complete"

    def __init__(self, tool: ServerToolSearch, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._matches: Sequence[_DeferredTool] = ()

    def item(self, status: str) -> ResponseToolSearchCall:
        try:
            arguments = self.parse_arguments()
        except ToolFailed:
            arguments = {}
        # the API knows no failed search: one that failed has found nothing
        item_status: Any = "completed" if status == "failed" else status
        return ResponseToolSearchCall(
            id=self.id, type="tool_search_call", execution="server", arguments=arguments, status=item_status
        )

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        query: Any = self.parse_arguments().get("query")
        if not isinstance(query, str) or not query.strip():
            raise ToolFailed(f"`{_NAME}` needs a `query`, a text that is not empty.")
        self._matches = matches = self._tool.search(query)
        lines = [_describe(entry) for entry in matches]
        nothing = f"No tool was found. There are: {self._tool.listing}."
        self.record_result("\n".join(["These tools can be called now:", *lines]) if matches else nothing)

    def finish(self) -> EventList:
        assert self.output is not None
        item_id, index = self.output.ids.new_item_id(id_prefix("tool_search_output")), self.output.reserve_index()
        return [
            *super().finish(),
            item_added_event(index, _build_output(item_id, self._matches, "in_progress")),
            item_done_event(index, _build_output(item_id, self._matches, "completed")),
        ]


def _describe(entry: _DeferredTool) -> str:
    if isinstance(entry.tool, McpTool):
        return f"all tools of {entry.name}: {entry.tool.server_description or ''}"
    return f"{entry.name}: {entry.tool.description or ''}"


def _build_output(
    item_id: str, matches: Sequence[_DeferredTool], status: Literal["in_progress", "completed"]
) -> ResponseToolSearchOutputItem:
    tools: list[dict[str, Any]] = []
    groups: dict[str, dict[str, Any]] = {}
    for entry in matches:
        fields = entry.tool.model_dump(exclude_none=True)  # of an MCP server without its secrets
        if isinstance(entry.tool, FunctionTool):
            fields = {"parameters": None, **fields, "strict": bool(entry.tool.strict)}
        if entry.namespace is None:
            tools.append(fields)
            continue
        if entry.namespace.name not in groups:
            group: dict[str, Any] = {**entry.namespace.model_dump(exclude_none=True), "tools": []}
            groups[entry.namespace.name] = group
            tools.append(group)
        groups[entry.namespace.name]["tools"].append(fields)
    return ResponseToolSearchOutputItem.model_validate(
        {"id": item_id, "type": "tool_search_output", "execution": "server", "status": status, "tools": tools}
    )


def _list_deferred_tools(context: ToolContext) -> Sequence[_DeferredTool]:
    found_names = {
        name
        for item in context.items.of(ToolSearchOutput)
        for name in _names_of(item.tools, supports_namespaces=context.supports_namespaces)
    }
    deferred: list[_DeferredTool] = []
    for declared in (*(context.request.tools or ()), *collect_additional_tools(context.items)):
        namespace = declared if isinstance(declared, NamespaceTool) else None
        if isinstance(declared, McpTool) and declared.defer_loading and declared.server_label not in found_names:
            deferred.append(_defer_server(declared))
        for tool in namespace.tools if namespace else (declared,):
            if not isinstance(tool, FunctionTool | CustomTool) or not tool.defer_loading:
                continue
            name = _model_name(tool, namespace, supports_namespaces=context.supports_namespaces)
            if name not in found_names:
                about = f"{tool.description or ''} {namespace.description if namespace else ''}"
                deferred.append(_DeferredTool(tool, namespace, name, _words(name), _words(about)))
    return deferred


def _defer_server(server: McpTool) -> _DeferredTool:
    """Return the entry of an MCP server, which is found by its label and description, and by the tools that it is
    bound to."""
    allowed = server.allowed_tools if isinstance(server.allowed_tools, list) else []
    label, about = server.server_label, " ".join((server.server_description or "", *allowed))
    return _DeferredTool(server, None, label, _words(label), _words(about))


def _names_of(tools: Sequence[Any], *, supports_namespaces: bool) -> Sequence[str]:
    names: list[str] = []
    for declared in tools:
        namespace = declared if isinstance(declared, NamespaceTool) else None
        names += [declared.server_label] if isinstance(declared, McpTool) else []
        names += (
            _model_name(tool, namespace, supports_namespaces=supports_namespaces)
            for tool in (namespace.tools if namespace else (declared,))
            if isinstance(tool, FunctionTool | CustomTool)
        )
    return names


def _model_name(tool: FunctionTool | CustomTool, namespace: NamespaceTool | None, *, supports_namespaces: bool) -> str:
    grouped = supports_namespaces and not isinstance(tool, CustomTool)
    return qualified_name(namespace.name if namespace else None, tool.name, supports_namespaces=grouped)


def _words(text: str) -> frozenset[str]:
    """Return the words of a text or a name, in lower case; plurals count as their singular."""
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return frozenset(word.removesuffix("s") for word in map(str.lower, _WORD.findall(split)) if len(word) > 1)
