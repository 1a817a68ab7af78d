"""Stored responses: reading one, listing its input, deleting it, and the operations that are refused."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import APIStatusError, BadRequestError, NotFoundError

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import bare, create, messages, responses, stream
from tests.support.servers.serving import Served, scripted, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

GIVEN = [{"role": "user", "content": f"text {number}", "id": f"msg_{number}"} for number in range(5)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as served:
        yield served


def error_of(caught: pytest.ExceptionInfo[APIStatusError]) -> Any:
    return caught.value.body


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stored_response_is_the_one_that_was_sent(served: Served, streamed: bool) -> None:
    fields: dict[str, Any] = {"metadata": {"a": "b"}, "temperature": 0.5, "instructions": "Be brief."}
    response = (await stream(served, **fields))[-1].response if streamed else await create(served, **fields)
    assert bare(await responses(served).retrieve(response.id)) == bare(response)


async def test_a_response_is_stored_unless_it_says_otherwise(served: Served) -> None:
    assert (await create(served)).store is True
    response = await create(served, store=False)
    assert response.store is False
    with pytest.raises(NotFoundError):
        await responses(served).retrieve(response.id)


async def test_a_deleted_response_is_gone(served: Served) -> None:
    response = await create(served)
    await responses(served).delete(response.id)
    with pytest.raises(NotFoundError):
        await responses(served).retrieve(response.id)
    with pytest.raises(NotFoundError):
        await responses(served).delete(response.id)


async def test_deleting_returns_the_deleted_id(served: Served) -> None:
    response = await create(served)
    raw = await responses(served).with_raw_response.delete(response.id)
    assert raw.http_response.json() == {"id": response.id, "object": "response", "deleted": True}


@pytest.mark.parametrize("method", ["retrieve", "delete", "cancel", "input_items"])
async def test_an_unknown_response_is_not_found(served: Served, method: str) -> None:
    ask = responses(served).input_items.list if method == "input_items" else getattr(responses(served), method)
    with pytest.raises(NotFoundError) as caught:
        await ask("resp_none")
    assert error_of(caught) == {
        "message": "Response with id 'resp_none' not found.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


async def test_a_finished_response_cannot_be_cancelled(served: Served) -> None:
    response = await create(served)
    with pytest.raises(BadRequestError, match="background"):
        await responses(served).cancel(response.id)
    assert (await responses(served).retrieve(response.id)).status == "completed"


async def test_a_response_that_was_not_made_in_the_background_cannot_be_streamed_again(served: Served) -> None:
    response = await create(served)
    with pytest.raises(BadRequestError, match="background"):
        await responses(served).retrieve(response.id, stream=True)


# --- input items -----------------------------------------------------------------------------------------------------


async def test_input_items_come_newest_first(served: Served) -> None:
    response = await create(served, input=GIVEN)
    page = await responses(served).input_items.list(response.id)
    assert [item.id for item in page.data] == ["msg_4", "msg_3", "msg_2", "msg_1", "msg_0"]
    assert (page.first_id, page.last_id, page.has_more, page.object) == ("msg_4", "msg_0", False, "list")


PAGES: dict[str, tuple[dict[str, Any], list[int], bool]] = {
    "in order": ({"order": "asc"}, [0, 1, 2, 3, 4], False),
    "newest first": ({"order": "desc"}, [4, 3, 2, 1, 0], False),
    "the first two": ({"order": "asc", "limit": 2}, [0, 1], True),
    "the newest two": ({"limit": 2}, [4, 3], True),
    "exactly all": ({"order": "asc", "limit": 5}, [0, 1, 2, 3, 4], False),
    "after one": ({"order": "asc", "after": "msg_1"}, [2, 3, 4], False),
    "before one": ({"after": "msg_3"}, [2, 1, 0], False),
    "after one, limited": ({"order": "asc", "after": "msg_1", "limit": 1}, [2], True),
    "after the last": ({"order": "asc", "after": "msg_4"}, [], False),
}


@pytest.mark.parametrize("case", PAGES.values(), ids=PAGES)
async def test_input_items_come_in_pages(served: Served, case: tuple[dict[str, Any], list[int], bool]) -> None:
    params, numbers, has_more = case
    response = await create(served, input=GIVEN)
    page = await responses(served).input_items.list(response.id, **params)
    ids = [f"msg_{number}" for number in numbers]
    assert [item.id for item in page.data] == ids
    assert page.has_more is has_more
    assert (page.first_id, page.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


async def test_the_sdk_walks_all_pages(served: Served) -> None:
    response = await create(served, input=GIVEN)
    pages = responses(served).input_items.list(response.id, limit=2, order="asc")
    assert [item.id async for item in pages] == [item["id"] for item in GIVEN]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
        ({"extra_query": {"limit": "two"}}, "limit"),
    ],
)
async def test_a_page_that_cannot_be_is_refused(served: Served, params: dict[str, Any], param: str) -> None:
    response = await create(served, input=GIVEN)
    with pytest.raises(BadRequestError) as caught:
        await responses(served).input_items.list(response.id, **params)
    assert error_of(caught)["param"] == param


async def test_a_string_is_listed_as_a_message_with_an_id(served: Served) -> None:
    response = await create(served, input="hi")
    (item,) = (await responses(served).input_items.list(response.id)).data
    assert item.id.startswith("msg_")
    assert (item.type, item.role, item.status) == ("message", "user", "completed")
    assert [(part.type, part.text) for part in item.content] == [("input_text", "hi")]


async def test_every_listed_item_has_an_id_and_keeps_what_it_came_with(served: Served) -> None:
    input_items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{oops", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "custom": {"deep": [1, {"a": None}]}},
    ]
    response = await create(served, input=input_items)
    items = (await responses(served).input_items.list(response.id, order="asc")).data
    assert [item.id.partition("_")[0] for item in items] == ["rs", "fc", "fco"]
    for item, fields in zip(items, input_items, strict=True):
        listed = item.model_dump(mode="json")
        assert {key: listed[key] for key in fields if key != "custom"} == {
            key: value for key, value in fields.items() if key != "custom"
        }
    assert items[2].custom["deep"][0] == 1


async def test_only_the_responses_own_input_is_listed(served: Served) -> None:
    first = await create(served, input="Q1", instructions="Be brief.")
    second = await create(served, input="Q2", previous_response_id=first.id)
    listed = (await responses(served).input_items.list(second.id)).data
    assert [item.content[0].text for item in listed] == ["Q2"]


async def test_a_reference_is_listed_as_its_item() -> None:
    async with serving(scripted([call("get", '{"a":1}')])) as served:
        first = await create(served)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
        second = await create(served, input=[{"type": "item_reference", "id": first.output[0].id}, output])
        items = (await responses(served).input_items.list(second.id, order="asc")).data
    assert [(item.type, item.call_id) for item in items] == [
        ("function_call", "call_1"),
        ("function_call_output", "call_1"),
    ]
    assert items[0].id == first.output[0].id


# --- counting --------------------------------------------------------------------------------------------------------


async def count(served: Served, **fields: Any) -> int:
    counted = await responses(served).input_tokens.count(**{"model": "scripted", "input": "one two three", **fields})
    assert counted.object == "response.input_tokens"
    return counted.input_tokens


async def test_input_tokens_are_those_the_response_would_use(served: Served) -> None:
    response = await create(served, input="one two three")
    assert await count(served) == response.usage.input_tokens == 3


async def test_counting_counts_the_history_and_the_instructions(served: Served) -> None:
    alone = await count(served)
    first = await create(served, input="four five", store=True)
    assert await count(served, previous_response_id=first.id) == alone + 4
    assert await count(served, instructions="six seven") == alone + 2


async def test_counting_asks_no_model_and_stores_nothing() -> None:
    async with serving() as served:
        await count(served)
        with pytest.raises(IndexError):
            messages(served)


async def test_counting_refuses_what_creating_would(served: Served) -> None:
    with pytest.raises(BadRequestError, match="resp_none"):
        await count(served, previous_response_id="resp_none")
