"""The laws of a message's stream (Anthropic's Messages API), checked over the whole of it.

1  each frame is `event:` and one `data:` of JSON with the same type; there is no other frame
2  message_start is first, once, with an empty message whose stop_reason is null
3  blocks are numbered 0, 1, 2, ...; each starts once and stops once
4  a delta belongs to an open block, and is of its kind
5  tool input is JSON, if it is whole; it grows in the newest block alone; thinking has one signature, its last delta
6  message_delta comes once, after all blocks, with a stop_reason and the whole usage; message_stop is last
7  with a whole call the stop_reason is tool_use
8  after an error there is no more than message_stop; pings may stand anywhere before the end
"""

import json
from typing import Any

Json = dict[str, Any]
DELTAS = {
    "text": {"text_delta", "citations_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
    "server_tool_use": {"input_json_delta"},
    "mcp_tool_use": {"input_json_delta"},
}


class _Block:
    def __init__(self, start: Json) -> None:
        self.kind: str = start["type"]
        self.text = ""
        self.signatures = 0
        self.is_closed = False
        if self.kind.endswith("tool_use"):
            assert start["input"] == {}, "law 5: the input is there before its deltas"

    def feed(self, event: Json) -> None:
        assert not self.is_closed, "law 4: the block has stopped"
        if event["type"] == "content_block_stop":
            self.is_closed = True
            return
        delta: Json = event["delta"]
        assert delta["type"] in DELTAS.get(self.kind, set()), f"law 4: {delta['type']} in a block of {self.kind}"
        assert not self.signatures, "law 5: thinking goes on after its signature"
        self.signatures += delta["type"] == "signature_delta"
        self.text += delta.get("partial_json") or delta.get("text") or delta.get("thinking") or ""


def check_message_frames(raw: bytes, *, whole: bool = True) -> list[Json]:
    """Raise AssertionError naming the law, unless `raw` keeps every law; returns its events without the pings. Not
    `whole` means a stream that was left early: it may end anywhere."""
    frames = raw.decode().split("\n\n")
    tail = frames.pop()
    assert tail == "" or not whole, "law 1: the stream does not end with a blank line"
    events: list[Json] = []
    for frame in frames:
        lines = frame.split("\n")
        assert [line.partition(": ")[0] for line in lines] == ["event", "data"], f"law 1: {frame}"
        event: Json = json.loads(lines[1].partition(": ")[2])
        assert lines[0] == f"event: {event['type']}", f"law 1: {frame}"
        if event["type"] != "ping":
            events.append(event)
    check_message_events(events, whole=whole)
    return events


def check_message_events(events: list[Json], *, whole: bool = True) -> None:
    """Raise AssertionError naming the law, unless the events keep laws 2 to 8."""
    if events and events[0]["type"] == "error":
        assert len(events) == 1, "law 8: the stream goes on after an error"
        return
    blocks: list[_Block] = []
    ending: list[Json] = []
    for number, event in enumerate(events):
        kind = event["type"]
        assert (kind == "message_start") == (number == 0), f"law 2: event {number} is {kind}"
        if kind == "message_start":
            message = event["message"]
            assert (message["content"], message["stop_reason"]) == ([], None), "law 2: the message has begun"
            assert message["usage"]["input_tokens"] > 0, "law 2: it has no usage of its input"
        elif kind == "content_block_start":
            assert not ending, "law 6: a block starts after the end"
            assert event["index"] == len(blocks), f"law 3: block {event['index']} follows {len(blocks)} blocks"
            blocks.append(_Block(event["content_block"]))
        elif kind in ("content_block_delta", "content_block_stop"):
            assert not ending, "law 6: a block goes on after the end"
            index: int = event["index"]
            assert index < len(blocks), f"law 4: block {index} has not started"
            grows = kind == "content_block_delta" and event["delta"]["type"] == "input_json_delta"
            assert not grows or index == len(blocks) - 1, f"law 5: block {index} grows after a later one has started"
            blocks[index].feed(event)
        else:
            assert kind in ("message_delta", "message_stop", "error"), f"law 1: unknown event {kind}"
            ending.append(event)
    if not whole:
        return
    assert all(block.is_closed for block in blocks), "law 3: a block has not stopped"
    assert [event["type"] for event in ending] in (
        ["message_delta", "message_stop"],
        ["error", "message_stop"],
    ), f"law 6: the stream ends with {[event['type'] for event in ending]}"
    if ending[0]["type"] == "message_delta":
        _check_end(ending[0], blocks)


def _check_end(event: Json, blocks: list[_Block]) -> None:
    reason, usage = event["delta"]["stop_reason"], event["usage"]
    assert reason is not None, "law 6: there is no stop_reason"
    assert isinstance(usage["input_tokens"], int), "law 6: no input in the usage"
    assert isinstance(usage["output_tokens"], int), "law 6: no output in the usage"
    calls = [block for block in blocks if block.kind == "tool_use"]
    if calls and reason not in ("max_tokens", "model_context_window_exceeded"):
        assert reason == "tool_use", f"law 7: there are calls, but the stop_reason is {reason}"
        for call in calls:
            assert _is_object(call.text or "{}"), "law 5: the input is no object"
    for block in blocks:
        assert block.kind != "thinking" or block.signatures == 1, "law 5: thinking without a signature"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
