"""The conversation of a request: its past, its own items made whole, and how these are stored."""

from typing import Any

import orjson
import pytest

from apis.deltas import Usage
from apis.errors import InvalidRequest, NotFound
from apis.responses import CreateResponse
from providers.kv_store.memory import Memory
from providers.responses.context.conversation import Conversation
from providers.responses.context.input_items import read_items
from providers.responses.context.sealed_content import SealedContent
from providers.responses.events.ids import ResponseIds, response_id_of
from providers.responses.events.response_object import begin_response, end_response
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.history import History
from providers.responses.store.history_cache import LoadAllowance, LoadedHistory
from providers.responses.store.turn_writer import FinishedResponse

TENANT = "t"
SEARCH: dict[str, Any] = {
    "type": "web_search_call",
    "status": "completed",
    "action": {"type": "search", "query": "q"},
}


@pytest.fixture
def history() -> History:
    return History(Memory(Memory.Config()), retention_s=1000, max_turns=10, cache_bytes=0)


async def read(history: History, value: Any, *, tenant: str = TENANT, **fields: Any) -> Conversation:
    request = CreateResponse.model_validate({"model": "m", "input": value, **fields})
    allowance = LoadAllowance(history.max_bytes)
    past = LoadedHistory()
    if request.previous_response_id is not None:
        past = await history.load_history(request.previous_response_id, tenant=tenant, allowance=allowance)
    sealed = SealedContent((), Memory(Memory.Config()))
    before = await read_items(request, past, history, sealed, ResponseIds(), tenant=tenant, allowance=allowance)
    return Conversation(past, before.items.input_items, before.tool_results, request.instructions)


async def save(
    history: History, value: Any, *output: dict[str, Any], results: dict[str, ToolResultRecord] | None = None
) -> str:
    """A finished response, its output made of these items."""
    conversation = await read(history, value)
    ids = ResponseIds()
    begun = begin_response(CreateResponse.model_validate({"model": "m", "input": "x"}), ids.response_id, created_at=5)
    shaped = begun.model_validate({**begun.model_dump(), "output": output})
    final = end_response(begun, "completed", shaped.output, Usage())
    await history.save(
        FinishedResponse(final, await conversation.store_input_items(ids), results or {}),
        tenant=TENANT,
        history=conversation.history,
    )
    return ids.response_id


def contents(conversation: Conversation) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in conversation.messages()]


async def test_text_is_what_the_user_says(history: History) -> None:
    assert contents(await read(history, "hi")) == [("user", "hi")]


async def test_instructions_come_first_and_are_not_inherited(history: History) -> None:
    first = await save(history, "a")
    conversation = await read(history, "hi", instructions="Be brief.", previous_response_id=first)
    assert contents(conversation) == [("developer", "Be brief."), ("user", "a"), ("user", "hi")]
    assert contents(await read(history, "hi", previous_response_id=first)) == [("user", "a"), ("user", "hi")]


async def test_nothing_more_may_be_said_after_a_past(history: History) -> None:
    first = await save(history, "a")
    assert contents(await read(history, None, previous_response_id=first)) == [("user", "a")]


async def test_an_item_may_be_referred_to(history: History) -> None:
    await save(history, [{"role": "user", "content": "a", "id": "mine"}])
    for reference in ({"type": "item_reference", "id": "mine"}, {"id": "mine"}):
        assert contents(await read(history, [reference, {"role": "user", "content": "b"}])) == [
            ("user", "a"),
            ("user", "b"),
        ]
    with pytest.raises(NotFound) as caught:
        await read(history, [{"role": "user", "content": "b"}, {"id": "yours"}])
    assert caught.value.param == "input[1].id"
    with pytest.raises(NotFound):
        await read(history, [{"id": "mine"}], tenant="other")


async def test_a_search_sent_back_as_item_or_reference_reaches_the_model_with_its_result(history: History) -> None:
    ids = ResponseIds()
    item_id = ids.new_item_id("ws")
    begun = begin_response(CreateResponse.model_validate({"model": "m", "input": "x"}), ids.response_id, created_at=5)
    shaped = begun.model_validate({**begun.model_dump(), "output": [{**SEARCH, "id": item_id}]})
    conversation = await read(history, "a")
    results = {item_id: ToolResultRecord("c1", "web_search", '{"query":"q"}', "[1] A page")}
    await history.save(
        FinishedResponse(shaped, await conversation.store_input_items(ids), results),
        tenant=TENANT,
        history=conversation.history,
    )
    expected = [("assistant", None), ("tool", "[1] A page"), ("user", "b")]
    for item in ({**SEARCH, "id": item_id}, {"type": "item_reference", "id": item_id}):
        assert contents(await read(history, [item, {"role": "user", "content": "b"}])) == expected
    unknown = [{**SEARCH, "id": "ws_other"}, {"role": "user", "content": "b"}]
    lost = [("assistant", None), ("tool", "[What this gave is not known any more.]"), ("user", "b")]
    assert contents(await read(history, unknown)) == lost


async def test_items_are_checked_before_anything_is_read(history: History) -> None:
    image = {"type": "input_image", "image_url": "file:///etc/passwd"}
    with pytest.raises(InvalidRequest) as caught:
        await read(history, [{"role": "user", "content": [image]}])
    assert caught.value.param == "input[0].content[0].image_url"


TEXT: dict[str, Any] = {"type": "input_text", "text": "a"}
KEPT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"role": "user", "content": "a"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}],
            "status": "completed",
        },
    ),
    (
        {"role": "assistant", "content": "a", "phase": "commentary"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
            "phase": "commentary",
            "status": "completed",
        },
    ),
    (
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "incomplete"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "incomplete"},
    ),
    (
        {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
        {"type": "reasoning", "summary": [], "encrypted_content": "abc", "status": "completed"},
    ),
    (
        {
            "type": "message",
            "role": "user",
            "content": [{**TEXT, "new_field": 1}],
            "other": [2],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{**TEXT, "new_field": 1}],
            "other": [2],
            "status": "completed",
        },
    ),
]


@pytest.mark.parametrize(("item", "stored_item"), KEPT)
async def test_items_are_kept_as_they_came_with_an_id(
    history: History, item: dict[str, Any], stored_item: dict[str, Any]
) -> None:
    conversation = await read(history, [item])
    [first] = orjson.loads(await conversation.store_input_items(ResponseIds()))
    assert response_id_of(first.pop("id")) is not None
    assert first == stored_item
    [second] = orjson.loads(await (await read(history, [{**item, "id": "mine"}])).store_input_items(ResponseIds()))
    assert second == {**stored_item, "id": "mine"}
