"""What a log that breaks off has told: its items, and the events that close those still open. Pure functions on JSON.

The same closing as open_items.py does, for an owner that is no more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from apis.events import LoggedEvent
from providers.responses.tools.item_types import ITEM_TYPES

JsonObject = dict[str, Any]
_TEXT_FIELDS: Final = {
    "response.output_text": "text",
    "response.refusal": "refusal",
    "response.reasoning_text": "text",
    "response.reasoning_summary_text": "text",
    **{row.text_event: row.streamed_field for row in ITEM_TYPES.values() if row.streamed_field},
}
"""Streamed texts, and the field of the part or the item that holds the whole."""
_PART_EVENT_FIELDS: Final = {
    "response.content_part": ("content_index", "content"),
    "response.reasoning_summary_part": ("summary_index", "summary"),
}
_PART_TEXT_EVENTS: Final = {
    "output_text": "response.output_text",
    "refusal": "response.refusal",
    "reasoning_text": "response.reasoning_text",
    "summary_text": "response.reasoning_summary_text",
}
_MCP_ERROR_CODE: Final = -32000


@dataclass
class _LoggedItem:
    item: JsonObject
    index: int
    part: JsonObject | None = None
    text: str | None = None
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[Any] = field(default_factory=list[Any])
    last_event_suffix: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class ClosedLog:
    """`items` in their order, all of them finished once `closing` is told; `number` is that of the next event."""

    items: Sequence[JsonObject]
    closing_events: Sequence[JsonObject]
    next_sequence_number: int


def close_log(
    events: Iterable[LoggedEvent], status: Literal["incomplete", "failed"] = "incomplete", error_message: str = ""
) -> ClosedLog:
    """Read a log whose writer is gone; what is open ends with `status`, and `why` where it can say so. `closing` is
    numbered."""
    items: list[_LoggedItem] = []
    number = 0
    for each in events:
        event: JsonObject = orjson.loads(each.data)
        number = event["sequence_number"] + 1
        if each.type == "response.output_item.added":
            items.append(_LoggedItem(event["item"], event["output_index"]))
        elif "output_index" in event:
            index: int = event["output_index"]
            _apply_event(items[index], each.type, event)
    closing: list[JsonObject] = []
    for item in items:
        if not item.is_done:
            _close_item(item, closing, status)
            if error_message and item.item["type"] == "mcp_call":
                item.item["error"] = {"type": "mcp_protocol_error", "code": _MCP_ERROR_CODE, "message": error_message}
    for event in closing:
        event["sequence_number"] = number
        number += 1
    return ClosedLog([item.item for item in items], closing, number)


def _apply_event(item: _LoggedItem, event_type: str, event: JsonObject) -> None:
    what, _, item.last_event_suffix = event_type.rpartition(".")
    step = item.last_event_suffix
    if event_type == "response.output_item.done":
        item.item, item.is_done = event["item"], True
    elif what in _PART_EVENT_FIELDS and step == "added":
        item.part, item.text, item.pieces, item.logprobs = event["part"], None, [], []
    elif what in _PART_EVENT_FIELDS:
        item.item[_PART_EVENT_FIELDS[what][1]].append(event["part"])
        item.part = None
    elif event_type == "response.output_text.annotation.added" and item.part is not None:
        item.part["annotations"].append(event["annotation"])
    elif what in _TEXT_FIELDS and step == "delta":
        item.pieces.append(event["delta"])
        item.logprobs += event.get("logprobs") or ()
    elif what in _TEXT_FIELDS and step == "done":
        item.text = event[_TEXT_FIELDS[what]]
        if what not in _PART_TEXT_EVENTS.values():
            item.item[_TEXT_FIELDS[what]], item.pieces = item.text, []


def _close_item(open_item: _LoggedItem, closing_events: list[JsonObject], status: str) -> None:
    item, index, last = open_item.item, open_item.index, open_item.last_event_suffix
    row = ITEM_TYPES[item["type"]]
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message" and open_item.part is None and not item["content"]:
        part: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        closing_events.append({"type": "response.content_part.added", **place, "content_index": 0, "part": part})
        open_item.part = dict(part)
    if open_item.part is not None:
        _close_part(open_item, place, closing_events)
    elif row.streamed_field and (open_item.pieces or row.call == "client") and open_item.text is None:
        item[row.streamed_field] = "".join(open_item.pieces)
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        text = {row.streamed_field: item[row.streamed_field]}
        closing_events.append({"type": f"{row.text_event}.done", **place, **named, **text})
    if item["type"] == "mcp_list_tools" and last not in ("in_progress", "completed", "failed"):
        closing_events.append({"type": "response.mcp_list_tools.in_progress", **place})
    if row.has_failed_event and last not in ("completed", "failed") and (status == "failed" or not row.has_status):
        closing_events.append({"type": f"response.{row.name}.failed", **place})
    if "status" in item or row.has_status:
        item["status"] = row.interrupted_status or status
    closing_events.append({"type": "response.output_item.done", "output_index": index, "item": item})


def _close_part(open_item: _LoggedItem, event_fields: JsonObject, closing_events: list[JsonObject]) -> None:
    part = open_item.part
    assert part is not None
    what = _PART_TEXT_EVENTS[part["type"]]
    holder = "response.reasoning_summary_part" if part["type"] == "summary_text" else "response.content_part"
    index_key, list_key = _PART_EVENT_FIELDS[holder]
    event_fields = {**event_fields, index_key: len(open_item.item[list_key])}
    key = _TEXT_FIELDS[what]
    if open_item.text is None:
        open_item.text = "".join(open_item.pieces)
        logprobs = {"logprobs": open_item.logprobs} if what == "response.output_text" else {}
        closing_events.append({"type": f"{what}.done", **event_fields, key: open_item.text, **logprobs})
    part[key] = open_item.text
    if open_item.logprobs:
        part["logprobs"] = open_item.logprobs
    closing_events.append({"type": f"{holder}.done", **event_fields, "part": part})
    open_item.item[list_key].append(part)
