"""From the events and items of a response to those of the turn that it is a part of.

Items of types that the Agents API does not have, such as lists of tools, are left out; a function's call appears when
it is whole, because a client runs it at once.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from apis.events import LoggedEvent
from providers.agents.commands import (
    begin_commands,
    begin_outputs,
    close_commands,
    end_commands,
    end_output,
    show_output,
)
from providers.agents.records import Json
from providers.agents.subagents.tools import add_call
from providers.agents.transition import Transition

_STATUSES: Final = {"searching": "in_progress", "calling": "in_progress"}


def show_events(transition: Transition, batch: Sequence[LoggedEvent]) -> bool:
    """Show the events of the turn's response that have not been shown; return False if there are none. Deltas of one
    text that come together become one event."""
    turn = transition.turn
    visible = [orjson.loads(event.data) for event in batch if event.type in _EVENTS]
    events = [event for event in visible if event["sequence_number"] > turn.last_event]
    for event in _join_deltas(events):
        _EVENTS[event["type"]](transition, event)
        turn.last_event, turn.is_started = event["sequence_number"], True
    return bool(events)


def _join_deltas(events: Sequence[Json]) -> Iterator[Json]:
    """Yield the events, those in a row that are deltas of one text as one, which has the number of the last of them."""
    for place, group in itertools.groupby(events, _find_text):
        if place is None:
            yield from group
        else:
            deltas = list(group)
            yield {**deltas[-1], "delta": "".join(event["delta"] for event in deltas)}


def _find_text(event: Json) -> tuple[Any, ...] | None:
    """Return what names the text of a delta; None for any other event."""
    if event["type"] not in _TEXT_DELTAS:
        return None
    return tuple(event.get(name) for name in ("type", "item_id", "content_index", "summary_index"))


def complete_items(transition: Transition, items: list[Json]) -> None:
    """Show what the events of a response, whose output has ended, have not shown of its items."""
    for index, item in enumerate(items):
        if index in transition.turn.open or index >= transition.turn.next_output:
            _end_item(transition, {"output_index": index, "item": item})
    for index in list(transition.turn.open):
        del transition.turn.open[index]
    close_commands(transition, items)


def _begin_item(transition: Transition, event: Json) -> None:
    item, turn = event["item"], transition.turn
    if item["type"] == "function_call":
        return
    if item["type"] == "shell_call_output":
        begin_outputs(transition, item["call_id"], event["output_index"])
    turn.next_output = max(turn.next_output, event["output_index"] + 1)
    visible = _show_item(item)
    if visible is not None:
        index = turn.outputs
        turn.outputs += 1
        turn.open[event["output_index"]] = index, transition.add_item(visible, index)


def _end_item(transition: Transition, event: Json) -> None:
    item, turn = event["item"], transition.turn
    if item["type"] == "function_call" and add_call(transition, item):
        turn.next_output = max(turn.next_output, event["output_index"] + 1)
        return
    if item["type"] == "mcp_approval_request":
        turn.next_output = max(turn.next_output, event["output_index"] + 1)
        _add_approval(transition, item)
        return
    if item["type"] == "shell_call":
        begin_commands(transition, item)
    elif item["type"] == "shell_call_output":
        end_commands(transition, item)
    visible = _show_item(item)
    if visible is None:
        turn.next_output = max(turn.next_output, event["output_index"] + 1)
        return
    if event["output_index"] not in turn.open:
        turn.next_output = max(turn.next_output, event["output_index"] + 1)
        index = turn.outputs
        turn.outputs += 1
        turn.open[event["output_index"]] = index, transition.add_item(visible, index)
        if item["type"] == "function_call" and visible["status"] == "completed":
            call = {name: visible[name] for name in ("call_id", "name", "arguments")}
            transition.add_action("function_call", item["call_id"], call)
    index, number = turn.open.pop(event["output_index"])
    transition.put_item(number, visible)
    if visible["type"] == "message" and visible["phase"] != "commentary":
        transition.state.answer = number
    transition.emit_of_turn("item.done", item={**visible, "turn_id": turn.id}, output_index=index)


def _add_approval(transition: Transition, item: Json) -> None:
    label, name = item["server_label"], item["name"]
    request = {
        "type": "mcp_tool_call",
        "server_label": label,
        "name": name,
        "arguments": _parse_json(item["arguments"]),
        "message": f"The agent wants to call {name} of {label}.",
    }
    transition.add_action("mcp_approval_request", item["id"], {"request_id": item["id"], "request": request})


def _show_item(item: Json) -> Json | None:
    show = _ITEMS.get(item["type"])
    return None if show is None else {"id": item["id"], "type": item["type"], **show(item)}


def _show_message(item: Json) -> Json:
    content = [_show_part(part) for part in item["content"]]
    return {"role": "assistant", "content": content, "phase": item.get("phase"), "status": item["status"]}


def _show_part(part: Json) -> Json:
    return {"type": "output_text", "text": part["text"] if part["type"] == "output_text" else part["refusal"]}


def _show_reasoning(item: Json) -> Json:
    summary = [{"type": "summary_text", "text": part["text"]} for part in item.get("summary") or ()]
    return {"summary": summary, "status": item.get("status")}


def _show_function_call(item: Json) -> Json:
    return {
        "call_id": item["call_id"],
        "name": item["name"],
        "arguments": _parse_json(item["arguments"]),
        "status": item.get("status") or "completed",
    }


def _show_mcp_call(item: Json) -> Json:
    status = item.get("status") or ("failed" if item.get("error") else "completed")
    return {
        "server_label": item["server_label"],
        "name": item["name"],
        "arguments": _parse_json(item.get("arguments")),
        "output": item.get("output"),
        "error": item.get("error"),
        "status": _STATUSES.get(status, status),
    }


def _show_web_search(item: Json) -> Json:
    action: Json = item.get("action") or {}
    names = {"search": ("queries", "query"), "open_page": ("url",), "find_in_page": ("pattern", "url")}
    kind: str | None = action.get("type")
    visible_action: Json | None = None
    if kind is not None:
        visible_action = {
            "type": kind if kind in names else "other",
            **{name: action.get(name) for name in names.get(kind, ())},
        }
    status = item["status"]
    return {"action": visible_action, "status": "incomplete" if status == "failed" else _STATUSES.get(status, status)}


def _parse_json(text: str | None) -> Any:
    """Return the object that a call's arguments are; their text where they are none."""
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return text


def _emit_part(name: str) -> Callable[[Transition, Json], None]:
    def emit(transition: Transition, event: Json) -> None:
        part = event["part"]
        if part["type"] in ("output_text", "refusal"):
            _emit(transition, event, name, content_index=event["content_index"], part=_show_part(part))

    return emit


def _emit_text(name: str, *fields: str) -> Callable[[Transition, Json], None]:
    """Return the function that shows an event with the last of these fields under the name that it has in the other
    API."""

    def emit(transition: Transition, event: Json) -> None:
        source, target = fields[-1], {"refusal": "text"}.get(fields[-1], fields[-1])
        _emit(transition, event, name, **{field: event[field] for field in fields[:-1]}, **{target: event[source]})

    return emit


def _emit_summary_part(name: str) -> Callable[[Transition, Json], None]:
    def emit(transition: Transition, event: Json) -> None:
        part = {"type": "summary_text", "text": event["part"]["text"]}
        _emit(transition, event, name, summary_index=event["summary_index"], part=part)

    return emit


def _emit(transition: Transition, event: Json, name: str, **fields: Any) -> None:
    open_item = transition.turn.open.get(event["output_index"])
    if open_item is not None:
        transition.emit_of_turn(name, item_id=event["item_id"], output_index=open_item[0], **fields)


_ITEMS: Final[Mapping[str, Callable[[Json], Json]]] = {
    "message": _show_message,
    "reasoning": _show_reasoning,
    "function_call": _show_function_call,
    "mcp_call": _show_mcp_call,
    "web_search_call": _show_web_search,
}
_TEXT_DELTAS: Final = frozenset(
    ("response.output_text.delta", "response.refusal.delta", "response.reasoning_summary_text.delta")
)
_EVENTS: Final[Mapping[str, Callable[[Transition, Json], None]]] = {
    "response.output_item.added": _begin_item,
    "response.output_item.done": _end_item,
    "response.content_part.added": _emit_part("content_part.added"),
    "response.content_part.done": _emit_part("content_part.done"),
    "response.output_text.delta": _emit_text("output_text.delta", "content_index", "delta"),
    "response.output_text.done": _emit_text("output_text.done", "content_index", "text"),
    "response.refusal.delta": _emit_text("output_text.delta", "content_index", "delta"),
    "response.refusal.done": _emit_text("output_text.done", "content_index", "refusal"),
    "response.reasoning_summary_part.added": _emit_summary_part("reasoning_summary_part.added"),
    "response.reasoning_summary_part.done": _emit_summary_part("reasoning_summary_part.done"),
    "response.reasoning_summary_text.delta": _emit_text("reasoning_summary_text.delta", "summary_index", "delta"),
    "response.shell_call_output_content.delta": show_output,
    "response.shell_call_output_content.done": end_output,
    "response.reasoning_summary_text.done": _emit_text("reasoning_summary_text.done", "summary_index", "text"),
}
