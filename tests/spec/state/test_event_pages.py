"""Pages of a background response's stored events, read through the SDK and held against its stream."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.support.servers.serving import scripted, serving
from tests.support.waiting import until_ended

Json = dict[str, Any]
WORDS = [f"word{number} " for number in range(40)]
KEYS = {"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]}


async def events(client: AsyncOpenAI, response_id: str, **query: Any) -> Json:
    path = f"/responses/{response_id}/events"
    return await client.get(path, cast_to=object, options={"params": query})  # type: ignore[return-value]  # plain JSON


async def paged(client: AsyncOpenAI, response_id: str, **query: Any) -> list[Json]:
    rows: list[Json] = []
    after: Json = {}
    while True:
        page = await events(client, response_id, **query, **after)
        rows += page["data"]
        if not page["has_more"]:
            return rows
        assert len(page["data"]) == query["limit"]
        after = {"after": page["last_id"]}


async def test_pages_of_any_size_and_order_hold_the_events_of_the_stream() -> None:
    async with serving(scripted([{"text": WORDS}])) as served:
        response = await served.client.responses.create(model="scripted", input="Hi", background=True)
        await until_ended(served.client.responses, response.id)
        stream = await served.client.responses.retrieve(response.id, stream=True)
        streamed = [event.to_dict(mode="json") async for event in stream]
        assert len(streamed) > 40
        for limit in (1, 7, 1000):
            assert await paged(served.client, response.id, limit=limit) == streamed
            assert await paged(served.client, response.id, limit=limit, order="desc") == streamed[::-1]
        page = await events(served.client, response.id, after=10, limit=3)
        assert ([row["sequence_number"] for row in page["data"]], page["last_id"]) == ([11, 12, 13], "13")
        page = await events(served.client, response.id, after=10, limit=3, order="desc")
        assert [row["sequence_number"] for row in page["data"]] == [9, 8, 7]
        beyond = await events(served.client, response.id, after=99_999)
        assert (beyond["data"], beyond["last_id"], beyond["has_more"]) == ([], None, False)


async def test_the_page_of_a_response_that_runs_ends_without_its_end() -> None:
    async with serving(scripted([{"text": ["Early. "]}, {"wait_s": 30}, {"text": "Late."}])) as served:
        response = await served.client.responses.create(model="scripted", input="Hi", background=True)
        async with asyncio.timeout(10):
            while "Early. " not in str(page := await events(served.client, response.id)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        assert not page["has_more"]
        assert page["data"][-1]["type"] == "response.output_text.delta"
        await served.client.responses.cancel(response.id)


async def test_a_response_without_a_log_and_a_wrong_cursor_are_errors_that_name_them() -> None:
    async with serving(server=KEYS) as served:
        stored = await served.client.responses.create(model="scripted", input="Hi")
        with pytest.raises(BadRequestError, match="not made with `background`") as caught:
            await events(served.client, stored.id)
        assert caught.value.param == "response_id"
        for query in ({"after": "-1"}, {"after": "x"}, {"limit": 0}, {"limit": 1001}, {"order": "up"}):
            with pytest.raises(BadRequestError) as caught:
                await events(served.client, stored.id, **query)
            assert caught.value.param == next(iter(query))
        with pytest.raises(NotFoundError):
            await events(served.client, "resp_none")


async def test_the_events_of_another_tenant_are_unknown() -> None:
    async with serving(server=KEYS) as served:
        response = await served.client.responses.create(model="scripted", input="Hi", background=True)
        await until_ended(served.client.responses, response.id)
        assert (await events(served.client, response.id))["data"]
        with pytest.raises(NotFoundError):
            await events(served.client.with_options(api_key="sk-b"), response.id)


async def test_events_are_in_the_dialect_of_the_request() -> None:
    turns = [{"reasoning": "Hm."}, {"text": "Hi."}]
    async with serving(scripted(turns)) as served:
        response = await served.client.responses.create(model="scripted", input="Hi", background=True)
        await until_ended(served.client.responses, response.id)
        client = served.client.with_options(default_headers={"X-Responses-Dialect": "open-responses"})
        types = {row["type"] for row in (await events(client, response.id))["data"]}
        assert "response.reasoning.delta" in types
        assert "response.reasoning_text.delta" not in types
