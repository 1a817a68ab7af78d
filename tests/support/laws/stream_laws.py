"""The laws of a response's stream, checked over the whole of it: `check_stream` for events, `check_frames` for bytes.

 1  created, perhaps queued, in_progress: each with the whole response and no output yet. After queued it may fail
 2  sequence_number counts 0, 1, 2, ...
 3  output_index is given out once, at output_item.added, and is the item's position in the output
 4  an item is added in progress, with every streamable field there and empty
 5  an event belongs to an open item and names it by id and index; parts open before their text, and count from 0
 6  a done text is its deltas put together, and is what the finished part and item hold
 7  reasoning: parts of reasoning_text, then parts of summary; each may be absent
 8  function and custom calls: deltas, done, item done; call ids are unique; calls are not run together. Of all calls,
    only the newest one grows
 9  hosted tools go through their stages in order
10  annotations come once each, count from 0, and point into the text that has been sent
11  exactly one terminal event, last, whose response has its status
12  an incomplete item makes the response incomplete, and is then the last one, or failed; finished items never change
13  the terminal response holds the finished items, in order, field by field, and a whole usage
14  frames: see check_frames
15  after an error only response.failed follows; no event has a top-level `error`
 0  every event is one of the SDK's event types, with all its fields
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from tests.support.laws import stream_order as order
from tests.support.laws.shell_streams import ShellTexts
from tests.support.laws.stream_order import Json


def check_stream(events: Iterable[Json | BaseModel], *, whole: bool = True) -> None:
    """Raise AssertionError naming the law, the event's number and why, unless `events` keep every law.

    Events are what came over the wire in the `openai` dialect, parsed or as the SDK's models. Not `whole` means a
    stream that was left early or whose response was cancelled: it may end anywhere.
    """
    stream = _Stream()
    for event in events:
        stream.feed(_plain(event))
    if whole:
        stream.law(11, stream.ended, "the stream ends without a terminal event")


def check_frames(raw: bytes) -> list[Json]:
    """Raise AssertionError unless `raw` is a whole, well-framed stream (law 14); returns its events.

    `event:` equals the body's type, one `data:` line of JSON, a blank line; no other field; comments are legal;
    `data: [DONE]` is the last frame.
    """
    events: list[Json] = []
    frames = raw.decode().split("\n\n")
    assert frames.pop() == "", "law 14: the stream does not end with a blank line"
    bare = [[line for line in frame.split("\n") if not line.startswith(":")] for frame in frames]
    event_lines = [lines for lines in bare if lines]
    assert event_lines, "law 14: there is no frame"
    assert event_lines.pop() == ["data: [DONE]"], "law 14: the last frame is not data: [DONE]"
    for number, lines in enumerate(event_lines):
        where = f"law 14, frame {number}"
        names = [line.partition(": ")[0] for line in lines]
        assert names == ["event", "data"], f"{where}: its lines are {names}, not one event: and one data:"
        name, data = (line.partition(": ")[2] for line in lines)
        try:
            event: Any = json.loads(data)
        except ValueError as exc:
            raise AssertionError(f"{where}: its data is not JSON: {exc}") from exc
        assert isinstance(event, dict), f"{where}: its data is no object"
        event = cast(Json, event)
        assert event.get("type") == name, f"{where}: event: {name}, but type {event.get('type')!r}"
        events.append(event)
    return events


UNLISTED_CODES = ("context_length_exceeded", "completion_window_expired", "api_key_revoked", "storage_unavailable")
"""Codes of failed responses that the SDK's type does not list."""


@dataclass
class _Item:
    """An item as its events have described it so far."""

    index: int
    added: Json
    last: str = "output_item.added"
    chunks: list[str] = field(default_factory=list[str])
    chars: int = 0
    part: Json | None = None
    annotations: list[Json] = field(default_factory=list[Json])
    fields: Json = field(default_factory=dict[str, Any])
    done: Json | None = None
    shell: ShellTexts = field(default_factory=ShellTexts)

    @property
    def kind(self) -> str:
        return self.added["type"]


class _Stream:
    """The state of a stream by its events so far. Feeding it the next event raises where a law is broken."""

    def __init__(self) -> None:
        self.number = -1
        self.name = ""
        self.first: Json = {}
        self.items: list[_Item] = []
        self.ended = False

    def law(self, law: int, holds: object, why: str) -> None:
        if not holds:
            raise AssertionError(f"law {law}, event {self.number} ({self.name or 'none'}): {why}")

    def feed(self, event: Json) -> None:
        before, self.name = self.name, str(event.get("type"))
        self.number += 1
        self.law(11, not self.ended, "it comes after the terminal event")
        self.law(
            2, event.get("sequence_number") == self.number, f"its sequence_number is {event.get('sequence_number')!r}"
        )
        self.law(15, "error" not in event, "it has a top-level `error`, which the SDK raises on")
        self._check_shape(event)
        self._check_beginning(before)
        self.law(15, before != "error" or self.name == "response.failed", "only response.failed may follow an error")
        match event:
            case {"response": response}:
                self._response(response)
            case {"type": "response.output_item.added"}:
                self._added(event)
            case {"output_index": _}:
                self._of_item(event, self.name.removeprefix("response."))
            case _:
                self.law(0, self.name == "error", "this checker does not know where such an event may come")

    def _check_shape(self, event: Json) -> None:
        self.law(0, self.name in order.EVENTS, "there is no such event")
        response: Json = event.get("response") or {}
        items: list[Json] = [event["item"]] if "item" in event else response.get("output") or []
        for item in items:  # before the event, whose union of items makes for poor messages
            self.law(0, item.get("type") in order.ITEMS, f"there is no such item: {item.get('type')!r}")
            self._check_model(order.ITEMS[item["type"]], item)
        error: Json = response.get("error") or {}
        if error.get("code") in UNLISTED_CODES:
            event = {**event, "response": {**response, "error": {**error, "code": "server_error"}}}
        self._check_model(order.EVENTS[self.name], event)

    def _check_model(self, model: type[BaseModel], value: Json) -> None:
        try:
            model.model_validate(value, strict=True)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            self.law(0, False, f"{model.__name__} at {error['loc']}: {error['msg']}")

    def _check_beginning(self, before: str) -> None:
        follow = order.BEGINNING.get(before)
        if follow is not None:
            self.law(1, self.name in follow, f"it must be {' or '.join(follow)} here")
        else:
            beginning = ("response.created", "response.queued", "response.in_progress")
            self.law(1, self.name not in beginning, "the response has already begun")

    # --- the response ------------------------------------------------------------------------------------------------

    def _response(self, response: Json) -> None:
        self.first = self.first or response
        missing = set(order.RESPONSE_FIELDS.split()) - response.keys()
        self.law(1, not missing, f"the response lacks {sorted(missing)}")
        self.law(
            11 if self.name in order.TERMINAL else 1,
            response["status"] in order.STATUS[self.name],
            f"the response's status is {response['status']!r}",
        )
        for key in order.CONSTANT:
            self.law(13, response[key] == self.first[key], f"the response's {key} changed")
        if self.name not in order.TERMINAL:
            self.law(1, response["output"] == [], "there is output already")
            return
        self.ended = True
        for item in self.items:
            self.law(5, item.done, f"item {item.index} was never done")
        difference = _difference([item.done for item in self.items], response["output"], "output")
        self.law(13, not difference, f"the finished items differ from {difference}")
        self._check_outcome(response)
        self._check_usage(response)

    def _check_outcome(self, response: Json) -> None:
        status = response["status"]
        for index, item in enumerate(response["output"]):
            if item.get("status") == "incomplete" and not (
                status == "completed" and item["type"] in order.WITHOUT_FAILED
            ):
                # parallel calls may break off together, and none of them may pass for a whole one
                calls = all("tool" in each["type"] or "call" in each["type"] for each in response["output"][index:])
                self.law(
                    12,
                    status == "failed" or item is response["output"][-1] or calls,
                    "an incomplete item is not the last one",
                )
                self.law(12, status != "completed", "an item is incomplete, yet the response is completed")
        self.law(
            11, (status == "incomplete") == bool(response["incomplete_details"]), "incomplete_details and status differ"
        )
        self.law(11, (status == "failed") == bool(response["error"]), "error and status differ")

    def _check_usage(self, response: Json) -> None:
        usage: Json | None = response["usage"]
        self.law(13, usage, "the usage is missing")
        assert usage
        into, out = int(usage["input_tokens"]), int(usage["output_tokens"])
        self.law(13, usage["total_tokens"] == into + out, "total_tokens is not the sum")
        self.law(
            13, 0 <= usage["input_tokens_details"]["cached_tokens"] <= into, "cached_tokens is no part of the input"
        )
        self.law(
            13, 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= out, "reasoning is no part of the output"
        )

    # --- items -------------------------------------------------------------------------------------------------------

    def _added(self, event: Json) -> None:
        item: Json = event["item"]
        kind, index = item["type"], event["output_index"]
        self.law(3, index == len(self.items), f"output_index is {index}, the next position is {len(self.items)}")
        self.law(5, item.get("id"), "the item has no id")
        self.law(5, all(item["id"] != other.added["id"] for other in self.items), f"the id {item['id']} is taken")
        for key, empty in order.EMPTY.get(kind, {}).items():
            self.law(4, key in item and item[key] == empty, f"{key} is {item.get(key)!r}, not {empty!r}")
        if "status" in item or kind not in order.NO_STATUS:
            self.law(4, item.get("status") == "in_progress", f"the status is {item.get('status')!r}")
        if kind.endswith("_call") and "call_id" in item:
            named = item["name"] if kind in ("function_call", "custom_tool_call") else kind
            self.law(8, item["call_id"] and named, "the call has no id or no name")
            taken = any(item["call_id"] == other.added.get("call_id") for other in self.items)
            self.law(8, not taken, f"the call_id {item['call_id']} is taken")
        labels = [other.added.get("server_label") for other in self.items if other.kind != kind]
        listed_late = kind == "mcp_list_tools" and item["server_label"] in labels
        self.law(9, not listed_late, "the tools are listed after another item of that server")
        self.items.append(_Item(index, item))

    def _of_item(self, event: Json, name: str) -> None:
        index: int = event["output_index"]
        self.law(5, 0 <= index < len(self.items), f"no item was added at output_index {index}")
        item = self.items[index]
        named = event["item"].get("id") if "item" in event else event.get("item_id")
        is_named = named == item.added["id"] or name.startswith("shell_call_command.")  # these events have no item_id
        self.law(5, is_named, f"it names item {named!r}, but {index} is {item.added['id']!r}")
        self.law(12, item.done is None, "the item is finished")
        self._check_order(item, name, event)
        item.last = name
        what, _, step = name.rpartition(".")
        if name == "output_item.done":
            self._done(item, event["item"])
        elif what in order.PARTS:
            self._part(item, event, what, step)
        elif name == "output_text.annotation.added":
            self._annotation(item, event)
        elif what in order.TEXTS:
            self._text(item, event, what, step)
        elif "command_index" in event:
            fault = item.shell.feed(event, step)
            self.law(6, not fault, fault)

    def _check_order(self, item: _Item, name: str, event: Json) -> None:
        broken_off = name == "output_item.done" and event["item"].get("status") in ("failed", "incomplete")
        if broken_off and item.kind not in order.ORDER_LAW and not item.last.endswith(".delta"):
            return  # a hosted tool has no event to say so; what it was streaming is closed all the same
        legal = order.ORDER.get(item.kind, order.SIMPLE).get(item.last, set[str]())
        why = f"after {item.last} of a {item.kind} may come {sorted(legal)}"
        self.law(order.ORDER_LAW.get(item.kind, 9), name in legal, why)

    def _part(self, item: _Item, event: Json, what: str, step: str) -> None:
        index_key, list_key = order.PARTS[what]
        parts: list[Json] = item.fields.setdefault(list_key, [])
        part: Json = event["part"]
        self.law(5, event[index_key] == len(parts), f"{index_key} is {event[index_key]}, not {len(parts)}")
        if step == "added":
            filled = {key: value for key, value in part.items() if key != "type" and value}
            self.law(4, not filled, f"the part is added with {filled}")
            item.part, item.annotations = part, []
            return
        assert item.part is not None
        self.law(5, part["type"] == item.part["type"], f"a {item.part['type']} became a {part['type']}")
        text_key = "refusal" if part["type"] == "refusal" else "text"
        self.law(6, part[text_key] == item.fields.pop("text"), "the part's text is not the done text")
        self.law(10, part.get("annotations", []) == item.annotations, "the part's annotations are not those announced")
        parts.append(part)

    def _text(self, item: _Item, event: Json, what: str, step: str) -> None:
        in_part = "content_index" in event or "summary_index" in event
        if in_part:
            assert item.part is not None
            expected = order.PART_OF_TEXT.get(what, what)
            self.law(5, item.part["type"] == expected, f"the open part is {item.part['type']}")
            index_key, list_key = order.PARTS[
                "reasoning_summary_part" if expected == "summary_text" else "content_part"
            ]
            self.law(5, event[index_key] == len(item.fields[list_key]), f"{index_key} is {event[index_key]}")
        if step == "delta":
            is_newest = not any(other.kind.endswith("_call") for other in self.items[item.index + 1 :])
            self.law(8, is_newest or not item.kind.endswith("_call"), "a later call has begun")
            item.chunks.append(event["delta"])
            item.chars += len(event["delta"])
            return
        text = "".join(item.chunks)
        item.chunks, item.chars = [], 0
        self.law(
            6,
            event[order.TEXTS[what]] == text,
            f"the done text is {event[order.TEXTS[what]]!r}, the deltas make {text!r}",
        )
        item.fields["text" if in_part else order.TEXTS[what]] = text

    def _annotation(self, item: _Item, event: Json) -> None:
        self.law(0, isinstance(event.get("annotation"), dict), "it has no annotation")
        annotation: Json = event["annotation"]
        self.law(5, event["content_index"] == len(item.fields["content"]), f"content_index is {event['content_index']}")
        self.law(10, event["annotation_index"] == len(item.annotations), f"its index is {event['annotation_index']}")
        self.law(10, annotation not in item.annotations, "it has been announced before")
        start = annotation.get("start_index", annotation.get("index", 0))
        end = annotation.get("end_index", start)
        self.law(
            10, 0 <= start <= end <= item.chars, f"{start} to {end} is not inside the {item.chars} characters sent"
        )
        item.annotations.append(annotation)

    def _done(self, item: _Item, done: Json) -> None:
        for key in order.LASTING:
            self.law(5, done.get(key) == item.added.get(key), f"the item's {key} changed")
        if "status" in done or item.kind not in order.NO_STATUS:
            self.law(
                4, done.get("status") in ("completed", "incomplete", "failed"), f"it is still {done.get('status')!r}"
            )
        for key, empty in order.EMPTY.get(item.kind, {}).items():
            if key not in ("tools", "output"):
                difference = _difference(item.fields.get(key, empty), done.get(key), key)
                self.law(6, not difference, f"what was streamed differs from the item at {difference}")
        if item.kind in ("shell_call", "shell_call_output"):
            fault = item.shell.compare(done)
            self.law(6, not fault, fault)
        if item.kind == "function_call":
            self.law(8, not _run_together(done["arguments"]), "the arguments are two calls' run together")
        item.done = done


def _plain(event: Json | BaseModel) -> Json:
    if isinstance(event, BaseModel):
        return event.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    return event


def _run_together(arguments: str) -> bool:
    """Return true if the text is one whole JSON object directly followed by another."""
    try:
        _, end = json.JSONDecoder().raw_decode(arguments)
        return isinstance(json.loads(arguments[end:]), dict)
    except ValueError:
        return False


def _difference(expected: Any, actual: Any, path: str) -> str:
    """The path and values of the first difference; empty when there is none. A field that is null is not one absent."""
    match expected, actual:
        case dict(), dict():
            one, other = cast(Json, expected), cast(Json, actual)
            keys = sorted({*one, *other})
            pairs = [(one.get(key, "(absent)"), other.get(key, "(absent)"), f"{path}.{key}") for key in keys]
        case list(), list() if len(cast(list[Any], expected)) == len(cast(list[Any], actual)):
            both = zip(cast(list[Any], expected), cast(list[Any], actual), strict=True)
            pairs = [(one, other, f"{path}[{number}]") for number, (one, other) in enumerate(both)]
        case _:
            return (
                "" if expected == actual and type(expected) is type(actual) else f"{path}: {expected!r} and {actual!r}"
            )
    return next((difference for pair in pairs if (difference := _difference(*pair))), "")
