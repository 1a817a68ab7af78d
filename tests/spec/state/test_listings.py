"""Listings of stored responses and conversations: extensions that the built-in page uses, tested through the SDK."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.support.servers.serving import serving
from tests.support.waiting import until_status

Json = dict[str, Any]
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
KEYS = {"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]}


async def listed(client: AsyncOpenAI, path: str = "/responses", **query: Any) -> Json:
    return await client.get(path, cast_to=object, options={"params": query})  # type: ignore[return-value]  # plain JSON


async def ids(client: AsyncOpenAI, **query: Any) -> list[str]:
    return [row["id"] for row in (await listed(client, **query))["data"]]


async def test_responses_are_listed_newest_first_in_pages() -> None:
    async with serving({"provider": "scripted", "turns": [[{"text": "One answer of many words."}]]}) as served:
        created = [(await served.client.responses.create(model="scripted", input="Hi")).id for _ in range(5)]
        first = await listed(served.client, limit=2)
        assert [row["id"] for row in first["data"]] == created[:2:-1]
        assert first["has_more"]
        row = first["data"][0]
        assert (row["status"], row["model"], row["preview"]) == ("completed", "scripted", "One answer of many words.")
        assert "output" not in row
        rest = await listed(served.client, limit=100, after=first["last_id"])
        assert [row["id"] for row in rest["data"]] == created[2::-1]
        assert not rest["has_more"]
        assert await ids(served.client, order="asc") == created
        assert await ids(served.client, order="asc", after=created[2]) == created[3:]
        await served.client.responses.delete(created[1])
        assert created[1] not in await ids(served.client)


async def test_questions_and_answers_are_searched_and_shown() -> None:
    """A question is found by its words, also one that an SDK sends after a long history."""
    question = "Which fjord is the DEEPEST? " + "detail " * 60
    history = [{"role": "user", "content": "Old."}, {"role": "assistant", "content": "Yes."}]
    parts = [{"type": "input_text", "text": question}, {"type": "input_image", "image_url": PIXEL}]
    async with serving({"provider": "scripted", "turns": [[{"text": "Long. " * 100 + "Sognefjord"}]]}) as served:
        items: Any = [*history, {"role": "user", "content": parts}]
        response = await served.client.responses.create(model="scripted", input=items)
        other = await served.client.responses.create(model="scripted", input="Another one.")
        assert await ids(served.client, search="the deepest") == [response.id]
        assert await ids(served.client, search="sognefjord") == [other.id, response.id]
        assert await ids(served.client, search="Old.") == []
        rows = (await listed(served.client))["data"]
    assert [row["question"] for row in rows] == ["Another one.", question[:160]]
    assert all(len(row["preview"]) == 160 for row in rows)


async def test_a_listing_has_filters() -> None:
    turns = [[{"text": "Fine."}], [{"fail": "It broke."}], [{"text": "Later."}]]
    async with serving({"provider": "scripted", "turns": turns}) as served:
        create = served.client.with_options(max_retries=0).responses.create
        fine = await create(model="scripted", input="Hi")
        failed = await create(model="scripted", input="Hi", background=True)
        await until_status(served.client.responses, failed.id, "failed")
        conversation = await served.client.conversations.create()
        turn = await create(model="scripted", input="Hi", conversation=conversation.id)
        assert await ids(served.client, status="failed") == [failed.id]
        assert await ids(served.client, background=True) == [failed.id]
        assert set(await ids(served.client, background=False)) == {fine.id, turn.id}
        assert await ids(served.client, conversation=conversation.id) == [turn.id]
        assert await ids(served.client, model="another") == []
        with pytest.raises(BadRequestError) as caught:
            await listed(served.client, status="gone")
        assert caught.value.param == "status"


async def test_a_background_response_is_listed_while_it_runs() -> None:
    async with serving({"provider": "scripted", "turns": [[{"wait_s": 30}, {"text": "Late."}]]}) as served:
        response = await served.client.responses.create(model="scripted", input="Hi", background=True)
        [row] = (await listed(served.client, background=True))["data"]
        assert row["id"] == response.id
        assert row["status"] in ("queued", "in_progress")
        await served.client.responses.cancel(response.id)
        [row] = (await listed(served.client))["data"]
        assert (row["id"], row["status"]) == (response.id, "cancelled")


async def test_conversations_are_listed_newest_first() -> None:
    async with serving() as served:
        created = [(await served.client.conversations.create(metadata={"n": str(number)})).id for number in range(3)]
        page = await listed(served.client, "/conversations", limit=2)
        assert [row["id"] for row in page["data"]] == created[:0:-1]
        assert page["data"][0]["metadata"] == {"n": "2"}
        await served.client.conversations.delete(created[2])
        rest = await listed(served.client, "/conversations")
        assert [row["id"] for row in rest["data"]] == created[1::-1]


async def test_a_tenant_lists_its_own_alone() -> None:
    async with serving(server=KEYS) as served:
        other = served.client.with_options(api_key="sk-b")
        mine = await served.client.responses.create(model="scripted", input="Hi")
        theirs = await other.responses.create(model="scripted", input="Hi")
        assert await ids(served.client) == [mine.id]
        assert await ids(other) == [theirs.id]
