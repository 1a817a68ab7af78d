"""Closes the log of a response whose worker stopped: its items, and the events that end those still open.

Pure functions on JSON; `events/open_items.py` closes the items of a worker that runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from apis.events import LoggedEvent
from apis.wire.item_types import ITEM_TYPES

JsonObject = dict[str, Any]
_TEXT_FIELDS: Final = {
    "response.output_text": "text",
    "response.refusal": "refusal",
    "response.reasoning_text": "text",
    "response.reasoning_summary_text": "text",
    **{row.text_event: row.streamed_field for row in ITEM_TYPES.values() if row.streamed_field},
}
"""Streamed texts, by the beginning of their event types, and the field of the part or item that holds the whole."""
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
_COMMAND: Final = "response.shell_call_command"
_OUTPUT: Final = "response.shell_call_output_content"
_KILLED: Final = {"type": "exit", "exit_code": 137}
"""Outcome of commands whose worker stopped: their container ends all that ran for it."""


class _OpenCommands:
    """The commands of a logged item that have begun and not ended, by their index: each has its text, or its output."""

    def __init__(self) -> None:
        self._texts: dict[int, dict[str, str]] = {}

    def apply(self, item: JsonObject, event_type: str, event: JsonObject) -> None:
        """Take an event of the item; one of another kind does nothing. The item gets what has ended."""
        stem, _, suffix = event_type.rpartition(".")
        if stem not in (_COMMAND, _OUTPUT):
            return
        index: int = event["command_index"]
        if suffix == "done":
            self._texts.pop(index, None)
            if stem == _COMMAND:
                item["action"]["commands"].append(event["command"])
            else:
                item["output"] += event["output"]
        else:
            pieces: dict[str, str | None] = (
                event["delta"] if stem == _OUTPUT else {"command": event.get("delta") or event.get("command")}
            )
            texts = self._texts.setdefault(index, {})
            for name, text in pieces.items():
                texts[name] = texts.get(name, "") + (text or "")

    def close(self, item: JsonObject, output_index: int) -> list[JsonObject]:
        """Return the events that end what is open, without their numbers, and put it into the item."""
        events: list[JsonObject] = []
        for index, texts in sorted(self._texts.items()):
            place = {"output_index": output_index, "command_index": index}
            if "command" in texts:
                event: JsonObject = {"type": f"{_COMMAND}.done", **place, "command": texts["command"]}
            else:
                output = {"stdout": texts.get("stdout", ""), "stderr": texts.get("stderr", ""), "outcome": _KILLED}
                event = {"type": f"{_OUTPUT}.done", "item_id": item["id"], **place, "output": [output]}
            events.append(event)
        for event in events:
            self.apply(item, event["type"], event)
        return events


@dataclass
class _LoggedItem:
    """An item of the log; `part` is its open content part, `chunks` are the deltas of its open text."""

    item: JsonObject
    index: int
    part: JsonObject | None = None
    text: str | None = None
    chunks: list[str] = field(default_factory=list[str])
    logprobs: list[Any] = field(default_factory=list[Any])
    commands: _OpenCommands = field(default_factory=_OpenCommands)
    last_event_suffix: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class ClosedLog:
    """Items of a log in their order, finished by `closing_events`, which have their sequence numbers."""

    items: Sequence[JsonObject]
    closing_events: Sequence[JsonObject]
    next_sequence_number: int


def close_log(
    events: Iterable[LoggedEvent], status: Literal["incomplete", "failed"] = "incomplete", error_message: str = ""
) -> ClosedLog:
    """Read a log that has no writer any more; open items end with `status`, and those that can hold an error have
    `error_message`."""
    items: list[_LoggedItem] = []
    number = 0
    for logged_event in events:
        event: JsonObject = orjson.loads(logged_event.data)
        number = event["sequence_number"] + 1
        if logged_event.type == "response.output_item.added":
            items.append(_LoggedItem(event["item"], event["output_index"]))
        elif "output_index" in event:
            index: int = event["output_index"]
            _apply_event(items[index], logged_event.type, event)
    closing_events: list[JsonObject] = []
    for item in items:
        if not item.is_done:
            _close_item(item, closing_events, status)
            if error_message and (error := ITEM_TYPES[item.item["type"]].interrupted_error) is not None:
                item.item["error"] = {**error, "message": error_message}
    for event in closing_events:
        event["sequence_number"] = number
        number += 1
    return ClosedLog([item.item for item in items], closing_events, number)


def _apply_event(item: _LoggedItem, event_type: str, event: JsonObject) -> None:
    stem, _, suffix = event_type.rpartition(".")
    item.last_event_suffix = suffix
    if event_type == "response.output_item.done":
        item.item, item.is_done = event["item"], True
    elif stem in _PART_EVENT_FIELDS and suffix == "added":
        item.part, item.text, item.chunks, item.logprobs = event["part"], None, [], []
    elif stem in _PART_EVENT_FIELDS:
        item.item[_PART_EVENT_FIELDS[stem][1]].append(event["part"])
        item.part = None
    elif event_type == "response.output_text.annotation.added" and item.part is not None:
        item.part["annotations"].append(event["annotation"])
    elif stem in _TEXT_FIELDS and suffix == "delta":
        item.chunks.append(event["delta"])
        item.logprobs += event.get("logprobs") or ()
    elif stem in _TEXT_FIELDS and suffix == "done":
        item.text = event[_TEXT_FIELDS[stem]]
        if stem not in _PART_TEXT_EVENTS.values():
            item.item[_TEXT_FIELDS[stem]], item.chunks = item.text, []
    else:
        item.commands.apply(item.item, event_type, event)


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
    elif row.streamed_field and (open_item.chunks or row.call == "client") and open_item.text is None:
        item[row.streamed_field] = "".join(open_item.chunks)
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        text = {row.streamed_field: item[row.streamed_field]}
        closing_events.append({"type": f"{row.text_event}.done", **place, **named, **text})
    closing_events += open_item.commands.close(item, index)
    if row.has_phases and not last:
        closing_events.append({"type": f"response.{row.name}.in_progress", **place})
    phase = row.closing_phase(status)
    if phase is not None and last not in ("completed", "failed"):
        closing_events.append({"type": f"response.{row.name}.{phase}", **place})
    if "status" in item or row.has_status:
        item["status"] = row.interrupted_status or status
    closing_events.append({"type": "response.output_item.done", "output_index": index, "item": item})


def _close_part(open_item: _LoggedItem, event_fields: JsonObject, closing_events: list[JsonObject]) -> None:
    part = open_item.part
    assert part is not None
    stem = _PART_TEXT_EVENTS[part["type"]]
    holder = "response.reasoning_summary_part" if part["type"] == "summary_text" else "response.content_part"
    index_key, list_key = _PART_EVENT_FIELDS[holder]
    event_fields = {**event_fields, index_key: len(open_item.item[list_key])}
    key = _TEXT_FIELDS[stem]
    if open_item.text is None:
        open_item.text = "".join(open_item.chunks)
        logprobs = {"logprobs": open_item.logprobs} if stem == "response.output_text" else {}
        closing_events.append({"type": f"{stem}.done", **event_fields, key: open_item.text, **logprobs})
    part[key] = open_item.text
    if open_item.logprobs:
        part["logprobs"] = open_item.logprobs
    closing_events.append({"type": f"{holder}.done", **event_fields, "part": part})
    open_item.item[list_key].append(part)
