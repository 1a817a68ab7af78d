"""Conversations through the SDK: made, changed, listed, deleted, and what is refused."""

from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError

from apis.storage.kv_store import Entry
from providers.responses.context import conversations as stored_conversations
from tests.support.sdk.client import sdk_client
from tests.support.sdk.conversations import NONE, conversations, keys_of, texts, user
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses
from tests.support.servers.serving import MEMORY, serving

Json = dict[str, Any]
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]


async def test_a_conversation_is_made_read_changed_and_deleted() -> None:
    async with serving() as served:
        conversation = await conversations(served).create(metadata={"topic": "demo"})
        assert (conversation.object, conversation.metadata, conversation.id[:5]) == (
            "conversation",
            {"topic": "demo"},
            "conv_",
        )
        assert await conversations(served).retrieve(conversation.id) == conversation
        changed = await conversations(served).update(conversation.id, metadata={"a": "b"})
        assert changed == conversation.model_copy(update={"metadata": {"a": "b"}})
        assert await conversations(served).retrieve(conversation.id) == changed
        assert (await conversations(served).update(conversation.id, metadata=None)).metadata == {}
        gone = await conversations(served).delete(conversation.id)
        assert (gone.id, gone.object, gone.deleted) == (conversation.id, "conversation.deleted", True)
        with pytest.raises(NotFoundError):
            await conversations(served).retrieve(conversation.id)
        assert await keys_of(served) == []


async def test_a_conversation_may_begin_with_items() -> None:
    async with serving() as served:
        conversation = await conversations(served).create(items=[user("a"), {"role": "assistant", "content": "b"}])
        items = (await conversations(served).items.list(conversation.id, order="asc")).data
        assert [(item.type, item.role, item.status) for item in items] == [
            ("message", "user", "completed"),
            ("message", "assistant", "completed"),
        ]
        assert [item.content[0].type for item in items] == ["input_text", "output_text"]
        assert len({item.id for item in items}) == 2


async def test_items_are_added_read_and_deleted() -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        added = await conversations(served).items.create(conversation.id, items=[user("a"), user("b", id="msg_mine")])
        assert (added.object, added.has_more, added.last_id) == ("list", False, "msg_mine")
        assert added.first_id == added.data[0].id
        for item in added.data:
            assert await conversations(served).items.retrieve(item.id, conversation_id=conversation.id) == item
        assert await conversations(served).items.delete(added.first_id, conversation_id=conversation.id) == conversation
        assert await texts(served, conversation.id) == ["b"]
        for ask in (conversations(served).items.retrieve, conversations(served).items.delete):
            with pytest.raises(NotFoundError):
                await ask(added.first_id, conversation_id=conversation.id)
        await conversations(served).items.create(conversation.id, items=[user("c")])
        assert await texts(served, conversation.id) == ["b", "c"]


async def test_adding_nothing_adds_nothing() -> None:
    async with serving() as served:
        conversation = await conversations(served).create(items=[])
        assert (await conversations(served).items.create(conversation.id, items=[])).data == []
        assert (await conversations(served).items.list(conversation.id)).data == []


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 7, 25, 100])
async def test_all_pages_are_all_items(order: str, limit: int) -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        for start in (0, 20, 40):
            items = [user(str(number)) for number in range(start, start + (20 if start < 40 else 5))]
            await conversations(served).items.create(conversation.id, items=items)
        everything = [str(number) for number in range(45)]
        assert await texts(served, conversation.id, order=order, limit=limit) == (
            everything if order == "asc" else everything[::-1]
        )
        page = await conversations(served).items.list(conversation.id)
        assert (len(page.data), page.has_more, page.last_id) == (20, True, page.data[-1].id)


async def test_items_that_fill_a_page_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours: the item after the page is not decoded to learn that it is there."""
    decoded, decode = list[int](), stored_conversations._decode_item  # pyright: ignore[reportPrivateUsage] - it is counted

    async def count(entry: Entry) -> dict[str, Any]:
        decoded.append(len(entry.value))
        return await decode(entry)

    monkeypatch.setattr(stored_conversations, "_decode_item", count)
    monkeypatch.setattr(stored_conversations, "PAGE_BYTES", 1000)
    async with serving() as served:
        conversation = await conversations(served).create(items=[user("x" * 900), user("y" * 900), user("z")])
        for order, letters in (("asc", ["x", "y", "z"]), ("desc", ["z", "y", "x"])):
            decoded.clear()
            assert [text[0] for text in await texts(served, conversation.id, order=order, limit=100)] == letters
            assert len(decoded) == 3


async def test_an_item_that_is_a_page_of_its_own_is_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours: `has_more` is right in both orders, also where the items on both sides were deleted."""
    monkeypatch.setattr(stored_conversations, "PAGE_BYTES", 1000)
    letters = "vwxyz"
    async with serving() as served:
        kv, read = served.stack.kv_store, list[int]()
        conversation = await conversations(served).create(
            items=[user(letter * 2000, id=f"msg_{letter}") for letter in letters]
        )
        scan = kv.scan

        async def count(*arguments: Any, **named: Any) -> list[tuple[str, Entry]]:
            rows = await scan(*arguments, **named)
            if "/conversation_item/" in arguments[0]:  # the stack's watchers scan, too
                read.append(sum(len(entry.value) for _, entry in rows))
            return rows

        monkeypatch.setattr(kv, "scan", count)
        for order, expected in (("asc", letters), ("desc", letters[::-1])):
            read.clear()
            assert [text[0] for text in await texts(served, conversation.id, order=order, limit=100)] == [*expected]
            assert (len(read), max(read) < 3000) == (5, True)
        for letter in "vz":
            await conversations(served).items.delete(f"msg_{letter}", conversation_id=conversation.id)
        for order, expected in (("asc", "wxy"), ("desc", "yxw")):
            read.clear()
            assert [text[0] for text in await texts(served, conversation.id, order=order, limit=100)] == [*expected]
            assert len(read) == 3


async def test_what_an_earlier_response_made_can_be_added_by_reference_or_whole() -> None:
    async with serving() as served:
        first = await create(served, input="hello")
        conversation = await conversations(served).create(items=[{"type": "item_reference", "id": first.output[0].id}])
        assert await texts(served, conversation.id) == ["hello"]
        other = await conversations(served).create()
        await conversations(served).items.create(other.id, items=[bare(first.output[0])])
        assert (await conversations(served).items.list(other.id)).data[0].id == first.output[0].id


async def test_the_output_of_a_local_shell_has_an_id_of_its_own() -> None:
    shell: Json = {"type": "exec", "command": ["ls"], "env": {}}
    async with serving() as served:
        conversation = await conversations(served).create(
            items=[
                user("list"),
                {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": shell, "status": "completed"},
                {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"},
            ]
        )
        item_texts = [item.id async for item in conversations(served).items.list(conversation.id, order="asc", limit=1)]
        assert len(set(item_texts)) == 3
        await create(served, input="and?", conversation=conversation.id)
        assert [message["role"] for message in messages(served)] == ["user", "assistant", "tool", "user"]


async def test_deleting_a_conversation_deletes_all_its_items_and_no_other() -> None:
    async with serving() as served:
        conversation, other = [await conversations(served).create(items=[user("x")]) for _ in range(2)]
        before = await keys_of(served)
        for _ in range(3):
            await conversations(served).items.create(conversation.id, items=[user(str(n)) for n in range(20)])
        response = await create(served, conversation=conversation.id)
        await conversations(served).delete(conversation.id)
        assert await keys_of(served) == [key for key in before if other.id in key]
        assert (await responses(served).retrieve(response.id)).output_text == "hi"
        await refusal(served, 404, conversation=conversation.id)


async def test_items_of_the_conversation_are_not_taken_twice() -> None:
    async with serving() as served:
        conversation = await conversations(served).create(items=[user("x", id="msg_1")])
        error = await refusal(served, input=[user("y"), user("x", id="msg_1")], conversation=conversation.id)
        assert (error["param"], error["code"]) == ("input[1].id", "invalid_value")
        with pytest.raises(BadRequestError) as caught:
            await conversations(served).items.create(conversation.id, items=[user("y"), user("x", id="msg_1")])
        assert caught.value.param == "items[1].id"
        assert await texts(served, conversation.id) == ["x"]


MALFORMED = ("resp_" + "0" * 32, "x/../y", "\u00e9", "a b", "x" * 250, "conv_")


@pytest.mark.parametrize("unknown", [NONE, "conv_1", *MALFORMED])
async def test_an_unknown_conversation_is_not_found_and_no_id_is_refused(unknown: str) -> None:
    """An id of another form is an invalid value."""
    status, code = (400, "invalid_value") if unknown in MALFORMED else (404, None)
    async with serving() as served:
        for input_items in (unknown, {"id": unknown}):
            error = await refusal(served, status, conversation=input_items)
            assert (error["param"], error["code"]) == ("conversation", code)
        items = conversations(served).items
        for ask in (
            conversations(served).retrieve(unknown),
            conversations(served).update(unknown, metadata={}),
            conversations(served).delete(unknown),
            items.create(unknown, items=[user("x")]),
            items.retrieve("msg_1", conversation_id=unknown),
            items.delete("msg_1", conversation_id=unknown),
            anext(aiter(items.list(unknown))),
        ):
            with pytest.raises(APIStatusError) as caught:
                await ask
            assert caught.value.status_code == (404 if "/" in unknown else status)  # with a slash it is another path


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"conversation": 5}, "conversation", "invalid_type"),
        ({"conversation": ""}, "conversation", "empty_string"),
        ({"conversation": {}}, "conversation.id", "missing_required_parameter"),
        ({"conversation": {"id": None}}, "conversation.id", "invalid_type"),
        ({"conversation": NONE, "previous_response_id": "r"}, "conversation", "mutually_exclusive_parameters"),
    ],
)
async def test_a_bad_choice_of_a_conversation_is_refused(fields: Json, param: str, code: str) -> None:
    async with serving() as served:
        error = await refusal(served, **fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("", {"items": [user("x")] * 21}, "items", "array_above_max_length"),
        ("", {"items": "x"}, "items", "invalid_type"),
        ("", {"items": [{"type": "nonsense"}]}, "items[0].type", "invalid_value"),
        ("", {"items": [user("x", id="a"), user("x", id="a")]}, "items[1].id", "invalid_value"),
        ("", {"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ("", {"metadata": {str(n): "" for n in range(17)}}, "metadata", "array_above_max_length"),
        ("/ID", {}, "metadata", "missing_required_parameter"),
        ("/ID", {"metadata": "x"}, "metadata", "invalid_type"),
        ("/ID/items", {}, "items", "missing_required_parameter"),
        ("/ID/items", {"items": None}, "items", "invalid_type"),
        ("/ID/items", {"items": [user("x")] * 21}, "items", "array_above_max_length"),
        ("/ID/items", {"items": [{"role": "user"}]}, "items[0].content", "missing_required_parameter"),
        ("/ID/items?include=all", {"items": []}, "include[0]", "invalid_value"),
    ],
)
async def test_a_bad_body_is_refused_and_changes_nothing(path: str, body: Json, param: str, code: str) -> None:
    async with serving() as served:
        conversation = await conversations(served).create(items=[user("kept")], metadata={"a": "b"})
        before = await served.stack.kv_store.scan("")
        with pytest.raises(BadRequestError) as caught:
            await served.client.post(f"/conversations{path.replace('ID', conversation.id)}", body=body, cast_to=object)
        assert (caught.value.param, caught.value.code) == (param, code)
        assert await served.stack.kv_store.scan("") == before


async def test_an_item_of_a_conversation_can_be_referred_to_until_it_is_deleted() -> None:
    async with serving() as served:
        conversation = await conversations(served).create(items=[user("hello"), user("there")])
        one, two = [item.id async for item in conversations(served).items.list(conversation.id, order="asc")]
        reference: Any = [{"type": "item_reference", "id": one}]
        assert (await create(served, input=reference)).output_text == "hello"
        await conversations(served).items.delete(one, conversation_id=conversation.id)
        with pytest.raises(NotFoundError):
            await create(served, input=reference)
        await conversations(served).delete(conversation.id)
        with pytest.raises(NotFoundError):
            await create(served, input=[{"type": "item_reference", "id": two}])


async def test_a_reference_to_nothing_is_not_found() -> None:
    async with serving() as served:
        with pytest.raises(NotFoundError) as caught:
            await conversations(served).create(items=[{"type": "item_reference", "id": "msg_none"}])
        assert caught.value.param == "items[0].id"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
        ({"after": "x" * 300}, "after"),
        ({"include": ["all"]}, "include[0]"),
    ],
)
async def test_a_bad_page_is_refused(query: Json, param: str) -> None:
    async with serving() as served:
        conversation = await conversations(served).create()
        with pytest.raises(BadRequestError) as caught:
            await conversations(served).items.list(conversation.id, extra_query=query)
        assert caught.value.param == param
        included = await conversations(served).items.list(conversation.id, include=["code_interpreter_call.outputs"])
        assert included.data == []


async def test_another_tenants_conversation_is_an_unknown_one() -> None:
    async with serving(server={"api_keys": KEYS}, kv_store=MEMORY) as served:
        conversation = await conversations(served).create(items=[user("x", id="msg_1")], metadata={"a": "b"})
        response = await create(served, conversation=conversation.id)
        before = await served.stack.kv_store.scan("a/")
        async with sdk_client(served.url, "key-of-b") as client:
            own = await client.conversations.create()
            errors: list[list[Json]] = []
            for identity, item in ((conversation.id, response.output[0].id), (NONE, "msg_none")):
                items: Any = client.conversations.items
                asks = [
                    client.conversations.retrieve(identity),
                    client.conversations.update(identity, metadata={}),
                    client.conversations.delete(identity),
                    items.create(identity, items=[user("y")]),
                    items.retrieve("msg_1", conversation_id=identity),
                    items.retrieve(item, conversation_id=own.id),
                    items.delete("msg_1", conversation_id=identity),
                    anext(aiter(items.list(identity))),
                    items.create(own.id, items=[{"type": "item_reference", "id": item}]),
                    client.responses.create(model="scripted", input="x", conversation=identity),
                ]
                errors.append([])
                for ask in asks:
                    with pytest.raises(APIStatusError) as caught:
                        await ask
                    assert caught.value.status_code == 404
                    errors[-1].append(_nameless(caught.value.body))
            assert errors[0] == errors[1]
        assert await served.stack.kv_store.scan("a/") == before
        assert len(chat_requests(served)) == 1


def _nameless(error: Any) -> Json:
    """The error without the id it names."""
    return {**error, "message": error["message"].partition("'")[0]}
