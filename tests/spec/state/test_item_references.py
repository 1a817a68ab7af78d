"""References to stored items: each is loaded once, all count for what one request may load, and none is added twice."""

from typing import Any

import pytest
from openai import BadRequestError

from tests.support.sdk.conversations import conversations, user
from tests.support.sdk.requests import create, messages, refusal, responses
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, serving

LIMIT = 20_000
SMALL = {"max_history_bytes": LIMIT}


def reference(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


async def refused(request: Any) -> Any:
    with pytest.raises(BadRequestError) as caught:
        await request
    return caught.value.body


async def store_item(served: Served, text: str = "x" * 4000) -> str:
    """Return the id of a stored message. Its turn holds the text twice, because the model repeats it."""
    return (await create(served, input=text)).output[0].id


async def test_an_item_may_be_referred_to_as_often_as_its_bytes_fit() -> None:
    """Repeated references to one item count with the bytes that they put into the prompt."""
    async with serving(responses=SMALL) as served:
        one = await store_item(served)
        await create(served, input=[reference(one)] * 3)
        assert [message["content"] for message in messages(served)] == ["x" * 4000] * 3
        error = await refusal(served, input=[reference(one)] * 10)
    assert error["code"] == "history_too_large"
    assert error["param"] == "input[3].id"
    assert str(LIMIT) in error["message"]


async def test_a_stored_request_may_refer_twice_to_an_item_with_an_id_of_its_client() -> None:
    """The response is stored, and the item is found afterwards."""
    async with serving() as served:
        await create(served, input=[{"id": "mine", **user("one")}])
        await create(served, input=[reference("mine")] * 2)
        await create(served, input=[reference("mine")])
        assert [message["content"] for message in messages(served)] == ["one"]


async def test_references_are_bounded_wherever_a_request_has_items() -> None:
    """Counting tokens, compacting, the background and a conversation load no more than a response."""
    async with serving(responses=SMALL) as served:
        one = await store_item(served)
        items: Any = [reference(one)] * 1000
        empty = await conversations(served).create()
        for request in (
            responses(served).input_tokens.count(model="scripted", input=items),
            responses(served).compact(model="scripted", input=items),
            create(served, input=items, background=True),
            conversations(served).create(items=items[:20]),
            conversations(served).items.create(empty.id, items=items[:20]),
            create(served, input=items, conversation=empty.id),
        ):
            error = await refused(request)
            assert error["code"] == "history_too_large"
            assert error["param"].endswith("[3].id")


async def test_references_count_together_with_the_history_before_them() -> None:
    """Bytes that a chain or a conversation has loaded are not free for references."""
    async with serving(responses=SMALL) as served:
        one = await store_item(served, "x" * 3000)
        before = await create(served, input="y" * 6500)
        assert (await refusal(served, input=[reference(one)] * 2, previous_response_id=before.id))[
            "param"
        ] == "input[0].id"
        await create(served, input=[reference(one)] * 2)
        conversation = await conversations(served).create(items=[user("y" * 15_000)])
        assert (await refusal(served, input=[reference(one)], conversation=conversation.id))["param"] == "input[0].id"


async def test_references_to_many_responses_count_what_each_of_them_loads() -> None:
    """An item of each of many large responses loads these, and counts as much."""
    async with serving(responses=SMALL) as served:
        ids = [(await create(served, input="x" * 2500)).output[0].id for _ in range(8)]
        await create(served, input=[reference(each) for each in ids[:2]])
        error = await refusal(served, input=[reference(each) for each in ids])
    assert error["code"] == "history_too_large"


async def test_an_item_cannot_be_added_to_a_conversation_twice() -> None:
    """A conversation that would hold one item twice is refused, naming the second one."""
    async with serving() as served:
        one = await store_item(served, "x")
        doubled: Any = [reference(one), reference(one)]
        referenced_again: Any = [user("x", id="theirs"), reference(one), {"id": "theirs", "type": "item_reference"}]
        await create(served, input=[{"id": "theirs", **user("z")}])
        conversation = await conversations(served).create()
        for items, index in ((doubled, 1), (referenced_again, 2)):
            for request, field in (
                (conversations(served).create(items=items), "items"),
                (conversations(served).items.create(conversation.id, items=items), "items"),
                (create(served, input=items, conversation=conversation.id), "input"),
            ):
                error = await refused(request)
                assert error["param"] == f"{field}[{index}].id"
                assert "Duplicate item id" in error["message"]
        await create(served, input=[reference(one)], conversation=conversation.id)
        assert (await refusal(served, input=[reference(one)], conversation=conversation.id))["param"] == "input[0].id"


async def test_items_of_a_connection_are_found_among_those_of_its_earlier_turns() -> None:
    """A connection finds its unstored items by their ids, those of a turn that was followed since included."""
    async with serving() as served, talking(served) as talk:
        first = await talk.ask(store=False, input="one")
        await talk.ask(store=False, input="two", previous_response_id=first.id)
        stored = await talk.ask(input=[{"id": "mine", **user("three")}])
        items: Any = [reference(first.output[0].id), reference(stored.output[0].id), reference("mine")]
        await talk.ask(store=False, input=items)
        assert [each["content"] for each in messages(served)] == ["one", "three", "three"]
        error = (await talk.refused(input=[*items, reference("none")])).error
        assert error.param == "input[3].id"
