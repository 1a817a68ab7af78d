"""The functions by which an agent directs its subagents, and the items that show their calls.

A function of the agent's own replaces the one of the same name.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import orjson
from pydantic import BaseModel, Field

from apis.wire.base import Effort
from providers.agents.records import Json
from providers.agents.subagents.records import MAX_SUBAGENTS, MAX_TEXT_CHARS
from providers.agents.transition import Transition

CREATE: Final = "create_subagent"
WAIT: Final = "wait_for_subagents"
_Id = Annotated[str, Field(max_length=256, description="The id of the subagent.")]


class CreateArguments(BaseModel):
    """The arguments of `create_subagent`."""

    task: str = Field(
        min_length=1,
        max_length=MAX_TEXT_CHARS,
        description="The whole task. The subagent sees nothing else of this conversation.",
    )
    name: str | None = Field(None, max_length=256, description="A short name.")
    model: str | None = Field(None, min_length=1, max_length=256, description="Another model than your own.")
    reasoning_effort: Effort | None = Field(None, description="Another effort than your own.")


class SendArguments(BaseModel):
    """The arguments of `send_subagent_input`."""

    subagent_id: _Id
    message: str = Field(min_length=1, max_length=MAX_TEXT_CHARS)


class OneArguments(BaseModel):
    """The arguments of a function about one subagent."""

    subagent_id: _Id


class WaitArguments(BaseModel):
    """The arguments of `wait_for_subagents`."""

    subagent_ids: list[_Id] | None = Field(
        None, max_length=MAX_SUBAGENTS, description="Without ids, all that work or have reports that you have not read."
    )
    return_when: Literal["all", "any"] = Field("all", description="The end of all of them, or of the first one.")


class ListArguments(BaseModel):
    """The arguments of `list_subagents`: none."""


class SubagentTool(NamedTuple):
    """A function, its arguments, and what builds the fields of its items; None for calls that are not shown."""

    arguments: type[BaseModel]
    description: str
    show: Callable[[str, Json], Json] | None


def _show_create(agent_id: str, arguments: Json) -> Json:
    return {
        "type": "create_subagent_call",
        "agent_id": agent_id,
        "content": _show_text(arguments.get("task")),
        "model": _text_or_none(arguments.get("model")),
        "reasoning_effort": _text_or_none(arguments.get("reasoning_effort")),
    }


def _show_send(agent_id: str, arguments: Json) -> Json:
    return {
        "type": "send_subagent_input_call",
        **_show_ids(agent_id, arguments),
        "content": _show_text(arguments.get("message")),
    }


def _show_one(item_type: str) -> Callable[[str, Json], Json]:
    return lambda agent_id, arguments: {"type": item_type, **_show_ids(agent_id, arguments)}


def _show_wait(agent_id: str, arguments: Json) -> Json:
    ids: list[Any] = arguments["subagent_ids"] if isinstance(arguments.get("subagent_ids"), list) else []
    recipients = [each for each in ids if isinstance(each, str)][:MAX_SUBAGENTS]
    return {"type": "wait_for_subagents_call", "sender_agent_id": agent_id, "recipient_agent_ids": recipients}


def _show_ids(agent_id: str, arguments: Json) -> Json:
    return {"sender_agent_id": agent_id, "recipient_agent_id": _text_or_none(arguments.get("subagent_id")) or ""}


def _show_text(text: Any) -> list[Json]:
    return [{"type": "output_text", "text": text}] if isinstance(text, str) else []


def _text_or_none(text: Any) -> str | None:
    return text if isinstance(text, str) else None


_TOOLS: Final[Mapping[str, SubagentTool]] = {
    CREATE: SubagentTool(
        CreateArguments,
        "Start a subagent that works on a task of its own while you go on. It has your tools, but not your "
        "conversation, and cannot start subagents. Use several for parts of a large task that do not depend on one "
        "another. Its last message is its report, which wait_for_subagents returns.",
        _show_create,
    ),
    "send_subagent_input": SubagentTool(
        SendArguments, "Send a message to a subagent: it reads it now, or begins to work again.", _show_send
    ),
    WAIT: SubagentTool(
        WaitArguments,
        "Wait until subagents have ended their work, and read their reports. A message of the user ends the wait.",
        _show_wait,
    ),
    "interrupt_subagent": SubagentTool(
        OneArguments,
        "Stop the present work of a subagent. You can send it other input.",
        _show_one("interrupt_subagent_call"),
    ),
    "close_subagent": SubagentTool(
        OneArguments, "Close a subagent that you do not need any more.", _show_one("close_subagent_call")
    ),
    "resume_subagent": SubagentTool(
        OneArguments, "Open a closed subagent again, so that it takes input.", _show_one("resume_subagent_call")
    ),
    "list_subagents": SubagentTool(ListArguments, "List your subagents and what they do.", None),
}


def find_tools(agent: Json) -> Mapping[str, SubagentTool]:
    """Return the functions by which an agent directs subagents, by name."""
    if not agent["multi_agent"]["enabled"]:
        return {}
    own = {tool["name"] for tool in agent["tools"] if tool["type"] == "function"}
    return {name: tool for name, tool in _TOOLS.items() if name not in own}


def build_tools(agent: Json) -> list[Json]:
    """Return the declarations of these functions for a response."""
    return [_build_tool(name) for name in find_tools(agent)]


@cache
def _build_tool(name: str) -> Json:
    tool = _TOOLS[name]
    schema = tool.arguments.model_json_schema()
    fields = {"properties": schema["properties"], "required": schema.get("required", [])}
    for field in fields["properties"].values():
        field.pop("title", None)
    parameters = {"type": "object", **fields, "additionalProperties": False}
    return {
        "type": "function",
        "name": name,
        "description": tool.description,
        "parameters": parameters,
        "strict": False,
    }


def add_call(transition: Transition, call: Json) -> bool:
    """Show a call, which its worker answers after the response; return False if it is no call of such a function."""
    tool = None if transition.ref.subagent_id else find_tools(transition.record.agent).get(call["name"])
    if tool is None:
        return False
    item, index, number = None, None, None
    if tool.show is not None:
        index = transition.turn.outputs
        transition.turn.outputs += 1
        fields = tool.show(transition.record.agent_id, _parse_object(call["arguments"]))
        item = {"id": call["id"], **fields, "status": "in_progress"}
        number = transition.add_item(item, index)
    place = {"item": item, "item_number": number, "output_index": index}
    action = {"call_id": call["call_id"], "name": call["name"], "arguments": call["arguments"], **place}
    if (call.get("status") or "completed") == "completed":
        transition.add_action("subagent_call", call["call_id"], action)
    else:
        transition.end_call_item(action, "incomplete")
    return True


def _parse_object(text: str | None) -> Json:
    try:
        value: Any = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        value = None
    return cast(Json, value) if isinstance(value, dict) else {}
