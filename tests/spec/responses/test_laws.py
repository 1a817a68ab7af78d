"""The checker of the stream laws: legal streams pass, and a stream with any one fault does not."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.laws.legal_streams import (
    LEGAL,
    LISTING,
    USAGE,
    Events,
    Json,
    call,
    event,
    numbered,
    response,
    stream,
)
from tests.support.laws.stream_laws import check_frames, check_stream

Mutation = Callable[[Events], None]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize("name", LEGAL)
def test_legal_streams_pass(name: str) -> None:
    check_stream(LEGAL[name])
    check_stream([EVENT.validate_python(one) for one in LEGAL[name]])


@pytest.mark.parametrize("name", LEGAL)
def test_a_stream_left_early_passes_only_as_such(name: str) -> None:
    for length in range(len(LEGAL[name])):
        check_stream(LEGAL[name][:length], whole=False)
        with pytest.raises(AssertionError, match="law 11"):
            check_stream(LEGAL[name][:length])


@pytest.mark.parametrize("name", LEGAL)
def test_no_event_can_be_lost(name: str) -> None:
    for number, lost in enumerate(LEGAL[name]):
        rest = copy.deepcopy(LEGAL[name][:number] + LEGAL[name][number + 1 :])
        with pytest.raises(AssertionError, match=r"law (2|11),"):
            check_stream(rest)
        optional = ("response.queued", "error", "response.image_generation_call.partial_image")
        needless = lost["type"] in optional or lost.get("delta") == ""
        # A search that failed may have done so before it was searching.
        if name == "failed search":
            needless = lost["type"] == "response.web_search_call.searching"
        if not needless:
            with pytest.raises(AssertionError, match="law"):
                check_stream(numbered(rest))


@pytest.mark.parametrize("name", LEGAL)
def test_no_event_can_come_twice(name: str) -> None:
    for number in range(len(LEGAL[name])):
        with pytest.raises(AssertionError, match="law"):
            check_stream(numbered(copy.deepcopy(LEGAL[name][: number + 1] + LEGAL[name][number:])))


@pytest.mark.parametrize("name", LEGAL)
def test_events_of_an_item_cannot_change_places(name: str) -> None:
    for number in range(len(LEGAL[name]) - 1):
        swapped = copy.deepcopy(LEGAL[name])
        one, other = swapped[number : number + 2]
        indexes = [pair.get("output_index") for pair in (one, other)]
        of_two_items = None not in indexes and indexes[0] != indexes[1]
        cited_later = one["type"].endswith(CITE) and other["type"].endswith("delta")
        of_two_commands = one.get("command_index", 0) != other.get("command_index", 0)
        if not (of_two_items or cited_later or of_two_commands):
            swapped[number : number + 2] = [other, one]
            with pytest.raises(AssertionError, match="law"):
                check_stream(numbered(swapped))


@pytest.mark.parametrize("name", LEGAL)
def test_no_field_of_an_event_can_be_missing(name: str) -> None:
    for number, whole in enumerate(LEGAL[name]):
        for key in whole.keys() - {"code", "param"}:
            torn = copy.deepcopy(LEGAL[name])
            del torn[number][key]
            with pytest.raises(AssertionError, match="law"):
                check_stream(torn)


def at(events: Events, name: str, nth: int = 0) -> Json:
    return [one for one in events if one["type"].endswith(name)][nth]


def final(events: Events) -> Json:
    return events[-1]["response"]


def change(name: str, *path: Any, to: Any, nth: int = 0) -> Mutation:
    """A mutation: in the nth event of that name, set what is at the path."""

    def mutate(events: Events) -> None:
        place: Any = at(events, name, nth)
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return mutate


def everywhere(old: str, new: str) -> Mutation:
    """A mutation: one text for another in the whole stream."""
    return lambda events: events.__setitem__(slice(None), json.loads(json.dumps(events).replace(old, new)))


def both(*mutations: Mutation) -> Mutation:
    def mutate(events: Events) -> None:
        for mutation in mutations:
            mutation(events)

    return mutate


def without(*names: str) -> Mutation:
    def mutate(events: Events) -> None:
        events[:] = numbered([one for one in events if not one["type"].endswith(names)])

    return mutate


def inserted(position: int, one: Json) -> Mutation:
    return lambda events: events.__setitem__(slice(None), numbered([*events[:position], one, *events[position:]]))


def indexes_from_one(events: Events) -> None:
    for one in events:
        if "output_index" in one:
            one["output_index"] += 1


def deltas_of_both_calls_in_one(events: Events) -> None:
    """Leave out the beginning of the second call: its arguments run on in the first."""
    events[:] = stream(call(0, '{"a": 1}', '{"b": 2}'))


def calls_in_turns(events: Events) -> None:
    """Let the first call go on after the second has begun."""
    second = [one["type"] for one in events].index("response.output_item.added", 3)
    events[second - 1], events[second] = events[second], events[second - 1]
    events[:] = numbered(events)


ADDED, DONE, ITEM_DONE = "content_part.added", "content_part.done", "output_item.done"
CITE = "annotation.added"
FAULTS: list[tuple[int, str, str, Mutation]] = [
    (0, "an event that does not exist", "text", change("output_text.delta", "type", to="response.text.delta")),
    (0, "an item that does not exist", "text", change("item.added", "item", "type", to="thought")),
    (0, "an event without item_id", "search", lambda events: at(events, "search_call.searching").pop("item_id")),
    (0, "a number in quotes", "text", change("output_text.delta", "content_index", to="0")),
    (0, "null for output", "text", change("completed", "response", "output", to=None)),
    (
        0,
        "usage without details",
        "text",
        change("completed", "response", "usage", to={"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}),
    ),
    (0, "an event that no item has", "text", inserted(3, event("audio.done"))),
    (1, "not created first", "text", inserted(0, event("in_progress", response=response("in_progress")))),
    (1, "no in_progress", "text", without("in_progress")),
    (1, "queued after in_progress", "text", inserted(2, event("queued", response=response("queued")))),
    (1, "created twice", "text", inserted(2, event("created", response=response("in_progress")))),
    (1, "created completed", "text", change("created", "response", "status", to="completed")),
    (1, "created with output", "text", lambda events: events[0]["response"].update(output=final(events)["output"])),
    (1, "created with half a response", "text", lambda events: events[0]["response"].pop("truncation")),
    (1, "in_progress twice", "text", inserted(2, event("in_progress", response=response("in_progress")))),
    (
        2,
        "numbers from one",
        "text",
        lambda events: [one.update(sequence_number=one["sequence_number"] + 1) for one in events],
    ),
    (2, "a number left out", "text", change("output_text.done", "sequence_number", to=9)),
    (3, "indexes from one", "text", indexes_from_one),
    (3, "an index used twice", "reasoning", change("item.added", "output_index", to=0, nth=1)),
    (4, "added completed", "text", change("item.added", "item", "status", to="completed")),
    (4, "added without status", "reasoning", lambda events: at(events, "item.added")["item"].pop("status")),
    (4, "added without content", "reasoning", lambda events: at(events, "item.added")["item"].pop("content")),
    (4, "added with arguments", "calls", change("item.added", "item", "arguments", to='{"a": 1}')),
    (4, "added with input", "custom", change("item.added", "item", "input", to="*** Begin")),
    (4, "a part added full", "text", change(ADDED, "part", "text", to="Hello")),
    (4, "done in progress", "text", change(ITEM_DONE, "item", "status", to="in_progress")),
    (5, "empty item ids", "text", everywhere("msg_0", "")),
    (5, "one id for two searches", "search", everywhere("rs_0", "ws_1")),
    (5, "another item's id", "calls", change("arguments.delta", "item_id", to="fc_1")),
    (5, "a done item with a new id", "text", change(ITEM_DONE, "item", "id", to="msg_new")),
    (5, "content from one", "text", change(ADDED, "content_index", to=1)),
    (5, "a delta of another part", "two parts", change("output_text.delta", "content_index", to=1)),
    (5, "a call that is only done", "calls", without("item.added", "arguments.delta", "arguments.done")),
    (5, "text without a part", "text", without(ADDED, DONE)),
    (
        5,
        "reasoning under the message",
        "reasoning",
        inserted(9, event("reasoning_text.delta", item_id="msg_1", output_index=1, content_index=0, delta="x")),
    ),
    (
        5,
        "reasoning typed output_text",
        "reasoning",
        both(
            change(ADDED, "part", to={"type": "output_text", "text": "", "annotations": []}),
            change(DONE, "part", to={"type": "output_text", "text": "thinking", "annotations": []}),
        ),
    ),
    (5, "an item never done", "text", without(ITEM_DONE)),
    (5, "another name when done", "calls", change(ITEM_DONE, "item", "name", to="set")),
    (5, "a part of another kind when done", "text", change(DONE, "part", to={"type": "refusal", "refusal": "Hello"})),
    (5, "a citation in another part", "search", change(CITE, "content_index", to=1)),
    (6, "a done text of its own", "text", change("output_text.done", "text", to="hello")),
    (6, "a part of its own", "text", change(DONE, "part", "text", to="hello")),
    (6, "an item of its own", "text", change(ITEM_DONE, "item", "content", 0, "text", to="hello")),
    (6, "arguments of its own", "calls", change(ITEM_DONE, "item", "arguments", to='{"a":1}')),
    (6, "code of its own", "code", change(ITEM_DONE, "item", "code", to="2+2")),
    (
        6,
        "two calls' deltas exchanged",
        "calls",
        both(change("arguments.delta", "delta", to='{"b"'), change("arguments.delta", "delta", to='{"a"', nth=1)),
    ),
    (
        6,
        "a part and its item of their own",
        "text",
        both(
            change(DONE, "part", "text", to="hello"),
            change(ITEM_DONE, "item", "content", 0, "text", to="hello"),
            change("completed", "response", "output", 0, "content", 0, "text", to="hello"),
        ),
    ),
    (7, "reasoning without a part", "reasoning", without(ADDED, DONE)),
    (7, "a summary without a part", "summary", without("summary_part.added")),
    (8, "call ids shared", "calls", everywhere("call_1", "call_0")),
    (8, "no call id", "custom", everywhere("call_0", "")),
    (8, "no arguments.done", "calls", without("arguments.done")),
    (8, "two calls in one", "calls", deltas_of_both_calls_in_one),
    (8, "two calls in turns", "calls", calls_in_turns),
    (9, "a search that never searched", "search", without("search_call.searching")),
    (9, "code run before it is written", "code", without("code.done")),
    (9, "an end that is both", "mcp", inserted(4, event("mcp_list_tools.failed", item_id="mcpl_0", output_index=0))),
    (
        9,
        "tools listed late",
        "mcp",
        inserted(
            15, event("output_item.added", output_index=3, item={**LISTING, "id": "mcpl_3", "status": "in_progress"})
        ),
    ),
    (10, "an index too high", "search", change(CITE, "annotation_index", to=1)),
    (
        10,
        "a citation twice",
        "search",
        lambda events: at(events, CITE, 1).update(annotation=at(events, CITE)["annotation"]),
    ),
    (10, "a citation beyond the text", "search", change(CITE, "annotation", "end_index", to=900)),
    (10, "a citation backwards", "search", change(CITE, "annotation", "start_index", to=8)),
    (10, "a citation of the part only", "search", without(CITE)),
    (10, "a citation of the event only", "search", change(DONE, "part", "annotations", to=[], nth=1)),
    (
        10,
        "one citation announced twice",
        "search",
        everywhere('"start_index": 12, "end_index": 15', '"start_index": 4, "end_index": 7'),
    ),
    (10, "a citation of text that never came", "search", everywhere('"end_index": 15', '"end_index": 17')),
    (
        11,
        "two ends",
        "text",
        lambda events: events.append({**copy.deepcopy(events[-1]), "sequence_number": len(events)}),
    ),
    (11, "no end", "text", lambda events: events.pop()),
    (11, "an end that says otherwise", "text", change("completed", "response", "status", to="incomplete")),
    (11, "incomplete without details", "incomplete", change("incomplete", "response", "incomplete_details", to=None)),
    (
        11,
        "completed with details",
        "text",
        change("completed", "response", "incomplete_details", to={"reason": "max_output_tokens"}),
    ),
    (11, "failed without an error", "failed", change("failed", "response", "error", to=None)),
    (
        12,
        "completed at the token limit",
        "text",
        everywhere('"final_answer", "status": "completed"', '"final_answer", "status": "incomplete"'),
    ),
    (
        12,
        "an incomplete item in the middle",
        "incomplete",
        both(
            change(ITEM_DONE, "item", "status", to="incomplete"),
            change("incomplete", "response", "output", 0, "status", to="incomplete"),
        ),
    ),
    (
        12,
        "a delta after the end of its item",
        "calls",
        inserted(11, event("function_call_arguments.delta", item_id="fc_0", output_index=0, delta="x")),
    ),
    (13, "a final item with another id", "text", change("completed", "response", "output", 0, "id", to="msg_x")),
    (
        13,
        "a final item with another status",
        "text",
        change("completed", "response", "output", 0, "status", to="incomplete"),
    ),
    (13, "a final item with a field more", "text", change("completed", "response", "output", 0, "x", to=None)),
    (13, "a final output in another order", "reasoning", lambda events: final(events)["output"].reverse()),
    (13, "a final output with an item less", "reasoning", lambda events: final(events)["output"].pop()),
    (13, "another response at the end", "text", change("completed", "response", "id", to="resp_2")),
    (13, "no usage", "text", change("completed", "response", "usage", to=None)),
    (13, "a wrong sum", "text", change("completed", "response", "usage", to={**USAGE, "total_tokens": 1})),
    (13, "more cached than read", "text", everywhere('"cached_tokens": 4', '"cached_tokens": 10')),
    (13, "more reasoning than output", "text", everywhere('"reasoning_tokens": 3', '"reasoning_tokens": 8')),
    (15, "a top-level error", "text", change("output_text.delta", "error", to={"message": "m"})),
    (15, "more after an error", "text", inserted(4, {"type": "error", "code": None, "message": "m", "param": None})),
]


@pytest.mark.parametrize(("law", "name", "mutate"), [one[0:1] + one[2:] for one in FAULTS], ids=[f[1] for f in FAULTS])
def test_each_fault_is_caught_by_its_law(law: int, name: str, mutate: Mutation) -> None:
    events = copy.deepcopy(LEGAL[name])
    mutate(events)
    with pytest.raises(AssertionError, match=rf"^law {law}, event \d+"):
        check_stream(events)


def framed(events: Events) -> bytes:
    frames = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events]
    return "".join([*frames, "data: [DONE]\n\n"]).encode()


WHOLE = framed(LEGAL["text"])
FIRST = b"event: response.created\n"


def test_frames_give_the_events_and_may_have_comments() -> None:
    assert check_frames(WHOLE) == LEGAL["text"]
    assert check_frames(b": hi\n\n" + WHOLE.replace(FIRST, b": again\n" + FIRST)) == LEGAL["text"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        WHOLE.removesuffix(b"data: [DONE]\n\n"),
        WHOLE.removesuffix(b"\n"),
        WHOLE + b"data: [DONE]\n\n",
        WHOLE + b"event: x\n\n",
        WHOLE.replace(FIRST, b""),
        WHOLE.replace(FIRST, b"event: response.completed\n"),
        WHOLE.replace(FIRST, b"id: 1\n" + FIRST),
        WHOLE.replace(FIRST, FIRST + b'data: {"a":\n'),
        WHOLE.replace(FIRST, b"data: 5\n"),
        WHOLE.replace(b"\n", b"\r\n"),
        WHOLE.replace(b'data: {"type"', b"data: {type", 1),
        FIRST + b"data: [1]\n\n" + WHOLE,
        WHOLE.replace(b"\n\nevent", b"\nevent", 1),
    ],
    ids=range(14),
)
def test_each_fault_of_the_framing_is_caught(raw: bytes) -> None:
    with pytest.raises(AssertionError, match="law 14"):
        check_frames(raw)
