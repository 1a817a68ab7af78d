"""The tree of a chain, its webhook deliveries and the search in listings: extensions, tested through the SDK."""

import asyncio
from itertools import chain, repeat
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.support.sdk.requests import create
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.webhook_receiver import receiving

Json = dict[str, Any]
KEYS = {"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]}
SOON = {"poll_s": 0.05, "lease_s": 1}


async def read(client: AsyncOpenAI, path: str, **query: Any) -> Json:
    return await client.get(path, cast_to=object, options={"params": query})  # type: ignore[return-value]  # plain JSON


async def respond(served: Served, previous: str | None = None, **fields: Any) -> str:
    return (await create(served, input="Hi", previous_response_id=previous, **fields)).id


def parents(tree: Json) -> dict[str, str | None]:
    return {row["id"]: row["previous_response_id"] for row in tree["data"]}


async def test_the_tree_of_a_chain_has_every_branch_from_whichever_node_it_is_read() -> None:
    async with serving() as served:
        root = await respond(served)
        response = await respond(served, root)
        right = await respond(served, root)
        deep = await respond(served, right)
        forked = await respond(served, right)
        other = await respond(served)
        expected = {root: None, response: root, right: root, deep: right, forked: right}
        trees = [await read(served.client, f"/responses/{node}/tree") for node in expected]
        assert all(parents(tree) == expected and not tree["has_more"] for tree in trees)
        tree = trees[0]
        ids: list[str] = [row["id"] for row in tree["data"]]
        assert all(ids.index(parent) < ids.index(each) for each, parent in expected.items() if parent)
        assert tree["data"][0]["preview"] == "Hi"
        assert "output" not in tree["data"][0]
        assert parents(await read(served.client, f"/responses/{other}/tree")) == {other: None}


async def test_a_deleted_response_stays_in_the_tree_as_a_gap_while_others_continue_it() -> None:
    async with serving() as served:
        root = await respond(served)
        middle = await respond(served, root)
        leaf = await respond(served, middle)
        await served.client.responses.delete(middle)
        tree = await read(served.client, f"/responses/{leaf}/tree")
        assert parents(tree) == {root: None, middle: root, leaf: middle}
        assert tree["data"][1] == {"id": middle, "object": "response", "deleted": True, "previous_response_id": root}
        with pytest.raises(NotFoundError):
            await read(served.client, f"/responses/{middle}/tree")


async def test_a_tree_has_a_limit_and_responses_that_still_run() -> None:
    async with serving(scripted([{"text": "One."}], [{"text": "Two."}], [{"wait_s": 30}])) as served:
        root = await respond(served)
        child = await respond(served, root)
        running = await respond(served, child, background=True)
        for node in (root, running):
            tree = await read(served.client, f"/responses/{node}/tree")
            assert parents(tree) == {root: None, child: root, running: child}
        short = await read(served.client, f"/responses/{root}/tree", limit=1)
        assert (parents(short), short["has_more"]) == ({root: None}, True)
        with pytest.raises(BadRequestError) as caught:
            await read(served.client, f"/responses/{root}/tree", limit=0)
        assert caught.value.param == "limit"
        await served.client.responses.cancel(running)


async def test_details_of_a_response_are_its_tenants_alone() -> None:
    async with serving(server=KEYS) as served:
        response = await respond(served)
        other = served.client.with_options(api_key="sk-b")
        for path in ("tree", "webhook_deliveries"):
            await read(served.client, f"/responses/{response}/{path}")
            with pytest.raises(NotFoundError):
                await read(other, f"/responses/{response}/{path}")
            with pytest.raises(NotFoundError):
                await read(served.client, f"/responses/resp_gone/{path}")


async def test_webhook_deliveries_are_listed_with_each_of_their_attempts() -> None:
    async with receiving() as receiver:
        answers = chain([500, 503], repeat(200))
        receiver.answer = lambda: next(answers)
        webhooks = {"receivers": [receiver.hook()]}
        async with serving(responses={"background": SOON}, webhooks=webhooks) as served:
            response = await respond(served, background=True)
            await receiver.come(3)
            delivery = await settled(served.client, response)
            assert (delivery["object"], delivery["event"]) == ("webhook_delivery", "response.completed")
            assert (delivery["host"], delivery["status"]) == ("127.0.0.1", "delivered")
            assert "token" not in str(delivery)
            assert delivery["id"] == receiver.requests[0][0]["webhook-id"]
            assert [each["status_code"] for each in delivery["attempts"]] == [500, 503, 200]
            assert delivery["attempt_count"] == 3
            assert delivery["next_attempt_at"] is None
            times = [each["created_at"] for each in delivery["attempts"]]
            assert times == sorted(times)
            await served.client.responses.delete(response)
            assert not await served.stack.kv_store.scan("default/webhook_delivery/")


async def settled(client: AsyncOpenAI, response: str, *, tried: bool = False) -> Json:
    """Return the one delivery of a response when it waits no more, or with `tried` after its first attempt."""
    async with asyncio.timeout(10):
        while True:
            for delivery in (await read(client, f"/responses/{response}/webhook_deliveries"))["data"]:
                if delivery["status"] != "pending" or (tried and delivery["attempts"]):
                    return delivery
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("code", "max_age_s"), [(410, 60), (500, 0.1)])
async def test_a_delivery_that_was_given_up_has_failed(code: int, max_age_s: float) -> None:
    async with receiving() as receiver:
        receiver.answer = lambda: code
        webhooks = {"receivers": [receiver.hook(max_age_s=max_age_s)]}
        async with serving(responses={"background": SOON}, webhooks=webhooks) as served:
            delivery = await settled(served.client, await respond(served, background=True))
            assert (delivery["status"], delivery["next_attempt_at"]) == ("failed", None)
            assert {each["status_code"] for each in delivery["attempts"]} <= {code}


async def test_a_receiver_that_cannot_be_reached_is_an_attempt_with_a_reason() -> None:
    hook = {"url": "http://127.0.0.1:9/", "secret": "whsec_" + "A" * 64, "private": True, "retry_s": 60}
    async with serving(responses={"background": SOON}, webhooks={"receivers": [hook]}) as served:
        response = await respond(served, background=True)
        delivery = await settled(served.client, response, tried=True)
        assert delivery["status"] == "pending"
        assert delivery["attempts"][0]["status_code"] is None
        assert delivery["attempts"][0]["error"]
        assert delivery["next_attempt_at"] > delivery["attempts"][0]["created_at"]


async def test_listings_are_searched() -> None:
    async with serving(scripted([{"text": "About Oslo."}], [{"text": "About Rome."}])) as served:
        oslo = await respond(served, metadata={"trip": "North"})
        rome = await respond(served)
        for text, expected in [("oslo", [oslo]), ("NORTH", [oslo]), ("about", [rome, oslo]), (rome[-9:], [rome])]:
            page = await read(served.client, "/responses", search=text)
            assert [row["id"] for row in page["data"]] == expected
        first = await served.client.conversations.create(metadata={"topic": "Fjords"})
        await served.client.conversations.create()
        page = await read(served.client, "/conversations", search="fjord")
        assert [row["id"] for row in page["data"]] == [first.id]
