"""From the fields of a request to an agent as the API shows it, and from there to the fields of a response."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import orjson
from pydantic import BaseModel, TypeAdapter

from apis.agents.agents import AgentOptions
from apis.agents.tools import CONNECTOR_SCHEME
from apis.chat import ChatRequest, ChatTool
from apis.errors import InvalidRequest, Unsupported
from apis.responses import CreateResponse, ReasoningOptions, TextOptions
from apis.wire.tools import Tool

Json = dict[str, Any]
_DEFAULTS: Final[Json] = {
    "instructions": None,
    "tools": [],
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "service_tier": "auto",
    "multi_agent": {"enabled": False, "max_concurrent_subagents": None},
    "compaction": None,
    "experimental": None,
}
_TOOL_DEFAULTS: Final[Mapping[str, Json]] = {
    "function": {"defer_loading": False},
    "tool_search": {},
    "mcp": {
        "allowed_tools": None,
        "connection_origin": "service",
        "credential_id": None,
        "request_metadata": {},
        "required": False,
    },
    "web_search": {"mode": "live", "allowed_domains": None, "context_size": "medium", "location": None},
}
_MAX_BYTES: Final = 2 * 1024 * 1024
"""Bytes of the JSON of an agent."""
_TRANSPORT_SECRETS: Final = ("authorization", "headers")
_IS_SPLIT: Final = "is_split"
"""Name of a field of a stored transport whose secrets are elsewhere."""
_SCHEMA_NAME: Final = "output"
_MAX_CONCURRENT: Final = 6
"""Subagents of a session that work at once, unless its agent says so."""


def describe_options(options: AgentOptions) -> Json:
    """Return the fields of an agent that are set in a request, each complete; one that is null has its default."""
    fields: Json = {}
    for name in options.model_fields_set & _DEFAULTS.keys():
        value = getattr(options, name)
        if value is None:
            fields[name] = _DEFAULTS[name]
        elif name == "tools":
            fields[name] = describe_tools(value)
        elif name == "multi_agent":
            limit = (value.max_concurrent_subagents or _MAX_CONCURRENT) if value.enabled else None
            fields[name] = {"enabled": value.enabled, "max_concurrent_subagents": limit}
        else:
            sent = value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, BaseModel) else value
            default = _DEFAULTS[name]
            fields[name] = {**default, **sent} if isinstance(default, dict) else sent
    return fields


def describe_tools(tools: Sequence[BaseModel]) -> list[Json]:
    """Return tools with all their fields."""
    described: list[Json] = []
    for tool in tools:
        sent = tool.model_dump(exclude_none=True, by_alias=True)
        described.append({**_TOOL_DEFAULTS[sent["type"]], **sent})
    return described


def split_secrets(tools: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Return tools without the secrets of their MCP servers, and these, each with its server."""
    without: list[Json] = []
    secrets: list[Json] = []
    for tool in tools:
        transport: Json = tool.get("transport", {})
        own = {name: transport[name] for name in _TRANSPORT_SECRETS if name in transport}
        if own:
            secrets.append({**_server_of(tool), "secrets": own})
            rest = {name: value for name, value in transport.items() if name not in own}
            without.append({**tool, "transport": {**rest, _IS_SPLIT: True}})
        else:
            without.append(tool)
    return without, secrets


def has_split(tools: Sequence[Json]) -> bool:
    """Return True for tools from which secrets were taken."""
    return any(_IS_SPLIT in tool.get("transport", {}) for tool in tools)


def join_secrets(tools: Sequence[Json], secrets: Sequence[Json]) -> list[Json]:
    """Return tools with the secrets of their own servers: others may have come in their place meanwhile."""
    joined: list[Json] = []
    for tool in tools:
        transport: Json = tool.get("transport", {})
        if _IS_SPLIT in transport:
            rest = {name: value for name, value in transport.items() if name != _IS_SPLIT}
            own: list[Json] = [each["secrets"] for each in secrets if _server_of(tool).items() <= each.items()]
            joined.append({**tool, "transport": {**rest, **(own[0] if own else {})}})
        else:
            joined.append(tool)
    return joined


def _server_of(tool: Json) -> Json:
    return {"server_label": tool["server_label"], "server_url": tool["transport"]["server_url"]}


def complete_agent(fields: Json) -> Json:
    """Return the fields of an agent with the defaults of those that are absent."""
    return {**_DEFAULTS, **fields}


def check_size(fields: Json, prefix: str = "") -> Json:
    """Return the fields of an agent. Raises InvalidRequest for one that is too large, with its largest field, after
    `prefix`, as `param`: each event about the status of a session repeats its agent."""
    sizes = {name: len(orjson.dumps(value)) for name, value in fields.items()}
    if sum(sizes.values()) > _MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidRequest(f"An agent has at most {_MAX_BYTES} bytes as JSON.", param=f"{prefix}{largest}")
    return fields


def show_tools(tools: Sequence[Json], *, in_session: bool) -> list[Json]:
    """Return tools as the API shows them: without secrets, and in a session without the tool search."""
    visible_tools: list[Json] = []
    for tool in tools:
        if tool["type"] == "mcp":
            transport = {"type": "http", "server_url": tool["transport"]["server_url"]}
            if not in_session:
                transport["headers"] = tool["transport"].get("headers", {})
            visible_tools.append({**tool, "transport": transport})
        elif tool["type"] != "tool_search" or not in_session:
            visible_tools.append(tool)
    return visible_tools


def build_request_fields(agent: Json) -> Json:
    """Return the fields of a response that an agent stands for, without those that have their defaults."""
    fields: Json = {"model": agent["model"], "instructions": agent["instructions"]}
    fields["tools"] = [built for tool in agent["tools"] if (built := _build_tool(tool)) is not None]
    fields["reasoning"] = _without_null(agent["reasoning"])
    text = agent["text"]
    options: Json = {} if text["verbosity"] == "medium" else {"verbosity": text["verbosity"]}
    if text["format"]["type"] == "json_schema":
        options["format"] = {
            "type": "json_schema",
            "name": _SCHEMA_NAME,
            "schema": text["format"]["schema"],
            "strict": True,
        }
    fields["text"] = options
    fields["service_tier"] = None if agent["service_tier"] == "auto" else agent["service_tier"]
    return {name: value for name, value in fields.items() if value}


def _build_tool(tool: Json) -> Json | None:
    match tool["type"]:
        case "function":
            return {**tool, "strict": False}
        case "mcp":
            return _build_mcp_tool(tool)
        case "web_search" if tool["mode"] == "disabled":
            return None
        case "web_search":
            fields: Json = {"type": "web_search", "search_context_size": tool["context_size"]}
            if tool["allowed_domains"]:
                fields["filters"] = {"allowed_domains": tool["allowed_domains"]}
            if tool["location"]:
                fields["user_location"] = {"type": "approximate", **tool["location"]}
            if tool["mode"] == "cached":
                fields["external_web_access"] = False
            return fields
        case _:
            return {"type": tool["type"]}


def _build_mcp_tool(tool: Json) -> Json:
    transport = tool["transport"]
    fields: Json = {
        "type": "mcp",
        "server_label": tool["server_label"],
        "require_approval": tool.get("require_approval") or "never",
    }
    if tool["credential_id"] is not None:
        fields["credential_id"] = tool["credential_id"]
    if tool["allowed_tools"] is not None:
        fields["allowed_tools"] = tool["allowed_tools"]
    if transport["server_url"].startswith(CONNECTOR_SCHEME):
        return {**fields, "connector_id": transport["server_url"].removeprefix(CONNECTOR_SCHEME)}
    secrets = _without_null({name: transport.get(name) for name in _TRANSPORT_SECRETS})
    return {**fields, "server_url": transport["server_url"], **secrets}


def apply_to_response(agent: Json, request: CreateResponse) -> CreateResponse:
    """Return a request whose model is an agent, with the agent's fields put under its own: instructions are joined,
    tools are added, and all else is the request's where that has it."""
    fields = build_request_fields(agent)
    changes: Json = {"model": fields["model"]}
    changes["instructions"] = _join_instructions(fields.get("instructions"), request.instructions)
    if tools := fields.get("tools"):
        own = _tools_adapter().validate_python(tools)
        changes["tools"] = [*_without_replaced(own, request.tools or ()), *(request.tools or ())]
    if reasoning := fields.get("reasoning"):
        changes["reasoning"] = _put_under(ReasoningOptions.model_validate(reasoning), request.reasoning)
    if text := fields.get("text"):
        changes["text"] = _put_under(TextOptions.model_validate(text), request.text)
    if request.service_tier is None and "service_tier" in fields:
        changes["service_tier"] = fields["service_tier"]
    return request.model_copy(update=changes)


def apply_to_chat(agent: Json, request: ChatRequest) -> ChatRequest:
    """Return a chat whose model is an agent, with the agent's fields put under its own. Raises Unsupported for an agent
    with tools that only a response runs."""
    fields = build_request_fields(agent)
    changes: Json = {"model": fields["model"]}
    if instructions := fields.get("instructions"):
        message = type(request.messages[0]).model_validate({"role": "system", "content": instructions})
        changes["messages"] = [message, *request.messages]
    if tools := fields.get("tools"):
        own = [_to_chat_tool(tool) for tool in tools]
        changes["tools"] = [*_without_replaced(own, request.tools or ()), *(request.tools or ())]
    reasoning, text = fields.get("reasoning", {}), fields.get("text", {})
    if request.reasoning_effort is None and "effort" in reasoning:
        changes["reasoning_effort"] = reasoning["effort"]
    if request.verbosity is None and "verbosity" in text:
        changes["verbosity"] = text["verbosity"]
    if request.response_format is None and "format" in text:
        schema = {name: value for name, value in text["format"].items() if name != "type"}
        built = ChatRequest.model_validate(
            {
                "model": fields["model"],
                "messages": [{"role": "user", "content": ""}],
                "response_format": {"type": "json_schema", "json_schema": schema},
            }
        )
        changes["response_format"] = built.response_format
    return request.model_copy(update=changes)


def _to_chat_tool(tool: Json) -> ChatTool:
    if tool["type"] != "function":
        raise Unsupported(
            f"This agent has the tool '{tool['type']}', which chat completions do not run: use responses or sessions.",
            param="model",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters")}
    return _chat_tools_adapter().validate_python({"type": "function", "function": function})


def _without_replaced(tools: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the tools that none of the others has the name, or the label, of."""
    names = {_tool_name(tool) for tool in others}
    return [tool for tool in tools if _tool_name(tool) not in names]


def _tool_name(tool: Any) -> tuple[str, str]:
    return tool.type, getattr(tool, "name", None) or getattr(tool, "server_label", "")


def _join_instructions(first: str | None, second: str | None) -> str | None:
    return "\n\n".join(filter(None, (first, second))) or None


def _put_under(own: BaseModel, request: BaseModel | None) -> BaseModel:
    if request is None:
        return own
    return own.model_copy(update={name: value for name, value in request if value is not None})


def _without_null(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


@cache
def _tools_adapter() -> TypeAdapter[list[Any]]:
    return TypeAdapter(list[Tool])


@cache
def _chat_tools_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(ChatTool)
