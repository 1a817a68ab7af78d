"""The items that a model still gets of a conversation with compactions in it."""

from collections.abc import Sequence
from typing import Any

import pytest

from apis.chat import Message
from apis.wire.items import ITEM_LIST_ADAPTER, Item
from providers.responses.context.conversation import (
    SUMMARY_PREFIX,
    CompactionContent,
    drop_earlier_reasoning,
    find_window,
)
from providers.responses.context.messages import ItemReader
from providers.responses.events.tool_result import ToolResultRecord


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def compaction(token: str) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": token}


def items(*fields: dict[str, Any]) -> list[Item]:
    return ITEM_LIST_ADAPTER.validate_python(fields)


def to_messages(value: Sequence[Item | ToolResultRecord]) -> list[Message]:
    return ItemReader({}).read_all(value)


RULES = Message(role="developer", content="rules")
KNOWN = {
    "alone": CompactionContent(
        summary="alone",
        verbatim_messages=[RULES],
        pending_messages=[Message(role="user", content="pending")],
        replaces_history=True,
    ),
    "beside": CompactionContent(summary="beside", verbatim_messages=[RULES], replaces_history=False),
}
BEFORE = [said("user", "one"), said("assistant", "a"), said("developer", "rules"), said("user", "two")]
AFTER = [said("assistant", "b"), said("user", "three")]
ALL = ["one", "a", "rules", "two", "b", "three"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([*BEFORE, *AFTER], ALL),
        ([*BEFORE, compaction("unknown"), *AFTER], ALL),
        ([*BEFORE, compaction("alone"), *AFTER], ["rules", SUMMARY_PREFIX + "alone", "pending", "b", "three"]),
        ([*BEFORE, compaction("beside"), *AFTER], ["one", "rules", "two", SUMMARY_PREFIX + "beside", "b", "three"]),
        ([BEFORE[0], compaction("beside"), *AFTER], ["rules", "one", SUMMARY_PREFIX + "beside", "b", "three"]),
        ([compaction("alone"), *BEFORE, compaction("beside")], ["one", "rules", "two", SUMMARY_PREFIX + "beside"]),
        (
            [compaction("beside"), *BEFORE, compaction("alone"), compaction("unknown")],
            ["rules", SUMMARY_PREFIX + "alone", "pending"],
        ),
    ],
)
def test_the_newest_compaction_replaces_the_items_before_it(value: list[dict[str, Any]], expected: list[str]) -> None:
    window = find_window(items(*value), KNOWN)
    assert [message.content for message in window.messages(to_messages(window.recent_items), to_messages)] == expected
    spoken = [text for text in expected if text not in ("a", "b") and not text.startswith(SUMMARY_PREFIX)]
    assert [message.content for message in window.verbatim_messages(to_messages)] == spoken


def test_without_compactions_items_are_as_they_are() -> None:
    history = items(*BEFORE, compaction("alone"))
    assert find_window(history, {}).recent_items is history


def test_thoughts_before_what_the_user_said_last_are_left_out() -> None:
    history = items(said("user", "one"), thought("x"), said("user", "two"), thought("y"), said("assistant", "a"))
    assert drop_earlier_reasoning(history) == [history[0], *history[2:]]
    assert drop_earlier_reasoning(items(thought("x"))) == items(thought("x"))
