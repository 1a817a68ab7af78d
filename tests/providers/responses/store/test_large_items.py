"""Stored items that are large: the same JSON as before, without decoded copies of their texts."""

from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest

from providers.responses.store import large_items
from providers.responses.store.large_items import LARGE_BYTES, decode_item

LARGE = 'say "x"\n' * (LARGE_BYTES // 8 + 1)
SMALL = {"type": "input_text", "text": "small"}
ITEMS: dict[str, dict[str, Any]] = {
    "a small one": {"type": "message", "id": "msg_1", "role": "user", "content": [SMALL]},
    "one text": {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": LARGE}]},
    "large and small parts": {"type": "message", "content": [SMALL, {"text": LARGE}, SMALL, {"text": LARGE}, SMALL]},
    "many small parts": {"type": "message", "content": [SMALL] * 10_000},
    "a text of its own": {"type": "function_call_output", "output": LARGE, "call_id": "call_1"},
    "an object": {"type": "web_search_call", "action": {"type": "search", "query": LARGE, "sources": [{"url": "u"}]}},
    "a deep object": {"type": "mcp_list_tools", "tools": [{"name": "t", "input_schema": {"a": {"b": [LARGE]}}}]},
    "reasoning": {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": LARGE}]},
}


@pytest.mark.parametrize("kind", ITEMS)
async def test_an_item_is_written_as_it_is_stored(kind: str) -> None:
    stored = orjson.dumps(ITEMS[kind])
    assert orjson.dumps(await decode_item(msgspec.Raw(stored))) == stored


async def test_the_view_of_an_item_changes_what_is_not_large() -> None:
    stored = {"type": "message", "content": [{"text": LARGE, "logprobs": [{"token": "x"}], "type": "output_text"}]}
    item = await decode_item(msgspec.Raw(orjson.dumps(stored)))
    part = item["content"][0]
    assert isinstance(part["text"], orjson.Fragment)
    assert (item["type"], part["type"], part["logprobs"]) == ("message", "output_text", [{"token": "x"}])


async def test_each_pass_over_a_large_value_is_a_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours: no text of 30 MB is decoded on the event loop, and no turn passes over it twice."""
    passes: list[Callable[..., Any]] = []

    async def run(function: Callable[..., Any], argument: Any) -> Any:
        passes.append(function)
        return function(argument)

    monkeypatch.setattr(large_items, "run_long", run)
    item = await decode_item(msgspec.Raw(orjson.dumps(ITEMS["one text"])))
    assert len(passes) == 5
    assert passes[-1] is bytes
    assert isinstance(item["content"][0]["text"], orjson.Fragment)
