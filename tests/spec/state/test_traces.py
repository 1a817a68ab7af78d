"""Stored traces of agents: bounds, repetition, tenants, pages, errors that name the field."""

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from apis.observation.traces import install_span_forwarder
from tests.support.sdk.agent_traces import DAY
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until_empty

Json = dict[str, Any]
KEYS = {"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]}


def trace(number: int = 1, **fields: Any) -> Json:
    return {"object": "trace", "id": f"trace_{number:032x}", "workflow_name": f"Flow {number}", **fields}


def span(number: int, trace_number: int = 1, **fields: Any) -> Json:
    times = {"started_at": f"{DAY}T12:00:{number % 60:02}.000Z", "ended_at": f"{DAY}T12:01:00.500000+00:00"}
    return {
        "object": "trace.span",
        "id": f"span_{number:024x}",
        "trace_id": f"trace_{trace_number:032x}",
        "parent_id": None,
        "span_data": {"type": "function", "name": "add"},
        "error": None,
        **times,
        **fields,
    }


def at(**offset: float) -> str:
    """The time that is so far from now."""
    return (datetime.now(UTC) + timedelta(**offset)).isoformat()


async def ingest(client: AsyncOpenAI, *items: Json) -> None:
    await client.post("/traces/ingest", cast_to=object, body={"data": items})


async def read(client: AsyncOpenAI, path: str = "", **query: Any) -> Json:
    return await client.get(f"/traces{path}", cast_to=object, options={"params": query})  # type: ignore[return-value]  # plain JSON


async def ids(client: AsyncOpenAI, **query: Any) -> list[int]:
    return [int(row["id"][6:], 16) for row in (await read(client, **query))["data"]]


async def whole(client: AsyncOpenAI, number: int = 1) -> Json:
    return await read(client, f"/trace_{number:032x}")


def bounded(**config: Any) -> Any:
    return serving(more={"traces": {"provider": "kv", **config}})


async def test_a_repeated_request_changes_nothing() -> None:
    forwarded: list[str] = []
    install_span_forwarder(lambda each, group, tenant: forwarded.append(f"{tenant} {group} {each.id}"))
    try:
        async with serving() as served:
            items = [trace(group_id="g"), span(1), span(2, error={"message": "no", "data": None})]
            await ingest(served.client, *items)
            first = await whole(served.client)
            await ingest(served.client, *items, items[1])
            assert await whole(served.client) == first
            assert (first["span_count"], first["error_count"]) == (2, 1)
            assert (first["started_at"], first["ended_at"]) == (items[1]["started_at"], items[1]["ended_at"])
    finally:
        install_span_forwarder(None)
    assert forwarded == [f"default g {items[1]['id']}", f"default g {items[2]['id']}"]


async def test_spans_may_come_before_their_trace_and_unfinished_ones_again() -> None:
    async with serving() as served:
        unfinished = span(1, ended_at=None, error={"message": "so far"})
        await ingest(served.client, unfinished)
        assert (await whole(served.client))["workflow_name"] is None
        await ingest(served.client, trace(), span(1))
        traces = await whole(served.client)
        assert (traces["workflow_name"], traces["span_count"], traces["error_count"]) == ("Flow 1", 1, 0)
        assert traces["spans"] == [span(1)]
        await ingest(served.client, unfinished)
        assert (await whole(served.client))["spans"] == [span(1)]


async def test_workers_that_ingest_one_trace_at_a_time_lose_no_span() -> None:
    async with serving() as served:
        await asyncio.gather(*(ingest(served.client, trace(), span(number)) for number in range(16)))
        traces = await whole(served.client)
        assert traces["span_count"] == len(traces["spans"]) == 16


async def test_traces_are_listed_in_pages_and_by_group_workflow_and_response() -> None:
    async with serving() as served:
        for number in range(1, 8):
            await ingest(served.client, trace(number, group_id=f"group {number % 2}"))
            await asyncio.sleep(0.002)  # the order is by milliseconds
        assert await ids(served.client) == [7, 6, 5, 4, 3, 2, 1]
        first = await read(served.client, limit=3)
        assert first["has_more"]
        assert await ids(served.client, limit=3, after=first["last_id"]) == [4, 3, 2]
        assert await ids(served.client, order="asc", limit=2) == [1, 2]
        assert await ids(served.client, order="asc", after=trace(5)["id"]) == [6, 7]
        assert await ids(served.client, group_id="group 0") == [6, 4, 2]
        assert await ids(served.client, workflow_name="Flow 3") == [3]
        for number in (2, 5):
            await ingest(served.client, span(1, number, span_data={"type": "response", "response_id": "resp_1"}))
        assert await ids(served.client, response_id="resp_1") == [5, 2]
        assert await ids(served.client, response_id="resp_1", limit=1, after=trace(5)["id"]) == [2]
        assert await ids(served.client, response_id="resp_2") == []
        with pytest.raises(BadRequestError) as caught:
            await read(served.client, after="trace_none")
        assert caught.value.param == "after"


@pytest.mark.parametrize(
    ("broken", "param"),
    [
        ({"object": "spam"}, "data[1].object"),
        ({"object": None}, "data[1].object"),
        ({"id": "a/b"}, "data[1].id"),
        ({"id": ""}, "data[1].id"),
        ({"trace_id": "x" * 129}, "data[1].trace_id"),
        ({"started_at": "yesterday"}, "data[1].started_at"),
        ({"ended_at": 1763812800}, "data[1].ended_at"),
        ({"ended_at": "9999-01-01T00:00:00Z"}, "data[1].ended_at"),
        ({"started_at": "2600-01-01T00:00:00Z"}, "data[1].started_at"),
        ({"started_at": at(days=-31)}, "data[1].started_at"),
        ({"ended_at": at(days=2)}, "data[1].ended_at"),
        ({"span_data": {"name": "no type"}}, "data[1].span_data.type"),
        ({"span_data": None}, "data[1].span_data"),
        ({"error": {"data": {}}}, "data[1].error.message"),
        ({"span_data": {"type": "custom", **{f"f{n}": "x" * 99_000 for n in range(3)}}}, "data[1]"),
    ],
)
async def test_a_wrong_span_is_an_error_that_names_it_and_nothing_is_stored(broken: Json, param: str) -> None:
    """A time is of the last thirty days, or of the next one."""
    async with serving() as served:
        with pytest.raises(BadRequestError) as caught:
            await ingest(served.client, trace(), {**span(1), **broken})
        assert caught.value.param == param
        assert await ids(served.client) == []


async def test_long_values_are_cut_and_numbers_of_any_size_are_kept() -> None:
    data = {"type": "function", "input": "é" * 90_000, "output": [{"text": "x" * 200_000}], "big": 2**80, "small": "s"}
    async with serving() as served:
        await ingest(served.client, span(1, span_data=copy.deepcopy(data)))
        [stored] = (await whole(served.client))["spans"]
        cut = stored["span_data"]
        assert cut["input"].endswith("é... [truncated]")
        assert 90_000 < len(cut["input"].encode()) <= 100_000
        assert (cut["output"]["truncated"], cut["output"]["original_type"]) == (True, "array")
        assert (cut["big"], cut["small"]) == (2**80, "s")
        with pytest.raises(BadRequestError, match="metadata") as caught:
            await ingest(served.client, trace(metadata={"a": "x" * 20_000}))
        assert caught.value.param == "data[0].metadata"


async def test_a_trace_that_is_full_counts_what_it_drops() -> None:
    async with bounded(max_trace_spans=5) as served:
        await ingest(served.client, trace(), *(span(number) for number in range(8)))
        traces = await whole(served.client)
        assert (traces["span_count"], len(traces["spans"]), traces["dropped_spans"]) == (5, 5, 3)
    async with bounded(max_trace_bytes=1024 * 1024) as served:
        data = {"type": "custom", "data": "x" * 99_000}
        await ingest(served.client, *(span(number, span_data=data) for number in range(20)))
        traces = await whole(served.client)
        assert (traces["span_count"], traces["dropped_spans"]) == (10, 10)


async def test_the_oldest_traces_of_a_full_tenant_make_room() -> None:
    async with bounded(max_tenant_traces=3) as served:
        for number in range(1, 6):
            await ingest(served.client, trace(number), span(1, number))
            await asyncio.sleep(0.002)
        assert await ids(served.client) == [5, 4, 3]
        with pytest.raises(NotFoundError):
            await whole(served.client, 1)
        with pytest.raises(BadRequestError) as caught:
            await ingest(served.client, *(trace(number) for number in range(10, 14)))
        assert (caught.value.param, caught.value.code) == ("data", "storage_quota_exceeded")
    async with bounded(max_tenant_bytes=1024 * 1024) as served:
        data = {"type": "custom", "data": "x" * 90_000}
        for number in range(1, 5):
            await ingest(served.client, *(span(each, number, span_data=data) for each in range(4)))
            await asyncio.sleep(0.002)
        assert await ids(served.client) == [4, 3]
        assert await stored_kinds(served) == {"trace", "trace_span", "trace_age", "trace_usage"}
        assert len(await served.stack.kv_store.scan("default/trace_span/")) == 8


async def stored_kinds(served: Served) -> set[str]:
    return {key.split("/")[1] for key, _ in await served.stack.kv_store.scan("default/")}


async def test_a_deleted_trace_leaves_nothing() -> None:
    async with serving() as served:
        response = {"type": "response", "response_id": "resp_1"}
        await ingest(served.client, trace(), span(1, span_data=response))
        deleted: Any = await served.client.delete(f"/traces/{trace()['id']}", cast_to=object)
        assert deleted == {"id": trace()["id"], "object": "trace", "deleted": True}
        assert await stored_kinds(served) == {"trace_usage"}
        for path in (f"/{trace()['id']}", "/" + "x" * 3000, "/a%00b"):
            with pytest.raises(NotFoundError):
                await read(served.client, path)


async def test_traces_expire_after_their_retention() -> None:
    async with bounded(retention_days=1 / 86_400) as served:
        await ingest(served.client, trace(), span(1))
        assert await ids(served.client) == [1]
        await until_empty(lambda: ids(served.client))


async def test_the_traces_of_another_tenant_are_unknown() -> None:
    async with serving(server=KEYS) as served:
        other = served.client.with_options(api_key="sk-b")
        await ingest(served.client, trace(), span(1))
        assert await ids(other) == []
        await ingest(other, span(1, span_data={"type": "custom"}))
        assert (await whole(served.client))["spans"] == [span(1)]
        assert (await whole(other))["workflow_name"] is None
        await other.delete(f"/traces/{trace()['id']}", cast_to=object)
        assert await ids(served.client) == [1]
        with pytest.raises(NotFoundError):
            await whole(other)


async def test_a_server_without_traces_says_so() -> None:
    async with serving(more={"traces": None}) as served:
        with pytest.raises(BadRequestError) as caught:
            await ingest(served.client, trace())
        assert caught.value.code == "not_configured"
