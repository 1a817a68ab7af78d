"""What a log that breaks off has told: its items, and the events that close those still open. Pure functions on JSON.

The same closing as open_items.py does, for an owner that is no more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from apis.logged_event import LoggedEvent

Json = dict[str, Any]
_TEXT_FIELDS: Final = {
    "response.output_text": "text",
    "response.refusal": "refusal",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.code_interpreter_call_code": "code",
    "response.mcp_call_arguments": "arguments",
}
"""Streamed texts, and the field of the part or the item that holds the whole."""
_IN_PARTS: Final = frozenset({"response.output_text", "response.refusal", "response.reasoning_text"})
_OF_KIND: Final = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
"""Texts that are closed even where none has been streamed."""
_OF_PART: Final = {
    "output_text": "response.output_text",
    "refusal": "response.refusal",
    "reasoning_text": "response.reasoning_text",
}
_FAILED: Final = frozenset({"web_search_call", "file_search_call"})
"""Kinds that were not run to their end and know no `incomplete`."""
_NO_STATUS: Final = frozenset({"mcp_list_tools", "mcp_approval_request", "compaction"})


@dataclass
class _Open:
    item: Json
    index: int
    part: Json | None = None
    text: str | None = None
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[Any] = field(default_factory=list[Any])
    done: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """`items` in their order, all of them finished once `closing` is told; `number` is that of the next event."""

    items: Sequence[Json]
    closing: Sequence[Json]
    number: int


def close_log(events: Iterable[LoggedEvent]) -> Broken:
    """Read a log whose writer is gone. `closing` is numbered."""
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
            _close(item, closing)
    for event in closing:
        event["sequence_number"] = number
        number += 1
    return Broken([item.item for item in items], closing, number)


def _feed(item: _Open, name: str, event: Json) -> None:
    what, _, step = name.rpartition(".")
    if name == "response.output_item.done":
        item.item, item.done = event["item"], True
    elif name == "response.content_part.added":
        item.part, item.text, item.pieces, item.logprobs = event["part"], None, [], []
    elif name == "response.content_part.done":
        item.item["content"].append(event["part"])
        item.part = None
    elif name == "response.output_text.annotation.added" and item.part is not None:
        item.part["annotations"].append(event["annotation"])
    elif what in _TEXT_FIELDS and step == "delta":
        item.pieces.append(event["delta"])
        item.logprobs += event.get("logprobs") or ()
    elif what in _TEXT_FIELDS and step == "done":
        item.text = event[_TEXT_FIELDS[what]]
        if what not in _IN_PARTS:
            item.item[_TEXT_FIELDS[what]], item.pieces = item.text, []


def _close(open_: _Open, closing: list[Json]) -> None:
    item, index = open_.item, open_.index
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message" and open_.part is None and not item["content"]:
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        closing.append({"type": "response.content_part.added", **place, "content_index": 0, "part": part})
        open_.part = dict(part)
    if open_.part is not None:
        _close_part(open_, {**place, "content_index": len(item["content"])}, closing)
    elif (open_.pieces or item["type"] in _OF_KIND) and open_.text is None:
        what = _OF_KIND.get(item["type"]) or next(
            name for name in _TEXT_FIELDS if name.startswith(f"response.{item['type']}")
        )
        key = _TEXT_FIELDS[what]
        item[key] = "".join(open_.pieces)
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        closing.append({"type": f"{what}.done", **place, **named, key: item[key]})
    if item["type"] not in _NO_STATUS:
        item["status"] = "failed" if item["type"] in _FAILED else "incomplete"
    closing.append({"type": "response.output_item.done", "output_index": index, "item": item})


def _close_part(open_: _Open, place: Json, closing: list[Json]) -> None:
    part = open_.part
    assert part is not None
    what = _OF_PART[part["type"]]
    key = _TEXT_FIELDS[what]
    if open_.text is None:
        open_.text = "".join(open_.pieces)
        logprobs = {"logprobs": open_.logprobs} if what == "response.output_text" else {}
        closing.append({"type": f"{what}.done", **place, key: open_.text, **logprobs})
    part[key] = open_.text
    if open_.logprobs:
        part["logprobs"] = open_.logprobs
    closing.append({"type": "response.content_part.done", **place, "part": part})
    open_.item["content"].append(part)
