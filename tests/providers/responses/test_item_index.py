"""The index of the items before a response: which positions each type has, in which segment, after each change."""

from typing import Any

from apis.wire.item_types import CLIENT_CALL_TYPES, OUTPUT_TYPES
from apis.wire.items import (
    ITEM_LIST_ADAPTER,
    AssistantMessage,
    FunctionCallItem,
    FunctionCallOutput,
    InputMessage,
    Item,
    ReasoningItem,
)
from providers.responses.item_index import ItemIndex


def read(*items: dict[str, Any]) -> list[Item]:
    return ITEM_LIST_ADAPTER.validate_python(items)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "done"}
ANSWER = {"role": "assistant", "content": "b"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def test_items_are_found_by_type_in_their_order() -> None:
    index = ItemIndex(read(user("a"), CALL), read(OUTPUT, ANSWER, user("c")))
    assert [item.content for item in index.of(InputMessage)] == ["a", "c"]
    assert index.positions(InputMessage, FunctionCallOutput) == [0, 2, 4]
    assert list(index.named(CLIENT_CALL_TYPES)) == [1]
    assert list(index.named(OUTPUT_TYPES | CLIENT_CALL_TYPES)) == [1, 2]
    assert index.has(AssistantMessage, ReasoningItem)
    assert not index.has(ReasoningItem)
    assert not index.of(ReasoningItem)


def test_the_input_is_a_segment_of_its_own() -> None:
    index = ItemIndex(read(user("a")), read(CALL, OUTPUT))
    assert [type(item) for item in index.input_items] == [FunctionCallItem, FunctionCallOutput]
    assert index.param(2) == "input[1]"
    resumed = index.followed_by(read(ANSWER))
    assert (resumed.input_start, resumed.input_end, len(resumed)) == (1, 3, 4)
    assert resumed.input_items == index.input_items
    assert index.followed_by([]) is index
    remaining = index.without({1})
    assert [type(item) for item in remaining] == [InputMessage, FunctionCallOutput]
    assert (remaining.input_start, remaining.positions(FunctionCallOutput)) == (1, [1])


def test_an_item_is_replaced_by_one_of_its_type() -> None:
    index = ItemIndex((), read(user("a"), ANSWER))
    [other] = read(user("b"))
    index.replace(0, other)
    assert index.of(InputMessage) == [other]
    assert list(index) == [other, *read(ANSWER)]


def test_items_that_are_more_than_text_may_hold_files() -> None:
    output = {**OUTPUT, "output": [IMAGE]}
    index = ItemIndex(read(user("a"), user([IMAGE])), read(CALL, OUTPUT, output, ANSWER))
    assert list(index.file_positions()) == [1, 4]
    assert not index.is_plain_text
    assert ItemIndex(read(user("a")), read(ANSWER, user("b"))).is_plain_text
    assert not ItemIndex((), read(user("a"), CALL)).is_plain_text
