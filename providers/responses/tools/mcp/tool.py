"""The tools of one declared MCP server. They are listed once in a conversation, and again before the model's next turn
where one that it has called has changed since then."""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import msgspec
import orjson

from apis.chat import ChatFunctionTool, FunctionDefinition, NativeToolName
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, ToolFailed, Unsupported
from apis.tool_servers import (
    InvalidDeclaration,
    ServerTool,
    ToolChanged,
    ToolServers,
    allowed_tool_filter,
    is_tool_name,
    matches_filter,
)
from apis.wire.tool_choice import ChosenHostedTool, ChosenMcpTool
from apis.wire.tool_items import ListedTool, McpApprovalRequest, McpCallItem, McpListToolsItem, ToolSearchOutput
from apis.wire.tools import CustomTool as DeclaredCustom
from apis.wire.tools import FunctionTool as DeclaredFunction
from apis.wire.tools import McpTool, NamespaceTool, ToolSearchTool
from providers.common.grammars.schemas import check_parameters
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import HostedCall, ToolFunctions, TypedTool
from providers.responses.tools.mcp.approvals import (
    ApprovalRequestCall,
    ApprovedCall,
    find_approved_calls,
    needs_approval,
)
from providers.responses.tools.mcp.authorization import VaultAuthorization, has_authorization
from providers.responses.tools.mcp.calls import InterruptedMcpCall, McpListToolsCall, McpToolCall
from providers.responses.tools.names import DEFAULT_NAMESPACE, flat_name, model_namespace, qualified_name, safe_name
from providers.responses.tools.tool_context import ToolContext

_log = logging.getLogger(__name__)

_MAX_RELISTS: Final = 3
"""Times that the tools of a server are listed again in one response, however often they change."""


def _create_tool(declaration: McpTool, context: ToolContext) -> TypedTool:
    """Return the tools of one declared server. Raises Unsupported where the config has no MCP client."""
    if context.tool_servers is None:
        raise context.not_configured_error(
            "No MCP client is configured: give the run config's `tool_servers` the provider `mcp`."
        )
    for field in ("command", "args", "env"):
        if getattr(declaration, field) is not None:
            raise InvalidRequest(
                f"Unknown parameter: '{context.param}.{field}'. A request cannot have a program run here.",
                param=f"{context.param}.{field}",
                code="unknown_parameter",
            )
    if declaration.tunnel_id is not None:
        param = f"{context.param}.tunnel_id"
        raise Unsupported(f"'{param}' is not offered by this server. It has no tunnels to MCP servers.", param=param)
    if declaration.credential_id is not None and not context.request.vault_ids:
        param = f"{context.param}.credential_id"
        message = f"'{param}' names a credential, and the request names no vaults by `vault_ids`."
        raise InvalidRequest(message, param=param, code="invalid_value")
    if declaration.credential_id is not None and has_authorization(declaration):
        param = f"{context.param}.credential_id"
        message = f"'{param}' and an authorization of the request are both set: leave one of them out."
        raise InvalidRequest(message, param=param, code="invalid_value")
    if declaration.server_label == DEFAULT_NAMESPACE:
        raise _invalid_label(
            context, f"The label '{DEFAULT_NAMESPACE}' stands for the tools that are no server's: choose another."
        )
    for other in context.request.tools or ():
        if isinstance(other, McpTool) and _are_confusable(declaration.server_label, other.server_label):
            raise _invalid_label(
                context,
                f"The labels '{declaration.server_label}' and '{other.server_label}' are too alike: choose others.",
            )
    return McpServerTools(declaration, context, context.tool_servers)


def _invalid_label(context: ToolContext, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=f"{context.param}.server_label", code="invalid_value")


class McpServerTools(TypedTool):
    """The tools of one server, offered once they are listed."""

    def __init__(self, declaration: McpTool, context: ToolContext, servers: ToolServers) -> None:
        self.label = declaration.server_label
        self.declaration_hash = _fingerprint(declaration)
        self._declaration = declaration
        self._servers = servers
        self._policy = servers.find_policy(declaration)
        self._context = context
        self._authorization = VaultAuthorization(declaration, context)
        approved = find_approved_calls(context.request, context.items)
        self._approved_calls = [call for call in approved if call.request.server_label == self.label]
        self._reserved_names = _client_tool_names(context)
        self._tools: dict[str, ServerTool] = {}
        self._offered_tools: Sequence[ChatFunctionTool] = ()
        self._is_deferred = (
            bool(declaration.defer_loading)
            and any(isinstance(tool, ToolSearchTool) for tool in context.request.tools or ())
            and not _is_search_result(self.label, context)
        )
        listing = None if self._is_deferred else self._load_previous_listing()
        self._is_listed = listing is not None
        self._has_changed = False
        self._was_requested = False
        self._relist_count = 0
        self._set_tools(listing or ())

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return self._offered_tools

    def names_for_choice(self, choice: ChosenHostedTool | ChosenMcpTool) -> Sequence[str]:
        tool_name = choice.name if isinstance(choice, ChosenMcpTool) else None
        return [name for name, tool in self._tools.items() if tool_name in (None, tool.name)]

    def create_call(self, start: ToolCallStart) -> McpToolCall | ApprovalRequestCall:
        name = start.name if start.name in self._tools else start.name.removeprefix("functions.")
        tool = self._tools[name]
        start = msgspec.structs.replace(start, name=name)
        if needs_approval(self._declaration, self._policy, tool):
            return ApprovalRequestCall(start, self._declaration, tool.name)
        return McpToolCall(self, tool.name, start)

    def calls_before_turn(self, turn_index: int) -> Iterable[HostedCall]:
        if self._is_deferred and self.label in self._context.loaded_servers:
            self._is_deferred = self._was_requested = False
        if not (self._is_listed or self._is_deferred or self._was_requested):
            self._was_requested = True
            yield McpListToolsCall(self)
        if turn_index == 0:
            for approved in self._approved_calls:
                yield self._build_approved_call(approved)
        if self._has_changed and self._relist_count < _MAX_RELISTS:
            self._relist_count += 1
            yield McpListToolsCall(self)

    async def check_declaration(self) -> None:
        try:
            await self._servers.check_declaration(self._declaration, tenant=self._context.tenant)
        except InvalidDeclaration as exc:
            param = f"{self._context.param}.{exc.field_name}"
            raise InvalidRequest(exc.message, param=param, code="invalid_value") from exc

    async def list_tools(self) -> Sequence[ServerTool]:
        """Request the server's tools and offer them. Raises ToolFailed."""
        valid_tools: list[ServerTool] = []
        listed = await self._authorization.use(
            lambda declaration: self._servers.list_tools(declaration, tenant=self._context.tenant)
        )
        for tool in listed:
            await asyncio.sleep(0)  # checking large schemas takes long: other streams run in between
            if _is_valid_tool(tool):
                valid_tools.append(tool)
        self._is_listed = True
        self._has_changed = False
        return self._set_tools(valid_tools)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the tool's result, also where the tool has changed since it was listed: the model's next turn then has
        the new list. Raises ToolFailed, also for a changed tool whose calls need an approval: no one has seen the tool
        as it is now."""
        tool = next((tool for tool in self._tools.values() if tool.name == name), None)
        if tool is None:
            raise ToolFailed(f"The MCP server '{self.label}' offers no tool '{name[:64]}' now.")
        try:
            return await self._call_listed(tool, arguments)
        except ToolChanged as exc:
            self._has_changed = True
            if exc.tool is None:
                raise
            if needs_approval(self._declaration, self._policy, exc.tool):
                raise ToolFailed(
                    f"{exc.message} It was not called: as it is now, a call of it needs an approval of its own."
                ) from exc
            return await self._call_listed(exc.tool, arguments)

    async def _call_listed(self, tool: ServerTool, arguments: Mapping[str, Any]) -> str:
        return await self._authorization.use(
            lambda declaration: self._servers.call_tool(
                declaration, tool.name, arguments, tenant=self._context.tenant, listed_tool=tool
            )
        )

    def _build_approved_call(self, approved_call: ApprovedCall) -> HostedCall:
        request = approved_call.request
        requested_call = self._context.tool_results.get(request.id)
        if requested_call is None:
            start = ToolCallStart(request.id, self._qualified_name(request.name))
        else:
            start = ToolCallStart(requested_call.call_id, requested_call.name)
        call_type = InterruptedMcpCall if approved_call.was_started else McpToolCall
        return call_type(self, request.name, start, (request.arguments, request.id))

    def _set_tools(self, listed_tools: Sequence[ServerTool]) -> Sequence[ServerTool]:
        """Offer the tools but for those whose names are taken; returns the offered ones."""
        tools: dict[str, ServerTool] = {}
        for tool in listed_tools:
            name = self._qualified_name(tool.name)
            if name in self._reserved_names or name in tools:
                _log.warning("the tool %r of MCP server %r is called as another is", tool.name, self.label)
            else:
                tools[name] = tool
        self._tools = tools
        self._offered_tools = [self._build_function(tool) for tool in tools.values()]
        return [*tools.values()]

    def _build_function(self, tool: ServerTool) -> ChatFunctionTool:
        group = model_namespace(self.label, supports_namespaces=self._context.supports_namespaces)
        descriptions = [tool.description, self._declaration.server_description]
        function = FunctionDefinition(
            name=safe_name(tool.name) if group else flat_name(self.label, tool.name),
            description="\n".join(filter(None, descriptions)),
            parameters=tool.input_schema,
            namespace=group,
        )
        return ChatFunctionTool(function=function)

    def _qualified_name(self, name: str) -> str:
        return qualified_name(self.label, name, supports_namespaces=self._context.supports_namespaces)

    def _load_previous_listing(self) -> Sequence[ServerTool] | None:
        """Return the server's last tool list in the conversation, or None where it is of another declaration."""
        allowed = allowed_tool_filter(self._declaration)
        for item in reversed(self._context.items.of(McpListToolsItem)):
            if item.server_label != self.label or item.error is not None:
                continue
            # a client may drop the field, which it does not know: then the list counts as one of this declaration
            if (item.model_extra or {}).get("declaration", self.declaration_hash) != self.declaration_hash:
                return None
            tools = (read_listed_tool(listed) for listed in item.tools)
            return [
                tool
                for tool in tools
                if tool and matches_filter(allowed, tool) and self._policy.allows(tool.name) and _is_valid_tool(tool)
            ]
        return None


def read_listed_tool(listed: ListedTool) -> ServerTool | None:
    """Return the tool of a list that a client may have sent, or None where its schema is none. Empty and absent fields
    count as equal."""
    if not isinstance(listed.input_schema, dict):
        return None
    annotations: Any = (listed.model_extra or {}).get("annotations")
    return ServerTool(
        listed.name,
        listed.description or "",
        listed.input_schema,
        cast(dict[str, Any], annotations) if isinstance(annotations, dict) else {},
    )


def _is_search_result(label: str, context: ToolContext) -> bool:
    results = (tool for item in context.items.of(ToolSearchOutput) for tool in item.tools)
    return any(isinstance(tool, McpTool) and tool.server_label == label for tool in results)


def _are_confusable(one: str, other: str) -> bool:
    """Return True where tools of both could have one name, such as `b__x` of `a` and `x` of `a__b`."""
    return one != other and f"{one}__".startswith(f"{other}__")


def _fingerprint(declaration: McpTool) -> str:
    """Return a hash of the server and its allowed tools; a server's credentials may change."""
    fields = (declaration.server_url, declaration.connector_id, declaration.model_dump(include={"allowed_tools"}))
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _client_tool_names(context: ToolContext) -> frozenset[str]:
    """Return the names of the client's own tools, which no server may take."""
    names: set[str] = set()
    for tool in context.request.tools or ():
        match tool:
            case DeclaredFunction(name=name) | DeclaredCustom(name=name):
                names.add(name)
            case NamespaceTool(name=group, tools=tools):
                names |= {
                    qualified_name(group, function.name, supports_namespaces=context.supports_namespaces)
                    for function in tools
                }
            case _:
                pass
    return frozenset(names)


def _is_valid_tool(tool: ServerTool) -> bool:
    """Return True where a model can be offered the tool; a list that a client sends may hold any name and schema."""
    if not is_tool_name(tool.name):
        return False
    try:
        check_parameters([("tools", tool.name, tool.input_schema, False)])
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


MCP: Final = ToolFunctions(_create_tool, _call_from_item, call_for_model=_call_for_model)
