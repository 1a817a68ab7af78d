"""Workspaces of sessions over their life: artifacts, suspension, loss and expiry, on two servers over one store."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from apis.errors import Overloaded, Unsupported
from apis.storage.kv_store import Put
from apis.storage.records import decode_record, encode_record
from providers.agents.work import ENVIRONMENT_PREFIX
from providers.common.jobs import MAX_UNRETURNED, JobRecord
from tests.support.sdk.environments import (
    MORE,
    PYTHON,
    commands_of,
    environment_id,
    hosted,
    inline,
    reach_status,
    read_to_rest,
    run_hosted,
    shell,
    workspace_id,
)
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.sessions import CANCEL, kinds, list_items, message, rest, send
from tests.support.servers.serving import Served, serving
from tests.support.servers.webhook_receiver import receiving
from tests.support.waiting import until, until_empty

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
ENVIRONMENT_EVENTS = [f"agent.environment.{each}" for each in ("ready", "failed", "suspended", "expired")]
EVENTS = [*ENVIRONMENT_EVENTS, "agent.session.created"]
BRIEF: Json = {**MORE, "agents": {**MORE["agents"], "environment_idle_s": 1, "environment_days": 1 / 86_400}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Served, Served]]:
    """Two servers over one store."""
    store = {"provider": "sqlite", "path": str(tmp_path_factory.mktemp("states") / "store.db")}
    async with AsyncExitStack() as stacks:
        one, other = [
            await stacks.enter_async_context(serving(MODEL, kv_store=store, tool_runtime=PYTHON, more=MORE))
            for _ in range(2)
        ]
        yield one, other


async def run_turn(served: Served, session: Any, *commands: str, call_id: str = "c2") -> list[Any]:
    """Run commands in another turn of a session, and return the commands of all its turns."""
    await send(served.client, session.id, message(play([shell(*commands, id=call_id)])))
    await rest(served.client, session.id)
    return commands_of(await list_items(served.client, session.id))


async def test_what_a_turn_puts_out_is_kept_as_it_was(pair: tuple[Served, Served]) -> None:
    one, other = pair
    agents = other.client.beta.agents
    session = await run_hosted(one.client, [shell("mkdir outputs/a; echo one > outputs/a/x.txt; echo no > y")])
    await run_turn(one, session, "echo two > outputs/a/x.txt; echo new > outputs/z")
    turns = [turn.id async for turn in agents.sessions.turns.list(session.id, order="asc")]
    artifacts = [each async for each in agents.sessions.artifacts.list(session.id, order="asc", limit=1)]
    assert [(each.turn_id, each.path, each.size_bytes) for each in artifacts] == [
        (turns[0], "/workspace/outputs/a/x.txt", 4),
        (turns[1], "/workspace/outputs/a/x.txt", 4),
        (turns[1], "/workspace/outputs/z", 4),
    ]
    assert {each.environment_id for each in artifacts} == {environment_id(session)}
    contents = [(await agents.sessions.artifacts.content(each.id, session_id=session.id)).content for each in artifacts]
    assert contents == [b"one\n", b"two\n", b"new\n"]
    assert await agents.sessions.artifacts.retrieve(artifacts[0].id, session_id=session.id) == artifacts[0]
    deleted = await agents.sessions.artifacts.delete(artifacts[2].id, session_id=session.id)
    assert (deleted.id, deleted.deleted) == (artifacts[2].id, True)
    with pytest.raises(openai.NotFoundError):
        await agents.sessions.artifacts.content(artifacts[2].id, session_id=session.id)
    with pytest.raises(openai.BadRequestError):
        await agents.sessions.artifacts.list(session.id, after=artifacts[2].id)
    await agents.sessions.delete(session.id)
    assert [file async for file in one.client.files.list()] == []
    keys = [key for key, _ in await one.stack.kv_store.scan("default/")]
    assert [key for key in keys if "agent_output" in key or "agent_artifact" in key] == []


async def test_the_sdk_finds_the_artifacts_of_its_turn(pair: tuple[Served, Served]) -> None:
    client = pair[0].client
    session = await run_hosted(client, [shell("echo one > outputs/r")])
    async with client.beta.agents.sessions.stream(
        session.id, input=play([shell("echo two > outputs/r", id="c2")])
    ) as stream:
        result = await stream.get_final_result()
    artifacts = client.beta.agents.sessions.artifacts.for_result(result)
    assert (await artifacts.content("/workspace/outputs/r")).content == b"two\n"


async def test_a_turn_that_is_cancelled_has_no_artifacts(pair: tuple[Served, Served]) -> None:
    client = pair[0].client
    session = await run_hosted(client, [shell("true")])
    await send(client, session.id, message(play([shell("echo x > outputs/x; echo begun; sleep 30", id="c2")])))
    stream = await client.beta.agents.sessions.events.stream(session.id, extra_query={"starting_after": 0})
    async with asyncio.timeout(20), stream:
        async for event in stream:
            if event.type == "agent.output.command_execution_output.delta":
                break
    await send(client, session.id, CANCEL)
    await rest(client, session.id)
    *_, (_, code, status) = commands_of(await list_items(client, session.id))
    assert (code, status) == (137, "failed")
    assert [each async for each in client.beta.agents.sessions.artifacts.list(session.id)] == []
    assert (await run_turn(pair[0], session, "echo on", call_id="c3"))[-1] == ("on\n", 0, "completed")


async def test_a_workspace_that_is_lost_between_two_turns_is_there_again(pair: tuple[Served, Served]) -> None:
    one, other = pair
    session = await run_hosted(one.client, [shell("mkdir .git; echo kept > .git/a; ln -s .git/a l")])
    files = one.client.beta.agents.environments.files
    await files.create(environment_id(session), type="inline", path="/workspace/added", data="YWRkZWQK")
    await other.client.containers.delete(workspace_id(session))
    assert (await run_turn(other, session, "cat l added"))[-1] == ("kept\nadded\n", 0, "completed")
    events = kinds(await read_to_rest(one.client, session.id, 2))
    assert [kind for kind in events if kind.startswith("environment.")] == [
        *["environment.pending", "environment.ready", "environment.connected"],
        *["environment.disconnected", "environment.connected"],
    ]


async def test_a_workspace_that_is_lost_in_a_turn_is_as_it_was_saved(pair: tuple[Served, Served]) -> None:
    one, _ = pair
    session = await run_hosted(one.client, [shell("echo saved > a")])
    turns = [shell("echo lost > a; echo begun; sleep 30", id="c2")], [shell("cat a", id="c3")]
    await send(one.client, session.id, message(play(*turns)))
    stream = await one.client.beta.agents.sessions.events.stream(session.id, extra_query={"starting_after": 0})
    async with asyncio.timeout(20), stream:
        async for event in stream:
            if event.type == "agent.output.command_execution_output.delta" and "begun" in event.delta:
                break
    await one.client.containers.delete(workspace_id(session))
    assert (await rest(one.client, session.id)).status == "idle"
    assert commands_of(await list_items(one.client, session.id))[-1] == ("saved\n", 0, "completed")
    events = await read_to_rest(one.client, session.id, 2)
    [reset] = [event for event in events if event.type.endswith("environment.reset")]
    assert (reset.environment_id, reset.reset_count) == (environment_id(session), 1)


async def test_an_idle_workspace_is_suspended_resumed_and_at_last_expires(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    session: Any = None
    sections: Json = {"kv_store": store, "tool_runtime": PYTHON, "more": BRIEF}
    async with (
        receiving() as receiver,
        serving(MODEL, webhooks={"receivers": [receiver.hook(events=EVENTS)]}, **sections) as served,
    ):
        client = served.client
        session = await run_hosted(client, [shell("echo kept > a")], files=[inline("/workspace/b", "b\n")])
        await reach_status(client, environment_id(session), "suspended")
        assert [each.id async for each in client.containers.list()] == []
        assert (await run_turn(served, session, "cat a b"))[-1] == ("kept\nb\n", 0, "completed")
        early = await client.beta.agents.environments.create(environment=hosted())
        await reach_status(client, environment_id(session), "expired")

        async def list_early() -> list[str]:
            return [each.id async for each in client.beta.agents.environments.list() if each.id == early.id]

        await until_empty(list_early, 20)  # without a session, nothing is left of one that has expired
        assert await served.stack.kv_store.scan(f"default/agent_environment_spec/{early.id}") == []
        await until_empty(lambda: served.stack.kv_store.scan(f"default/webhook_delivery/{early.id}/"))
        own_id = environment_id(session)
        expected = {(early.id, "ready"), (early.id, "expired"), (own_id, "suspended"), (own_id, "expired")}

        def list_events() -> list[Any]:
            return [receiver.unwrap(*each) for each in receiver.requests]

        await until(lambda: expected <= {(each.data.id, each.type.rpartition(".")[2]) for each in list_events()})
        # the events of its session say that it is ready
        assert (own_id, "agent.environment.ready") not in {(each.data.id, each.type) for each in list_events()}
        [created] = [each.data for each in list_events() if each.type == "agent.session.created"]
        assert (created.environment_type, created.environment_id) == ("openai_hosted", own_id)
        await send(client, session.id, message(play([shell("ls")])))
        assert (await rest(client, session.id)).status == "failed"
        events = kinds(await read_to_rest(client, session.id, 3))
        assert [kind for kind in events if kind.startswith("environment.")] == [
            *["environment.pending", "environment.ready", "environment.connected", "environment.suspended"],
            *["environment.ready", "environment.connected", "environment.suspended", "environment.expired"],
        ]
        keys = [key for key, _ in await served.stack.kv_store.scan("default/agent_checkpoint/")]
        assert keys == []


async def test_a_suspension_that_is_broken_off_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    more = {**BRIEF, "agents": {**BRIEF["agents"], "environment_days": 1}}
    async with serving(MODEL, kv_store=store, tool_runtime=PYTHON, more=more) as served:
        session = await run_hosted(served.client, [shell("echo kept > a")])
        kv = served.stack.kv_store
        [(key, entry)] = await kv.scan(ENVIRONMENT_PREFIX)
        due = decode_record(entry, JobRecord)
        due.attempts = MAX_UNRETURNED + 1  # it has been begun too often, which ends no idle environment
        await kv.write([Put(key, encode_record(due))])
        environments = served.stack.agents and served.stack.agents.live.environments
        assert environments is not None
        end, broken_off = environments.workspaces.end, asyncio.Event()

        async def end_at_second_time(workspace_id: str, *, tenant: str) -> None:
            if not broken_off.is_set():
                broken_off.set()
                raise Unsupported("The machine of the container is not reached.")
            await end(workspace_id, tenant=tenant)

        monkeypatch.setattr(environments.workspaces, "end", end_at_second_time)

        async def list_containers() -> list[str]:
            return [each.id async for each in served.client.containers.list()]

        await until_empty(list_containers, 20)
        assert broken_off.is_set()
        environment = await served.client.beta.agents.environments.retrieve(environment_id(session))
        assert environment.status == "suspended"
        assert (await run_turn(served, session, "cat a"))[-1] == ("kept\n", 0, "completed")


async def test_an_environment_that_is_deleted_while_it_is_prepared_leaves_no_container(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion comes when the worker has read the environment, and has not made the container yet."""
    is_begun, is_deleted = asyncio.Event(), asyncio.Event()
    for served in pair:
        environments = served.stack.agents and served.stack.agents.live.environments
        assert environments is not None

        async def create_late(*args: Any, create: Any = environments.workspaces.create, **fields: Any) -> bool:
            is_begun.set()
            await is_deleted.wait()
            return await create(*args, **fields)

        monkeypatch.setattr(environments.workspaces, "create", create_late)
    client = pair[0].client
    before = [each.id async for each in client.containers.list()]
    session: Any = await client.beta.agents.sessions.create(agent={"model": "scripted"}, environment=hosted())
    async with asyncio.timeout(20):
        await is_begun.wait()
    await client.beta.agents.sessions.delete(session.id)
    is_deleted.set()

    async def list_new_jobs() -> list[str]:
        leases = await pair[0].stack.kv_store.scan("/agent_environment_lease/")
        return [key for key, _ in leases if environment_id(session) in key]

    await until_empty(list_new_jobs, 20)
    assert [each.id async for each in client.containers.list()] == before


async def test_a_deletion_that_is_broken_off_is_ended_by_any_worker(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops where the session is deleted, and what is in it is not; its client does not ask again."""
    one, other = pair
    before = [file.id async for file in other.client.files.list()]
    session = await run_hosted(one.client, [shell("echo one > outputs/r")])
    assert one.stack.agents is not None

    async def stop(*_: Any) -> None:
        raise Overloaded("The server stops.")

    with monkeypatch.context() as patch:
        patch.setattr(one.stack.agents.live.sessions, "end_deletion", stop)
        with pytest.raises(openai.APIStatusError):
            await one.client.with_options(max_retries=0).beta.agents.sessions.delete(session.id)

    async def list_keys() -> list[str]:
        keys = [key for key, _ in await one.stack.kv_store.scan("", limit=10_000)]
        return [key for key in keys if (session.id in key or environment_id(session) in key) and "_end" not in key]

    await until_empty(list_keys, 20)
    assert [file.id async for file in other.client.files.list()] == before
    assert workspace_id(session) not in [each.id async for each in other.client.containers.list()]


async def test_a_workspace_outlives_its_server(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(MODEL, kv_store=store, tool_runtime=PYTHON, more=MORE) as served:
        session = await run_hosted(served.client, [shell("echo kept > a")], env={"COLOUR": "red"})
    async with serving(MODEL, kv_store=store, tool_runtime=PYTHON, more=MORE) as served:
        assert (await run_turn(served, session, "cat a; echo $COLOUR"))[-1] == ("kept\nred\n", 0, "completed")
