"""Containers in a deployment of several processes: two stacks over one store, and `stack run --workers 2`."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from openai import NotFoundError

from tests.providers.tool_runtime.python.test_python import ENDLESS, SessionLog, session_log
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import bare, create, refusal
from tests.support.servers.ended_processes import assert_ended, running_children
from tests.support.servers.serving import Served, serving
from tests.support.servers.worker_processes import Workers, worker_processes

__all__ = ["session_log"]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.timeout(180),
]

Json = dict[str, Any]
CODING: Json = {"provider": "tests.support.sdk.code_model:Coding"}
PYTHON: Json = {"provider": "python", "timeout_s": 60, "cpu_s": 60}
TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
TURNS = 30
COUNT = "n = globals().get('n', 0) + 1\nn"
NEW = "[this is a new Python session: the variables and files of the earlier calls are gone]"


def sqlite(folder: Path) -> Json:
    return {"provider": "sqlite", "path": str(folder / "store.db")}


@asynccontextmanager
async def two(folder: Path, **sections: Any) -> AsyncGenerator[tuple[Served, Served]]:
    """Two stacks over one store."""
    async with AsyncExitStack() as stacks:
        one, other = [
            await stacks.enter_async_context(serving(CODING, kv_store=sqlite(folder), tool_runtime=PYTHON, **sections))
            for _ in range(2)
        ]
        yield one, other


@asynccontextmanager
async def working(folder: Path) -> AsyncGenerator[Workers]:
    """A stack of two workers."""
    more = {"inference": CODING, "tool_runtime": PYTHON}
    async with worker_processes(folder, sqlite(folder), workers=2, more=more) as workers:
        yield workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Workers]:
    """One stack of two workers for several tests, as it takes long to start."""
    async with working(tmp_path_factory.mktemp("workers")) as running:
        yield running


async def ask(workers: Workers, code: str, **fields: Any) -> Json:
    """A response of a model that runs this; each is asked for on a connection of its own."""
    body = {"model": "scripted", "input": code, "tools": [TOOL], **fields}
    answer = await workers.ask("POST", "/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(response: Json) -> tuple[int, str]:
    """Return the process that answered, and the result of the code that the model got."""
    pid, _, text = response["output"][-1]["content"][0]["text"].partition(" ")
    return int(pid), text


def container_of(response: Json) -> str:
    return next(item["container_id"] for item in response["output"] if item["type"] == "code_interpreter_call")


def session_server_of(workers: Workers) -> psutil.Process:
    """The session server that one of the workers has started."""
    pids = {worker.pid for worker in workers.processes()}
    children = [child for pid in pids for child in running_children("session_server", pid)]
    (server,) = [child for child in children if child.ppid() in pids]
    return server


async def test_when_the_session_server_is_killed_the_next_turn_says_so_and_works(workers: Workers) -> None:
    first = await ask(workers, COUNT)
    server = session_server_of(workers)
    processes = server.children(recursive=True)
    assert len(processes) == 3
    server.kill()
    await assert_ended(processes)
    named = {**TOOL, "container": container_of(first)}
    gone = await workers.ask("POST", "/responses", json={"model": "scripted", "input": "1", "tools": [named]})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "tools[0].container")
    second = await ask(workers, COUNT, previous_response_id=first["id"])
    assert said(second)[1] == f"{NEW}\n1"
    third = await ask(workers, COUNT, previous_response_id=second["id"])
    assert said(third)[1] == "2"
    assert container_of(first) != container_of(second) == container_of(third)


async def test_two_chains_keep_their_variables_whichever_worker_takes_the_turn(workers: Workers) -> None:
    async def container_ids() -> set[str]:
        return {each["id"] for each in (await workers.ask("GET", "/containers")).json()["data"]}

    earlier_ids = await container_ids()
    last = [await ask(workers, COUNT) for _ in range(2)]
    pids = {said(each)[0] for each in last}
    turns = 1
    while turns < TURNS // 2 or (len(pids) < 2 and turns < 10 * TURNS):
        turns += 1
        last = await asyncio.gather(*(ask(workers, COUNT, previous_response_id=each["id"]) for each in last))
        assert [said(each)[1] for each in last] == [str(turns)] * 2
        pids |= {said(each)[0] for each in last}
    assert len(pids) == 2
    assert await container_ids() - earlier_ids == {container_of(each) for each in last}


@pytest.mark.parametrize("how", ["killed", pytest.param("restarted", marks=pytest.mark.long)])
async def test_containers_outlive_the_worker_that_started_their_server(tmp_path: Path, how: str) -> None:
    async with working(tmp_path) as workers:
        first = await ask(workers, COUNT)
        server = session_server_of(workers)
        worker = server.parent()
        assert worker is not None
        await asyncio.to_thread(worker.kill if how == "killed" else worker.terminate)
        await asyncio.to_thread(psutil.wait_procs, [worker], 20)
        named = {**TOOL, "container": container_of(first)}
        for count in range(2, 6):
            answer = await ask(workers, COUNT, tools=[named])
            assert said(answer) == (said(answer)[0], str(count))
            assert said(answer)[0] != worker.pid
        chained = await ask(workers, COUNT, previous_response_id=first["id"])
        assert (said(chained)[1], container_of(chained)) == ("6", container_of(first))
        processes = [server, *server.children(recursive=True)]
        assert len(processes) == 4
    await assert_ended(processes)


async def test_a_client_does_with_it_what_it_likes_through_either(tmp_path: Path) -> None:
    async with two(tmp_path, more={"files": {"provider": "kv"}}) as (one, other):
        here: Any = one.client.containers
        there: Any = other.client.containers
        container = await here.create(name="mine", memory_limit="1g")
        assert bare(await there.retrieve(container.id)) == bare(container)
        file = await there.files.create(container.id, file=("in.csv", b"1,2,39"))
        uploaded = await one.client.files.create(file=("a.txt", b"one"), purpose="user_data")
        copied = await there.files.create(container.id, file_id=uploaded.id)
        for files in (here.files, there.files):
            assert {each.id async for each in files.list(container.id, limit=1)} == {file.id, copied.id}
            assert (await files.content.retrieve(file.id, container_id=container.id)).content == b"1,2,39"
        code = "sum(map(int, open('/mnt/data/in.csv').read().split(',')))"
        for served in (one, other):
            response = await create(served, input=code, tools=[{**TOOL, "container": container.id}])
            assert response.output_text.endswith(" 42")
        await there.files.delete(copied.id, container_id=container.id)
        assert [each.id async for each in here.files.list(container.id)] == [file.id]
        second = await there.create(name="second")
        for containers in (here, there):
            assert [each.id async for each in containers.list(order="asc", limit=1)] == [container.id, second.id]
        await there.delete(container.id)
        for containers in (here, there):
            with pytest.raises(NotFoundError):
                await containers.retrieve(container.id)
            assert [each.id async for each in containers.list()] == [second.id]


async def test_another_tenants_container_is_an_unknown_one_through_either(tmp_path: Path) -> None:
    async with two(tmp_path, server={"api_keys": KEYS}) as (one, other):
        mine = (await one.client.containers.create(name="mine")).id
        for served in (one, other):
            async with sdk_client(served.url, "key-of-b") as client:
                theirs = Served(client, served.url, served.app, served.streams)
                assert (await client.containers.list()).data == []
                for asking in (client.containers.retrieve(mine), client.containers.delete(mine)):
                    with pytest.raises(NotFoundError, match=f"Container with id '{mine}' not found"):
                        await asking
                error = await refusal(theirs, 404, tools=[{**TOOL, "container": mine}])
                assert error["message"] == f"Container with id '{mine}' not found."
            assert (await served.client.containers.retrieve(mine)).id == mine


@pytest.mark.parametrize("streamed", [False, True])
async def test_when_the_client_leaves_the_program_ends_where_it_runs(
    tmp_path: Path, session_log: SessionLog, streamed: bool
) -> None:
    async with two(tmp_path) as (one, other):
        first = await create(one, input="1", tools=[TOOL])
        session_log.begun.clear()
        asking = asyncio.create_task(
            create(other, input=ENDLESS, tools=[TOOL], previous_response_id=first.id, stream=streamed)
        )
        async with asyncio.timeout(20):
            await session_log.begun.wait()
            if streamed:
                await (await asking).close()
            else:
                asking.cancel()
                await asyncio.wait([asking])
            await session_log.ended.wait()
        containers = await one.client.containers.list()
        assert [each.id for each in containers.data] == [first.output[0].container_id]
