"""The overview of a stack: background responses, workers, providers and figures, and who may see which of them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.support.servers.serving import scripted, serving

Json = dict[str, Any]
SLOW = scripted([{"wait_s": 30}, {"text": "Late."}])
ONE_PLACE = {"background": {"max_running": 1}}
TENANTS = [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]
SERVER_PARTS = ("workers", "providers", "figures", "processes")


async def overview(client: AsyncOpenAI) -> Json:
    return await client.get("/stack/overview", cast_to=object)  # type: ignore[return-value]  # plain JSON


async def until(client: AsyncOpenAI, holds: Callable[[Json], bool]) -> Json:
    async with asyncio.timeout(10):
        while not holds(overview_now := await overview(client)):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)
    return overview_now


async def test_runs_have_their_worker_or_their_place_in_the_queue() -> None:
    async with serving(SLOW, responses=ONE_PLACE) as served:
        created = [
            await served.client.responses.create(model="scripted", input="Hi", background=True) for _ in range(3)
        ]
        overview_now = await until(served.client, lambda each: each["background"]["running"] == 1)
        background, (worker,) = overview_now["background"], overview_now["workers"]
        assert (background["waiting"], background["orphaned"], background["max_running"]) == (2, 0, 1)
        assert [run["id"] for run in background["runs"]] == [response.id for response in created]
        assert [run["queue_place"] for run in background["runs"]] == [None, 1, 2]
        assert [run["status"] for run in background["runs"]] == ["in_progress", "queued", "queued"]
        assert [run["worker"] for run in background["runs"]] == [worker["id"], None, None]
        assert abs(background["runs"][0]["created_at"] - created[0].created_at) < 2
        await served.client.responses.cancel(created[0].id)
        moved = await until(served.client, lambda each: each["background"]["waiting"] == 1)
        assert [run["id"] for run in moved["background"]["runs"]] == [response.id for response in created[1:]]
        for response in created[1:]:
            await served.client.responses.cancel(response.id)
        empty = await until(served.client, lambda each: not each["background"]["runs"])
        assert (empty["background"]["running"], empty["background"]["waiting"]) == (0, 0)


async def test_the_operator_of_one_tenant_sees_figures_and_inference_servers() -> None:
    down = {"provider": "vllm", "base_url": "http://127.0.0.1:9/v1", "health_interval_s": 1}
    inference = {"provider": "router", "providers": {"own": scripted([{"text": "Hi."}]), "far": down}}
    async with serving(inference) as served:
        await served.client.responses.create(model="scripted", input="Hi")
        overview_now = await until(
            served.client,
            lambda each: any(not up["is_healthy"] for part in each["providers"] for up in part["upstreams"]),
        )
        assert overview_now["scope"] == "server"
        [far] = [part for part in overview_now["providers"] if part["path"] == "inference.providers.far"]
        assert far["upstreams"][0]["url"] == "http://127.0.0.1:9/v1"
        assert {part["provider"] for part in overview_now["providers"]} >= {
            "Router",
            "Scripted",
            "VLLM",
            "Memory",
            "ResponsesLoop",
        }
        assert overview_now["figures"]["responses"] == {"completed": 1}
        assert overview_now["figures"]["requests"]["200"] >= 1
        assert set(overview_now["figures"]["tokens"]) == {"scripted"}
        assert overview_now["figures"]["requests_in_flight"] == 1
        [process] = overview_now["processes"]
        assert process["resident_memory_bytes"] > 1_000_000


async def test_a_tenant_among_several_sees_its_own_runs_alone() -> None:
    """Neither sums nor names of workers: `/metrics` has them for its own key."""
    for server in ({"metrics": "open"}, {"metrics_key": "mk"}, {"console": True}, {}):
        async with serving(SLOW, responses=ONE_PLACE, server={"api_keys": TENANTS, **server}) as served:
            mine = await served.client.responses.create(model="scripted", input="Hi", background=True)
            other = served.client.with_options(api_key="sk-b")
            theirs = await other.responses.create(model="scripted", input="Hi", background=True)
            overview_now = await until(served.client, lambda each: each["background"]["running"] == 1)
            assert overview_now["scope"] == "tenant"
            assert [run["id"] for run in overview_now["background"]["runs"]] == [mine.id]
            assert overview_now["background"]["runs"][0]["worker"] is None
            assert [overview_now[part] for part in SERVER_PARTS] == [None] * 4
            overview_now = await overview(other)
            assert [(run["id"], run["queue_place"]) for run in overview_now["background"]["runs"]] == [(theirs.id, 1)]
            await served.client.responses.cancel(mine.id)
            await other.responses.cancel(theirs.id)


async def test_two_servers_of_one_store_list_each_other(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "stack.db")}
    responses = {"background": {"max_running": 1}}
    async with serving(SLOW, kv_store=store, responses=responses) as one:
        async with serving(SLOW, kv_store=store, responses=responses) as two:
            for served in (one, two):
                await served.client.responses.create(model="scripted", input="Hi", background=True)
            overview_now = await until(
                one.client, lambda each: each["background"]["running"] == 2 and len(each["workers"]) == 2
            )
            runs = overview_now["background"]["runs"]
            assert {run["worker"] for run in runs} == {worker["id"] for worker in overview_now["workers"]}
            for run in runs:
                await two.client.responses.cancel(run["id"])
        assert len((await overview(one.client))["workers"]) == 1
