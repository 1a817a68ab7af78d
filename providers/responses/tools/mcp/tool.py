"""MCP: the tools of a server that the request declares. They are listed once in a conversation, and stay what they
were: a tool that its server has changed since is not called."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import orjson
from pydantic import JsonValue

from apis.chat import ChatFunctionTool, FunctionDefinition, NativeToolName
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, ToolFailed, Unsupported
from apis.tool_runtime import ToolCall, ToolRuntime
from apis.wire.tool_choice import ChosenHostedTool, ChosenMcpTool
from apis.wire.tool_items import McpApprovalRequest, McpCallItem, McpListToolsItem, ToolSearchOutput
from apis.wire.tools import CustomTool as DeclaredCustom
from apis.wire.tools import FunctionTool as DeclaredFunction
from apis.wire.tools import McpTool, NamespaceTool, ToolSearchTool
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import HostedCall, ToolType, TypedTool
from providers.responses.tools.mcp.approvals import (
    ApprovalRequestCall,
    ApprovedCall,
    find_approved_calls,
    is_allowed,
    needs_approval,
)
from providers.responses.tools.mcp.calls import (
    MCP_CALL,
    MCP_CHECK_SERVER,
    MCP_LIST_TOOLS,
    InterruptedMcpCall,
    McpListToolsCall,
    McpToolCall,
)
from providers.responses.tools.names import DEFAULT_NAMESPACE, flat_name, model_namespace, qualified_name, safe_name
from providers.responses.tools.schemas import check_parameters
from providers.responses.tools.tool_context import ToolContext

_log = logging.getLogger(__name__)

_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SERVER_FIELDS: Final = ("server_label", "server_url", "connector_id", "authorization", "headers")
"""Fields of the declaration that its server is reached by, as the ToolRuntime takes them."""

_ServerTool = Mapping[str, Any]
"""One of a server's: `{name, description, input_schema, annotations}`."""


def _create_tool(declaration: McpTool, context: ToolContext) -> TypedTool:
    """The tools of one declared server, where an MCP client is configured."""
    if context.runtime is None or context.find_spec(MCP_LIST_TOOLS) is None or context.find_spec(MCP_CALL) is None:
        raise context.not_configured_error(
            "No MCP client is configured: give the run config's `tool_runtime` the provider `mcp`."
        )
    for field in ("command", "args", "env"):
        if getattr(declaration, field) is not None:
            raise InvalidRequest(
                f"Unknown parameter: '{context.param}.{field}'. A request cannot have a program run here.",
                param=f"{context.param}.{field}",
                code="unknown_parameter",
            )
    if declaration.tunnel_id is not None:
        raise Unsupported("Tunnels to MCP servers are not offered.", param=f"{context.param}.tunnel_id")
    if declaration.server_url is not None and declaration.connector_id is not None:
        raise InvalidRequest(
            "An MCP server has a `server_url` or a `connector_id`, not both.",
            param=f"{context.param}.connector_id",
            code="invalid_value",
        )
    if declaration.server_label == DEFAULT_NAMESPACE:
        raise InvalidRequest(
            f"The label '{DEFAULT_NAMESPACE}' stands for the tools that are no server's: choose another.",
            param=f"{context.param}.server_label",
            code="invalid_value",
        )
    for other in context.request.tools or ():
        if isinstance(other, McpTool) and _are_confusable(declaration.server_label, other.server_label):
            raise InvalidRequest(
                f"The labels '{declaration.server_label}' and '{other.server_label}' are too alike: choose others.",
                param=f"{context.param}.server_label",
                code="invalid_value",
            )
    return McpServerTools(declaration, context, context.runtime)


class McpServerTools(TypedTool):
    """The tools of one server. None are offered before they are listed."""

    def __init__(self, declaration: McpTool, context: ToolContext, runtime: ToolRuntime) -> None:
        self.label = declaration.server_label
        self.declaration_hash = _fingerprint(declaration)
        self._declaration = declaration
        self._runtime = runtime
        self._context = context
        approved = find_approved_calls(context.request, context.items)
        self._approved_calls = [each for each in approved if each.request.server_label == self.label]
        self._reserved_names = _client_tool_names(context)
        self._tools: dict[str, _ServerTool] = {}
        self._offered_tools: Sequence[ChatFunctionTool] = ()
        self._is_deferred = (
            bool(declaration.defer_loading)
            and _has_client_tool_search(context)
            and not _is_found_by_search(self.label, context)
        )
        listed = None if self._is_deferred else self._load_previous_listing()
        self._is_listed = listed is not None
        self._set_tools(listed or ())

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return self._offered_tools

    def names_for_choice(self, choice: ChosenHostedTool | ChosenMcpTool) -> Sequence[str]:
        wanted = choice.name if isinstance(choice, ChosenMcpTool) else None
        return [name for name, tool in self._tools.items() if wanted in (None, tool["name"])]

    def create_call(self, start: ToolCallStart) -> McpToolCall | ApprovalRequestCall:
        name = start.name if start.name in self._tools else start.name.removeprefix("functions.")
        tool = self._tools[name]
        start = replace(start, name=name)
        if needs_approval(self._declaration, tool):
            return ApprovalRequestCall(start, self.label, tool["name"])
        return McpToolCall(self, tool["name"], start)

    def calls_before_turn(self, turn_index: int) -> Iterable[HostedCall]:
        if turn_index > 0:
            return
        if not self._is_listed and not self._is_deferred:
            yield McpListToolsCall(self)
        for approved in self._approved_calls:
            yield self._build_approved_call(approved)

    async def check_declaration(self) -> None:
        if self._context.find_spec(MCP_CHECK_SERVER) is None:
            return
        try:
            await self._runtime.call(
                ToolCall(
                    MCP_CHECK_SERVER, MCP_CHECK_SERVER, {}, {"server": self._server_fields()}, self._context.tenant
                )
            )
        except ToolFailed as exc:
            detail: Mapping[str, Any] = exc.detail or {}
            param = f"{self._context.param}.{detail.get('param') or 'server_label'}"
            raise InvalidRequest(exc.message, param=param, code="invalid_value") from exc

    async def list_tools(self, call: ToolCall) -> Sequence[_ServerTool]:
        """Ask the server, and offer what it has. Raises ToolFailed."""
        options = {"server": {**self._server_fields(), "allowed_tools": self._allowed_tools()}}
        listed = await self._runtime.call(replace(call, options=options, tenant=self._context.tenant))
        sound: list[_ServerTool] = []
        for tool in listed.data:
            await asyncio.sleep(0)  # to check large schemas takes its time: other streams go on in between
            if _is_valid_tool(tool):
                sound.append(tool)
        self._is_listed = True
        return self._set_tools(sound)

    async def call_tool(self, call: ToolCall) -> str:
        """What the tool says. Raises ToolFailed, also for a tool that is not what it was when it was listed."""
        name = call.arguments["name"]
        pinned = [tool for tool in self._tools.values() if tool["name"] == name]
        if not pinned:
            raise ToolFailed(f"The MCP server '{self.label}' offers no tool '{name[:64]}' now.")
        options = {"server": {**self._server_fields(), "allowed_tools": self._allowed_tools(), "pinned": pinned}}
        return (await self._runtime.call(replace(call, options=options, tenant=self._context.tenant))).text

    def _build_approved_call(self, approved_call: ApprovedCall) -> HostedCall:
        request, kind = approved_call.request, InterruptedMcpCall if approved_call.was_started else McpToolCall
        before = self._context.tool_results.get(request.id)
        name = before.name if before else self._qualified_name(request.name)
        start = ToolCallStart(before.call_id if before else request.id, name)
        return kind(self, request.name, start, (request.arguments, request.id))

    def _set_tools(self, listed_tools: Sequence[_ServerTool]) -> Sequence[_ServerTool]:
        """Take the tools as those of the server; returns them without those that are called as another is."""
        tools: dict[str, _ServerTool] = {}
        for tool in listed_tools:
            name = self._qualified_name(tool["name"])
            if name in self._reserved_names or name in tools:
                _log.warning("the tool %r of MCP server %r is called as another is", tool["name"], self.label)
            else:
                tools[name] = tool
        self._tools = tools
        self._offered_tools = [self._build_function(tool) for tool in tools.values()]
        return [*tools.values()]

    def _build_function(self, tool: _ServerTool) -> ChatFunctionTool:
        group = model_namespace(self.label, supports_namespaces=self._context.supports_namespaces)
        about = [tool.get("description") or "", self._declaration.server_description or ""]
        function = FunctionDefinition(
            name=safe_name(tool["name"]) if group else flat_name(self.label, tool["name"]),
            description="\n".join(filter(None, about)),
            parameters=tool["input_schema"],
            namespace=group,
        )
        return ChatFunctionTool(function=function)

    def _qualified_name(self, name: str) -> str:
        return qualified_name(self.label, name, supports_namespaces=self._context.supports_namespaces)

    def _server_fields(self) -> dict[str, Any]:
        fields = {name: getattr(self._declaration, name) for name in _SERVER_FIELDS}
        return {name: value for name, value in fields.items() if value is not None}

    def _allowed_tools(self) -> Any:
        allowed = self._declaration.allowed_tools
        return allowed if allowed is None or isinstance(allowed, list) else allowed.model_dump(exclude_none=True)

    def _load_previous_listing(self) -> Sequence[_ServerTool] | None:
        """The tools by their last list in the conversation, where it is a list of what is declared now."""
        for item in reversed(self._context.items):
            if not isinstance(item, McpListToolsItem) or item.server_label != self.label or item.error is not None:
                continue
            # a list whose client dropped what it does not know counts as one of the same declaration
            if (item.model_extra or {}).get("declaration", self.declaration_hash) != self.declaration_hash:
                return None
            tools = [tool.model_dump() for tool in item.tools]
            return [tool for tool in tools if is_allowed(self._declaration, tool) and _is_valid_tool(tool)]
        return None


def _has_client_tool_search(context: ToolContext) -> bool:
    """Whether the client searches for tools: then those that are loaded late wait for that."""
    tools = context.request.tools or ()
    return any(isinstance(tool, ToolSearchTool) and tool.execution == "client" for tool in tools)


def _is_found_by_search(label: str, context: ToolContext) -> bool:
    found = (tool for item in context.items if isinstance(item, ToolSearchOutput) for tool in item.tools)
    return any(isinstance(tool, McpTool) and tool.server_label == label for tool in found)


def _are_confusable(one: str, other: str) -> bool:
    """Whether tools of both could have one name: `b__x` of `a` and `x` of `a__b`, for one."""
    return one != other and f"{one}__".startswith(f"{other}__")


def _fingerprint(declaration: McpTool) -> str:
    """Of the server and of which of its tools are allowed; credentials change while a server stays the same."""
    told = (declaration.server_url, declaration.connector_id, declaration.model_dump(include={"allowed_tools"}))
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _client_tool_names(context: ToolContext) -> frozenset[str]:
    """What the client's own tools are called: a server must not pass for one of them."""
    names: set[str] = set()
    for tool in context.request.tools or ():
        match tool:
            case DeclaredFunction(name=name) | DeclaredCustom(name=name):
                names.add(name)
            case NamespaceTool(name=group, tools=tools):
                names |= {
                    qualified_name(group, each.name, supports_namespaces=context.supports_namespaces) for each in tools
                }
            case _:
                pass
    return frozenset(names)


def _is_valid_tool(tool: _ServerTool) -> bool:
    """Whether a model can be offered it: in a list that a client sends along there may be anything."""
    name: str = tool["name"]
    schema: Any = tool.get("input_schema")
    if not _NAME_PATTERN.fullmatch(name) or not isinstance(schema, dict):
        return False
    try:
        check_parameters([("tools", name, cast(dict[str, JsonValue], schema), False)])
    except InvalidRequest as exc:
        _log.warning("a tool of an MCP server cannot be offered: %s", exc.message)
        return False
    return True


def _call_from_item(
    item: McpCallItem | McpApprovalRequest, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord | None:
    if isinstance(item, McpApprovalRequest) or (item.output is None and item.error is None):
        return None
    error = item.error if isinstance(item.error, str) else orjson.dumps(item.error).decode()
    stored = ToolResultRecord(item.id or "", "", item.arguments, item.output if item.output is not None else error)
    return _call_for_model(item, stored, native_tools)


def _call_for_model(
    item: McpCallItem | McpApprovalRequest, stored: ToolResultRecord, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord:
    name = qualified_name(item.server_label, item.name, supports_namespaces=bool(native_tools))
    return replace(stored, name=name)


MCP: Final = ToolType(
    McpTool,
    _create_tool,
    (McpCallItem, McpApprovalRequest),
    _call_from_item,
    call_for_model=_call_for_model,
    depends_on_model=True,
)
