"""The checker of the laws of a message's stream fails for a stream that breaks one."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.laws.message_laws import check_message_events, check_message_frames

Events = list[dict[str, Any]]


def lawful() -> Events:
    """Thinking, then a call."""
    usage = {"input_tokens": 3, "output_tokens": 2}
    call: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    return [
        {"type": "message_start", "message": {"content": [], "stop_reason": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": call},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage},
        {"type": "message_stop"},
    ]


def change(at: int, *keys: str, value: Any) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        part: Any = events[at]
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value
        return events

    return apply


def without(*positions: int) -> Callable[[Events], Events]:
    return lambda events: [event for at, event in enumerate(events) if at not in positions]


def second_call(events: Events) -> Events:
    """A whole block of another call."""
    return [{**event, "index": 2} for event in events[5:8]]


BROKEN: dict[str, tuple[Callable[[Events], Events], int]] = {
    "no start": (without(0), 2),
    "two starts": (lambda events: [events[0], *events], 2),
    "no input in the first usage": (change(0, "message", "usage", "input_tokens", value=0), 2),
    "a gap in the numbers": (change(5, "index", value=2), 3),
    "a block that does not stop": (without(4), 3),
    "a delta after its block": (lambda events: [*events[:8], events[6], *events[8:]], 4),
    "a delta of another kind": (change(2, "delta", "type", value="text_delta"), 4),
    "thinking after its signature": (lambda events: [*events[:3], events[3], events[2], *events[4:]], 5),
    "no signature": (without(3), 5),
    "arguments that are cut": (change(6, "delta", "partial_json", value='{"a":'), 5),
    "two calls in turns": (lambda events: [*events[:6], *second_call(events), *events[6:]], 5),
    "no stop_reason": (change(8, "delta", "stop_reason", value=None), 6),
    "no message_stop": (without(9), 6),
    "end_turn with a call": (change(8, "delta", "stop_reason", value="end_turn"), 7),
}


@pytest.mark.parametrize(("break_law", "law"), BROKEN.values(), ids=BROKEN)
def test_a_stream_that_breaks_a_law_is_noticed(break_law: Callable[[Events], Events], law: int) -> None:
    check_message_events(lawful())
    with pytest.raises(AssertionError, match=f"law {law}:"):
        check_message_events(break_law(lawful()))


def test_frames_have_one_event_and_one_line_of_data() -> None:
    with pytest.raises(AssertionError, match="law 1"):
        check_message_frames(b'event: ping\ndata: {"type":"message_start"}\n\n')
    with pytest.raises(AssertionError, match="law 1"):
        check_message_frames(b"data: [DONE]\n\n")
