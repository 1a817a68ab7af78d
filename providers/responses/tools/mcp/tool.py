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

from apis.chat import Function, FunctionTool
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, ToolFailed, Unsupported
from apis.tool_runtime import ToolCall, ToolRuntime
from apis.wire.tool_choice import ChosenHosted, ChosenMcp
from apis.wire.tool_items import McpListToolsItem, ToolSearchOutput
from apis.wire.tools import CustomTool as DeclaredCustom
from apis.wire.tools import FunctionTool as DeclaredFunction
from apis.wire.tools import McpTool, NamespaceTool, ToolSearchTool
from providers.responses.tools.call import HostedCall, TypedTool
from providers.responses.tools.mcp.approvals import (
    ApprovalRequest,
    Approved,
    approved_requests,
    is_allowed,
    needs_approval,
)
from providers.responses.tools.mcp.calls import CALL, CHECK, LIST, BrokenOffCall, McpListing, McpToolCall
from providers.responses.tools.names import OUTERMOST, called_name, flat_name, group_of, safe_name
from providers.responses.tools.schemas import check_parameters
from providers.responses.tools.tool_context import Setting

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SERVER: Final = ("server_label", "server_url", "connector_id", "authorization", "headers")
"""Fields of the declaration that its server is reached by, as the ToolRuntime takes them."""

Tool = Mapping[str, Any]
"""One of a server's: `{name, description, input_schema, annotations}`."""


def make_mcp(declared: McpTool, setting: Setting) -> TypedTool:
    """The tools of one declared server, where an MCP client is configured."""
    if setting.runtime is None or setting.spec(LIST) is None or setting.spec(CALL) is None:
        raise setting.missing("No MCP client is configured: give the run config's `tool_runtime` the provider `mcp`.")
    for field in ("command", "args", "env"):
        if getattr(declared, field) is not None:
            raise InvalidRequest(
                f"Unknown parameter: '{setting.param}.{field}'. A request cannot have a program run here.",
                param=f"{setting.param}.{field}",
                code="unknown_parameter",
            )
    if declared.tunnel_id is not None:
        raise Unsupported("Tunnels to MCP servers are not offered.", param=f"{setting.param}.tunnel_id")
    if declared.server_url is not None and declared.connector_id is not None:
        raise InvalidRequest(
            "An MCP server has a `server_url` or a `connector_id`, not both.",
            param=f"{setting.param}.connector_id",
            code="invalid_value",
        )
    if declared.server_label == OUTERMOST:
        raise InvalidRequest(
            f"The label '{OUTERMOST}' stands for the tools that are no server's: choose another.",
            param=f"{setting.param}.server_label",
            code="invalid_value",
        )
    for other in setting.request.tools or ():
        if isinstance(other, McpTool) and _are_confusable(declared.server_label, other.server_label):
            raise InvalidRequest(
                f"The labels '{declared.server_label}' and '{other.server_label}' are too alike: choose others.",
                param=f"{setting.param}.server_label",
                code="invalid_value",
            )
    return Mcp(declared, setting, setting.runtime)


class Mcp(TypedTool):
    """The tools of one server. None are offered before they are listed."""

    def __init__(self, declared: McpTool, setting: Setting, runtime: ToolRuntime) -> None:
        self.label = declared.server_label
        self.declaration = _fingerprint(declared)
        self._declared = declared
        self._runtime = runtime
        self._setting = setting
        approved = approved_requests(setting.request, setting.items)
        self._approved = [each for each in approved if each.request.server_label == self.label]
        self._taken = _own_names(setting)
        self._tools: dict[str, Tool] = {}
        self._offered: Sequence[FunctionTool] = ()
        self._waits = bool(declared.defer_loading) and _is_searched_for(setting) and not _is_found(self.label, setting)
        listed = None if self._waits else self._listed_before()
        self._is_listed = listed is not None
        self._offer(listed or ())

    @property
    def offered(self) -> Sequence[FunctionTool]:
        return self._offered

    def chosen(self, choice: ChosenHosted | ChosenMcp) -> Sequence[str]:
        wanted = choice.name if isinstance(choice, ChosenMcp) else None
        return [name for name, tool in self._tools.items() if wanted in (None, tool["name"])]

    def begin(self, start: ToolCallStart) -> McpToolCall | ApprovalRequest:
        name = start.name if start.name in self._tools else start.name.removeprefix("functions.")
        tool = self._tools[name]
        start = replace(start, name=name)
        if needs_approval(self._declared, tool):
            return ApprovalRequest(start, self.label, tool["name"])
        return McpToolCall(self, tool["name"], start)

    def before(self, turn: int) -> Iterable[HostedCall]:
        if turn > 0:
            return
        if not self._is_listed and not self._waits:
            yield McpListing(self)
        for approved in self._approved:
            yield self._approved_call(approved)

    async def check(self) -> None:
        if self._setting.spec(CHECK) is None:
            return
        try:
            await self._runtime.call(ToolCall(CHECK, CHECK, {}, {"server": self._server()}, self._setting.tenant))
        except ToolFailed as exc:
            detail: Mapping[str, Any] = exc.detail or {}
            param = f"{self._setting.param}.{detail.get('param') or 'server_label'}"
            raise InvalidRequest(exc.message, param=param, code="invalid_value") from exc

    async def list_tools(self, call: ToolCall) -> Sequence[Tool]:
        """Ask the server, and offer what it has. Raises ToolFailed."""
        options = {"server": {**self._server(), "allowed_tools": self._allowed()}}
        listed = await self._runtime.call(replace(call, options=options, tenant=self._setting.tenant))
        sound: list[Tool] = []
        for tool in listed.data:
            await asyncio.sleep(0)  # to check large schemas takes its time: other streams go on in between
            if _is_sound(tool):
                sound.append(tool)
        self._is_listed = True
        return self._offer(sound)

    async def call_tool(self, call: ToolCall) -> str:
        """What the tool says. Raises ToolFailed, also for a tool that is not what it was when it was listed."""
        name = call.arguments["name"]
        pinned = [tool for tool in self._tools.values() if tool["name"] == name]
        if not pinned:
            raise ToolFailed(f"The MCP server '{self.label}' offers no tool '{name[:64]}' now.")
        options = {"server": {**self._server(), "allowed_tools": self._allowed(), "pinned": pinned}}
        return (await self._runtime.call(replace(call, options=options, tenant=self._setting.tenant))).text

    def _approved_call(self, approved: Approved) -> HostedCall:
        request, kind = approved.request, BrokenOffCall if approved.begun else McpToolCall
        before = self._setting.told.get(request.id)
        name = before.name if before else self._called(request.name)
        start = ToolCallStart(before.call_id if before else request.id, name)
        return kind(self, request.name, start, (request.arguments, request.id))

    def _offer(self, listed: Sequence[Tool]) -> Sequence[Tool]:
        """Take the tools as those of the server; returns them without those that are called as another is."""
        tools: dict[str, Tool] = {}
        for tool in listed:
            name = self._called(tool["name"])
            if name in self._taken or name in tools:
                _log.warning("the tool %r of MCP server %r is called as another is", tool["name"], self.label)
            else:
                tools[name] = tool
        self._tools = tools
        self._offered = [self._function(tool) for tool in tools.values()]
        return [*tools.values()]

    def _function(self, tool: Tool) -> FunctionTool:
        group = group_of(self.label, grouped=self._setting.grouped)
        about = [tool.get("description") or "", self._declared.server_description or ""]
        function = Function(
            name=safe_name(tool["name"]) if group else flat_name(self.label, tool["name"]),
            description="\n".join(filter(None, about)),
            parameters=tool["input_schema"],
            namespace=group,
        )
        return FunctionTool(function=function)

    def _called(self, name: str) -> str:
        return called_name(self.label, name, grouped=self._setting.grouped)

    def _server(self) -> dict[str, Any]:
        fields = {name: getattr(self._declared, name) for name in _SERVER}
        return {name: value for name, value in fields.items() if value is not None}

    def _allowed(self) -> Any:
        allowed = self._declared.allowed_tools
        return allowed if allowed is None or isinstance(allowed, list) else allowed.model_dump(exclude_none=True)

    def _listed_before(self) -> Sequence[Tool] | None:
        """The tools by their last list in the conversation, where it is a list of what is declared now."""
        for item in reversed(self._setting.items):
            if not isinstance(item, McpListToolsItem) or item.server_label != self.label or item.error is not None:
                continue
            # a list whose client dropped what it does not know counts as one of the same declaration
            if (item.model_extra or {}).get("declaration", self.declaration) != self.declaration:
                return None
            tools = [tool.model_dump() for tool in item.tools]
            return [tool for tool in tools if is_allowed(self._declared, tool) and _is_sound(tool)]
        return None


def _is_searched_for(setting: Setting) -> bool:
    """Whether the client searches for tools: then those that are loaded late wait for that."""
    tools = setting.request.tools or ()
    return any(isinstance(tool, ToolSearchTool) and tool.execution == "client" for tool in tools)


def _is_found(label: str, setting: Setting) -> bool:
    found = (tool for item in setting.items if isinstance(item, ToolSearchOutput) for tool in item.tools)
    return any(isinstance(tool, McpTool) and tool.server_label == label for tool in found)


def _are_confusable(one: str, other: str) -> bool:
    """Whether tools of both could have one name: `b__x` of `a` and `x` of `a__b`, for one."""
    return one != other and f"{one}__".startswith(f"{other}__")


def _fingerprint(declared: McpTool) -> str:
    """Of the server and of which of its tools are allowed; credentials change while a server stays the same."""
    told = (declared.server_url, declared.connector_id, declared.model_dump(include={"allowed_tools"}))
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _own_names(setting: Setting) -> frozenset[str]:
    """What the client's own tools are called: a server must not pass for one of them."""
    names: set[str] = set()
    for tool in setting.request.tools or ():
        match tool:
            case DeclaredFunction(name=name) | DeclaredCustom(name=name):
                names.add(name)
            case NamespaceTool(name=group, tools=tools):
                names |= {called_name(group, each.name, grouped=setting.grouped) for each in tools}
            case _:
                pass
    return frozenset(names)


def _is_sound(tool: Tool) -> bool:
    """Whether a model can be offered it: in a list that a client sends along there may be anything."""
    name: str = tool["name"]
    schema: Any = tool.get("input_schema")
    if not _NAME.fullmatch(name) or not isinstance(schema, dict):
        return False
    try:
        check_parameters([("tools", name, cast(dict[str, JsonValue], schema), False)])
    except InvalidRequest as exc:
        _log.warning("a tool of an MCP server cannot be offered: %s", exc.message)
        return False
    return True
