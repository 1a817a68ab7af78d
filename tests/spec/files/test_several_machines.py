"""Two machines over one Redis: state that only one of them has is named, and never silently missing."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from openai import BadRequestError

from stack.build import describe_machines, machine_lines
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.sdk.requests import create
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.serving import MEMORY, Served, scripted, serving

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="Redis is not installed")

Json = dict[str, Any]


@asynccontextmanager
async def machines(folder: Path) -> AsyncGenerator[list[Served]]:
    """Two stacks that share a store and nothing else."""
    with RedisServer(folder / "redis") as redis:
        async with AsyncExitStack() as stacks:
            turn = [call("file_search", '{"queries": ["whales"]}')]
            served: list[Served] = []
            for name in ("one", "other"):
                (folder / name).mkdir()
                store = {"provider": "redis", "url": redis.url}
                served.append(await stacks.enter_async_context(filing(folder / name, turn, kv_store=store)))
            yield served


async def test_a_vector_store_of_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    async with machines(tmp_path) as (one, other):
        store_id, _ = await store_of(one)
        hits = await one.client.vector_stores.search(store_id, query="whales")
        assert hits.data
        assert (await other.client.vector_stores.retrieve(store_id)).id == store_id
        with pytest.raises(BadRequestError, match="another machine") as caught:
            await other.client.vector_stores.search(store_id, query="whales")
        assert cast(Json, caught.value.body)["code"] == "vector_store_elsewhere"
        with pytest.raises(BadRequestError, match="another machine"):
            await create(other, tools=[{"type": "file_search", "vector_store_ids": [store_id]}])

        # each machine indexes the files of its own stores, whichever looks first
        stores = [await store_of(served) for served in (one, other)]
        for served, (own_id, _) in zip((one, other), stores, strict=True):
            assert (await served.client.vector_stores.search(own_id, query="whales")).data


async def test_the_start_names_what_machines_do_not_share(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    async with machines(tmp_path) as (one, _):
        (line,) = machine_lines(one.stack)
        assert line.startswith("vector_index")
        assert "use pgvector" in line
        assert describe_machines(one.stack).startswith("any number")
        assert describe_machines(one.stack).endswith("not shared: vector_index")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "greet.yaml").write_text("versions: {1: {instructions: Greet.}}\n")
    own = {
        "tool_servers": {
            "provider": "mcp",
            "servers": {"notes": {"command": "true"}, "far": {"url": "https://a.test/"}},
        },
        "responses": {"provider": "loop", "prompts": str(tmp_path / "prompts")},
    }
    with RedisServer(tmp_path) as redis:
        async with serving(kv_store={"provider": "redis", "url": redis.url}, more=own) as served:
            lines = {line.split()[0]: line for line in machine_lines(served.stack)}
            assert "the command of notes, with" in lines["tool_servers"]
            assert str(tmp_path / "prompts") in lines["responses"]
    async with serving(scripted([{"text": "a"}]), kv_store=MEMORY, tool_runtime={"provider": "python"}) as alone:
        assert machine_lines(alone.stack) == []
        assert describe_machines(alone.stack).startswith("one: the store (Memory)")
        assert alone.stack.tool_runtime is not None
        assert "containers" in str(alone.stack.tool_runtime.machine_bound_state())
