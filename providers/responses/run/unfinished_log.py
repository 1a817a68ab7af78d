"""What a log that breaks off has told: its items, and the events that close those still open. Pure functions on JSON.

The same closing as open_items.py does, for an owner that is no more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from apis.events import LoggedEvent

Json = dict[str, Any]
_TEXT_FIELDS: Final = {
    "response.output_text": "text",
    "response.refusal": "refusal",
    "response.reasoning_text": "text",
    "response.reasoning_summary_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.code_interpreter_call_code": "code",
    "response.mcp_call_arguments": "arguments",
}
"""Streamed texts, and the field of the part or the item that holds the whole."""
_PARTS: Final = {
    "response.content_part": ("content_index", "content"),
    "response.reasoning_summary_part": ("summary_index", "summary"),
}
_OF_KIND: Final = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
"""Texts that are closed even where none has been streamed."""
_OF_PART: Final = {
    "output_text": "response.output_text",
    "refusal": "response.refusal",
    "reasoning_text": "response.reasoning_text",
    "summary_text": "response.reasoning_summary_text",
}
_FAILED: Final = frozenset({"web_search_call", "file_search_call"})
"""Kinds that were not run to their end and know no `incomplete`."""
_NOT_MADE: Final = -32000
_NO_STATUS: Final = frozenset({"mcp_list_tools", "mcp_approval_request", "compaction"})
_LISTING_STEPS: Final = ("in_progress", "failed")


@dataclass
class _Open:
    item: Json
    index: int
    part: Json | None = None
    text: str | None = None
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[Any] = field(default_factory=list[Any])
    last: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """`items` in their order, all of them finished once `closing` is told; `number` is that of the next event."""

    items: Sequence[Json]
    closing: Sequence[Json]
    number: int


def close_log(
    events: Iterable[LoggedEvent], status: Literal["incomplete", "failed"] = "incomplete", why: str = ""
) -> Broken:
    """Read a log whose writer is gone; what is open ends with `status`, and `why` where it can say so. `closing` is
    numbered."""
    items: list[_Open] = []
    number = 0
    for each in events:
        event: Json = orjson.loads(each.data)
        number = event["sequence_number"] + 1
        if each.type == "response.output_item.added":
            items.append(_Open(event["item"], event["output_index"]))
        elif "output_index" in event:
            index: int = event["output_index"]
            _feed(items[index], each.type, event)
    closing: list[Json] = []
    for item in items:
        if not item.done:
            _close(item, closing, status)
            if why and item.item["type"] == "mcp_call":
                item.item["error"] = {"type": "mcp_protocol_error", "code": _NOT_MADE, "message": why}
    for event in closing:
        event["sequence_number"] = number
        number += 1
    return Broken([item.item for item in items], closing, number)


def _feed(item: _Open, name: str, event: Json) -> None:
    what, _, item.last = name.rpartition(".")
    step = item.last
    if name == "response.output_item.done":
        item.item, item.done = event["item"], True
    elif what in _PARTS and step == "added":
        item.part, item.text, item.pieces, item.logprobs = event["part"], None, [], []
    elif what in _PARTS:
        item.item[_PARTS[what][1]].append(event["part"])
        item.part = None
    elif name == "response.output_text.annotation.added" and item.part is not None:
        item.part["annotations"].append(event["annotation"])
    elif what in _TEXT_FIELDS and step == "delta":
        item.pieces.append(event["delta"])
        item.logprobs += event.get("logprobs") or ()
    elif what in _TEXT_FIELDS and step == "done":
        item.text = event[_TEXT_FIELDS[what]]
        if what not in _OF_PART.values():
            item.item[_TEXT_FIELDS[what]], item.pieces = item.text, []


def _close(open_: _Open, closing: list[Json], status: str) -> None:
    item, index = open_.item, open_.index
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message" and open_.part is None and not item["content"]:
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        closing.append({"type": "response.content_part.added", **place, "content_index": 0, "part": part})
        open_.part = dict(part)
    if open_.part is not None:
        _close_part(open_, place, closing)
    elif (open_.pieces or item["type"] in _OF_KIND) and open_.text is None:
        what = _OF_KIND.get(item["type"]) or next(
            name for name in _TEXT_FIELDS if name.startswith(f"response.{item['type']}")
        )
        key = _TEXT_FIELDS[what]
        item[key] = "".join(open_.pieces)
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        closing.append({"type": f"{what}.done", **place, **named, key: item[key]})
    if item["type"] == "mcp_list_tools":
        missing = [step for step in _LISTING_STEPS if open_.last not in (step, "completed", "failed")]
        closing += [{"type": f"response.mcp_list_tools.{step}", **place} for step in missing]
    if "status" in item or item["type"] not in _NO_STATUS:
        item["status"] = "failed" if item["type"] in _FAILED else status
    if status == "failed" and item["type"] == "mcp_call" and open_.last not in ("completed", "failed"):
        closing.append({"type": "response.mcp_call.failed", **place})
    closing.append({"type": "response.output_item.done", "output_index": index, "item": item})


def _close_part(open_: _Open, place: Json, closing: list[Json]) -> None:
    part = open_.part
    assert part is not None
    what = _OF_PART[part["type"]]
    holder = "response.reasoning_summary_part" if part["type"] == "summary_text" else "response.content_part"
    index_key, list_key = _PARTS[holder]
    place = {**place, index_key: len(open_.item[list_key])}
    key = _TEXT_FIELDS[what]
    if open_.text is None:
        open_.text = "".join(open_.pieces)
        logprobs = {"logprobs": open_.logprobs} if what == "response.output_text" else {}
        closing.append({"type": f"{what}.done", **place, key: open_.text, **logprobs})
    part[key] = open_.text
    if open_.logprobs:
        part["logprobs"] = open_.logprobs
    closing.append({"type": f"{holder}.done", **place, "part": part})
    open_.item[list_key].append(part)
