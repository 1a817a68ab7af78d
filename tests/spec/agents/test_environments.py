"""Sessions with environments through the official SDK: commands, files, skills, and what is refused by name."""

import shutil
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.models.skill_archives import FRONT_MATTER, pack
from tests.support.models.skill_archives import inline as inline_skill
from tests.support.sdk.client import sdk_client
from tests.support.sdk.environments import (
    MORE,
    PYTHON,
    begin_hosted,
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
from tests.support.sdk.requests import chat_requests, messages
from tests.support.sdk.sessions import kinds, list_items, message, rest, send
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(MODEL, tool_runtime=PYTHON, server={"api_keys": KEYS}, more=MORE) as served:
        yield served


async def status_of(served: Served, name: str) -> str:
    return (await served.client.beta.agents.environments.retrieve(name)).status


async def test_commands_are_items_whose_output_is_streamed(served: Served) -> None:
    turn = [shell("pwd; sleep 0.1; echo end; exit 3", "echo other >&2; sleep 0.3")]
    session = await run_hosted(served.client, turn)
    assert session.status == "idle"
    items = await list_items(served.client, session.id)
    first, second = [item for item in items if item.type == "command_execution"]
    assert commands_of(items) == [("/workspace\nend\n", 3, "failed"), ("other\n", 0, "completed")]
    assert (first.command, first.cwd) == ("pwd; sleep 0.1; echo end; exit 3", "/workspace")
    get: Any = served.client.get
    [response] = (await get("/responses?limit=1", cast_to=object))["data"]
    output = (await served.client.responses.retrieve(response["id"])).output
    [measured] = [item.output for item in output if item.type == "shell_call_output"]
    assert [each.to_dict()["duration_ms"] for each in measured] == [first.duration_ms, second.duration_ms]
    assert 300 <= second.duration_ms < 60_000
    assert items[-1].output_text == "Done."
    events = await read_to_rest(served.client, session.id)
    assert kinds(events)[:7] == [
        *["environment.pending", "turn.created", "turn.item.added", "in_progress", "turn.in_progress"],
        *["environment.ready", "environment.connected"],
    ]
    assert kinds(events)[-2:] == ["turn.completed", "idle"]
    added = [event.item for event in events if event.type.endswith("item.added")][1:3]
    assert [(item.id, item.status, item.output) for item in added] == [
        (first.id, "in_progress", None),
        (second.id, "in_progress", None),
    ]
    done = [event for event in events if event.type.endswith("item.done")]
    assert [(event.item.id, event.output_index) for event in done[:2]] == [(first.id, 0), (second.id, 1)]
    deltas = [event for event in events if event.type == "agent.output.command_execution_output.delta"]
    for item, index in ((first, 0), (second, 1)):
        own = [event for event in deltas if event.item_id == item.id]
        assert "".join(event.delta for event in own) == item.output
        assert {event.output_index for event in own} == {index}


async def test_the_event_of_the_creation_has_the_environment(served: Served) -> None:
    sessions: Any = served.client.beta.agents.sessions
    async with await sessions.create(
        agent={"model": "scripted"}, environment=hosted(), input="hi", stream=True
    ) as stream:
        created = await anext(aiter(stream))
        pending = await anext(aiter(stream))
    assert (created.type, pending.type) == ("agent.session.created", "agent.session.environment.pending")
    assert created.session.environment.id == environment_id(await rest(served.client, created.session.id))


async def test_the_model_reads_that_its_folder_is_the_workspace(served: Served) -> None:
    session = await run_hosted(served.client, [shell("cd; pwd -P; echo $TMPDIR; touch /tmp/x /x")])
    text = messages(served)[-1]["content"]
    assert "/workspace/.managed-agents/tmp" in text
    assert "Read-only file system" in text
    [tool] = chat_requests(served)[-1].tools or []
    assert tool.type == "function"
    description = tool.function.description or ""
    assert ("/workspace/outputs" in description, "/mnt/data" in description) == (True, False)
    assert session.agent.tools == []


async def test_files_skills_and_variables_are_there_before_the_agent_begins(served: Served) -> None:
    uploaded = await served.client.files.create(file=("up.txt", b"uploaded"), purpose="user_data")
    session = await run_hosted(
        served.client,
        [shell("cat in/a.txt up.txt; echo $COLOUR; ls /mnt/skills/greeting; echo x >> in/a.txt")],
        files=[
            inline("/workspace/in/a.txt", "inline\n"),
            {"type": "file_id", "file_id": uploaded.id, "path": "/workspace/up.txt"},
        ],
        skills=[inline_skill(pack(("greeting/SKILL.md", FRONT_MATTER)))],
        env={"COLOUR": "dark red"},
    )
    [(output, code, _)] = commands_of(await list_items(served.client, session.id))
    assert (output, code) == ("inline\nuploadeddark red\nSKILL.md\n", 0)
    environment: Any = session.environment
    assert [(file.type, file.path, file.size_bytes) for file in environment.files] == [
        ("inline", "/workspace/in/a.txt", 7),
        ("file_id", "/workspace/up.txt", 8),
    ]
    assert [(skill.name, skill.description) for skill in environment.skills] == [("greeting", "Greets people.")]
    assert "dark red" not in session.to_json()
    retrieved = await served.client.beta.agents.environments.retrieve(environment_id(session))
    assert (retrieved.status, retrieved.type, retrieved.files) == ("connected", "openai_hosted", environment.files)


async def test_setup_commands_run_in_their_order_before_the_agent(served: Served) -> None:
    setup: Any = [{"command": "mkdir src && echo one > log"}, {"command": "pwd >> ../log", "cwd": "/workspace/src"}]
    session = await run_hosted(served.client, [shell("cat log")], setup_commands=setup)
    assert commands_of(await list_items(served.client, session.id)) == [("one\n/workspace/src\n", 0, "completed")]
    assert "mkdir" not in session.to_json()


async def test_a_setup_command_that_fails_fails_the_environment_and_its_turn(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Its output is for the client alone: it may be confidential."""
    setup: Any = [{"command": "echo no luck >&2; exit 4"}, {"command": "touch /workspace/never"}]
    session = await run_hosted(served.client, [shell("ls")], setup_commands=setup)
    assert session.status == "failed"
    [turn] = [turn async for turn in served.client.beta.agents.sessions.turns.list(session.id)]
    assert (turn.error.code if turn.error else None) == "sandbox_error"
    assert turn.error is not None
    assert turn.error.message.endswith("ended with the exit code 4: no luck")
    assert "a setup command failed" in caplog.text
    assert "no luck" not in caplog.text
    assert await status_of(served, environment_id(session)) == "failed"
    events = await read_to_rest(served.client, session.id)
    failed = next(event for event in events if event.type.endswith("environment.failed"))
    assert (failed.environment.status, failed.environment.error.code) == ("failed", "sandbox_error")
    await send(served.client, session.id, message(play([shell("ls")])))
    assert (await rest(served.client, session.id)).status == "failed"
    with pytest.raises(openai.ConflictError):
        await served.client.beta.agents.environments.files.list(environment_id(session))


async def test_a_session_without_input_has_its_environment_prepared(served: Served) -> None:
    session = await begin_hosted(served.client, files=[inline("/workspace/a", "x")])
    assert session.status == "idle"
    await reach_status(served.client, environment_id(session), "ready")
    await send(served.client, session.id, message(play([shell("cat a")])))
    await rest(served.client, session.id)
    assert commands_of(await list_items(served.client, session.id)) == [("x", 0, "completed")]
    assert await status_of(served, environment_id(session)) == "connected"


async def test_an_environment_that_was_prepared_before_gets_one_session(served: Served) -> None:
    environments = served.client.beta.agents.environments
    early = await environments.create(environment=hosted(files=[inline("/workspace/a", "early")]), idempotency_key="k")
    again = await environments.create(environment=hosted(files=[inline("/workspace/a", "early")]), idempotency_key="k")
    assert early.id == again.id
    session = await run_hosted(served.client, [shell("cat a")], environment_id=early.id)
    assert environment_id(session) == early.id
    assert commands_of(await list_items(served.client, session.id)) == [("early", 0, "completed")]
    conversations = await served.stack.kv_store.scan("default/conversation/")
    with pytest.raises(openai.ConflictError) as raised:
        await begin_hosted(served.client, [shell("ls")], environment_id=early.id)
    assert raised.value.param == "environment.environment_id"
    assert await served.stack.kv_store.scan("default/conversation/") == conversations
    assert early.id in [each.id async for each in environments.list()]


async def test_files_are_put_into_a_live_environment_and_listed(served: Served) -> None:
    session = await run_hosted(served.client, [shell("mkdir -p d/e; touch d/e/f b .hidden")])
    files, name = served.client.beta.agents.environments.files, environment_id(session)
    added = await files.create(name, type="inline", path="/workspace/d/new.txt", data="aGVsbG8=")
    assert (added.path, added.size_bytes, added.environment_id) == ("/workspace/d/new.txt", 5, name)
    staged = await files.upload(name, file=("up.txt", b"by id"), path="/workspace/c")
    assert staged.file.size_bytes == 5
    listed = [file.path async for file in files.list(name, limit=1, order="asc")]
    assert listed == [f"/workspace/{path}" for path in ("b", "c", "d/e/f", "d/new.txt")]
    assert [file.path async for file in files.list(name, path="/workspace/d")] == [
        "/workspace/d/new.txt",
        "/workspace/d/e/f",
    ]
    await send(served.client, session.id, message(play([shell("cat d/new.txt c", id="c2")])))
    await rest(served.client, session.id)
    assert commands_of(await list_items(served.client, session.id))[-1] == ("helloby id", 0, "completed")


@pytest.mark.parametrize("path", ["/workspace/../a", "/etc/passwd", "/workspace/outputs", "/workspace/.codex/a", "a"])
async def test_a_file_lies_in_the_workspace(served: Served, path: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await begin_hosted(served.client, files=[inline(path, "x")])
    assert raised.value.param == "environment.files[0].path"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"container_size": "large"}, "environment.container_size"),
        ({"desktop": {"enabled": True}}, "environment.desktop"),
        ({"plugins": [{"type": "inline"}]}, "environment.plugins"),
        ({"packages": {"system": ["curl"]}}, "environment.packages.system"),
        ({"network": {"access": "enabled"}}, "environment.network.access"),
        ({"network": {"access": "restricted", "allowed_domains": ["example.com"]}}, "environment.network"),
        ({"env": {"PATH": "/"}}, "environment.env.PATH"),
        ({"env": {"a b": "x"}}, "environment.env.a b"),
        ({"files": [{"type": "file_id", "file_id": "file-0", "path": "/workspace/a"}]}, "environment.files[0].file_id"),
        ({"files": [{"type": "inline", "data": "!", "path": "/workspace/a"}]}, "environment.files[0].data"),
        ({"files": [inline("/workspace/a", "x")] * 2}, "environment.files[1].path"),
        ({"skills": [{"type": "skill_reference", "skill_id": "skill_0"}]}, "environment.skills[0].skill_id"),
        ({"environment_id": "env_0"}, "environment.environment_id"),
    ],
)
async def test_an_environment_that_cannot_be_is_refused_by_name(served: Served, fields: Json, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        await begin_hosted(served.client, [shell("ls")], **fields)
    assert raised.value.status_code in (400, 404)
    assert raised.value.param == param


async def test_another_tenant_finds_nothing_of_an_environment(served: Served) -> None:
    session = await run_hosted(served.client, [shell("echo secret > a")])
    async with sdk_client(served.url, "key-b") as other:
        environments, name = other.beta.agents.environments, environment_id(session)
        for request in (
            environments.retrieve(name),
            environments.files.create(name, type="inline", path="/workspace/a", data="aGk="),
            begin_hosted(other, [shell("ls")], environment_id=name),
            other.containers.retrieve(workspace_id(session)),
        ):
            with pytest.raises(openai.NotFoundError):
                await request
        with pytest.raises(openai.NotFoundError):
            await environments.files.list(name)
        assert [each.id async for each in environments.list()] == []


async def test_with_its_session_all_of_an_environment_is_deleted(served: Served) -> None:
    session = await run_hosted(served.client, [shell("echo x > a")], files=[inline("/workspace/b", "y")])
    await served.client.beta.agents.environments.files.create(
        environment_id(session), type="inline", path="/workspace/c", data="aGk="
    )
    await served.client.beta.agents.sessions.delete(session.id)
    keys = [key for key, _ in await served.stack.kv_store.scan("")]
    assert [key for key in keys if environment_id(session) in key] == []
    with pytest.raises(openai.NotFoundError):
        await served.client.containers.retrieve(workspace_id(session))
    with pytest.raises(openai.NotFoundError):
        await served.client.beta.agents.environments.retrieve(environment_id(session))
