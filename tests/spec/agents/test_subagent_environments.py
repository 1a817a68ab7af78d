"""Subagents whose session has an environment: they work in the workspace of their session, through the official SDK."""

import json
import shutil
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.environments import (
    MORE,
    PYTHON,
    commands_of,
    environment_id,
    hosted,
    reach_status,
    read_to_rest,
    shell,
)
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.sessions import CANCEL, FUNCTION, kinds, list_items, message, rest, send, tool_result
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
WAIT: Script = [call("wait_for_subagents", "{}", id="w")]
THOUGHT: Json = {"reasoning": "hm"}
"""Begins a message of the model's: without one, a call of the client follows those of the server in one message."""
COUNT_SLEEPERS = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 6[1]'"
"""Its own text is not what it looks for."""
BRIEF: Json = {**MORE, "agents": {**MORE["agents"], "environment_idle_s": 1, "environment_days": 1 / 86_400}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(MODEL, tool_runtime=PYTHON, more=MORE) as served:
        yield served


def create(*turns: Script, name: str = "child") -> Json:
    """The call that creates a subagent with these turns."""
    return call("create_subagent", json.dumps({"task": play(*turns), "name": name}), id=f"create_{name}")


async def begin(served: Served, *turns: Script, **agent: Any) -> Any:
    """A session with an environment, whose agent has subagents and begins with these turns."""
    fields: Any = {"model": "scripted", "multi_agent": {"enabled": True}, **agent}
    sessions: Any = served.client.beta.agents.sessions
    return await sessions.create(agent=fields, environment=hosted(), input=play(*turns))


async def list_subagents(served: Served, session_id: str) -> list[Any]:
    """The subagents of a session, oldest first."""
    return (await served.client.beta.agents.sessions.subagents.list(session_id, order="asc")).data


async def list_commands(served: Served, session_id: str, subagent_id: str) -> list[Any]:
    """The commands of a subagent: their outputs, exit codes and statuses."""
    items = served.client.beta.agents.sessions.subagents.items
    return commands_of([each async for each in items.list(subagent_id, session_id=session_id, order="asc")])


async def until_commands_run(served: Served, session_id: str, count: int) -> None:
    """Wait until as many subagents have commands that run."""

    async def run() -> bool:
        subagents = await list_subagents(served, session_id)
        commands = [await list_commands(served, session_id, each.id) for each in subagents]
        return sum(each[-1:] == [(None, None, "in_progress")] for each in commands) == count

    await until(run)


async def test_an_agent_and_its_subagents_work_in_one_workspace(served: Served) -> None:
    write = shell("cat plan; echo found > report; echo kept > outputs/kept", id="c2")
    turns = [shell("echo plan > plan")], [THOUGHT, create([write])], WAIT, [shell("cat report", id="c3")]
    session = await rest(served.client, (await begin(served, *turns)).id)
    assert commands_of(await list_items(served.client, session.id)) == [
        ("", 0, "completed"),
        ("found\n", 0, "completed"),
    ]
    [subagent] = await list_subagents(served, session.id)
    assert await list_commands(served, session.id, subagent.id) == [("plan\n", 0, "completed")]
    events = await read_to_rest(served.client, session.id)
    assert kinds(events).count("environment.connected") == 1
    [turn] = (await served.client.beta.agents.sessions.subagents.turns.list(subagent.id, session_id=session.id)).data
    deltas = [event for event in events if event.type == "agent.output.command_execution_output.delta"]
    assert [(event.turn_id == turn.id, event.delta) for event in deltas] == [(True, "plan\n"), (False, "found\n")]
    [turn] = (await served.client.beta.agents.sessions.turns.list(session.id)).data
    artifacts = (await served.client.beta.agents.sessions.artifacts.list(session.id)).data
    assert [(each.turn_id, each.path) for each in artifacts] == [(turn.id, "/workspace/outputs/kept")]


async def test_what_a_subagent_has_put_out_is_an_artifact_where_its_agent_runs_no_command(served: Served) -> None:
    session = await begin(served, [create([shell("echo kept > outputs/kept")])], WAIT)
    await rest(served.client, session.id)
    artifacts = served.client.beta.agents.sessions.artifacts
    assert [each.path for each in (await artifacts.list(session.id)).data] == ["/workspace/outputs/kept"]


async def test_commands_of_subagents_and_of_their_agent_run_side_by_side(served: Served) -> None:
    """Each waits until all have begun, and the agent lists the files meanwhile."""
    meet = "touch {0}; until [ -e a ] && [ -e b ] && [ -e c ] && [ -e d ]; do sleep 0.02; done; echo {0}"
    children = [create([shell(meet.format(name))], name=name) for name in "abc"]
    session = await rest(served.client, (await begin(served, children, [shell(meet.format("d"))], WAIT)).id)
    commands = [await list_commands(served, session.id, each.id) for each in await list_subagents(served, session.id)]
    assert commands == [[(f"{name}\n", 0, "completed")] for name in "abc"]
    assert commands_of(await list_items(served.client, session.id)) == [("d\n", 0, "completed")]


async def test_commands_of_one_agent_run_one_after_the_other(served: Served) -> None:
    calls = [shell(f"echo {name} >> log; sleep 0.2; echo {name} >> log", id=f"c_{name}") for name in "abc"]
    session = await rest(served.client, (await begin(served, calls, [shell("cat log", id="c9")])).id)
    log, _, _ = commands_of(await list_items(served.client, session.id))[-1]
    assert (log or "").split() == [*"aabbcc"]


async def test_the_cancellation_of_a_session_kills_the_commands_of_its_subagents(served: Served) -> None:
    sleep: Script = [shell("echo begun; sleep 61; touch late")]
    session = await begin(served, [create(sleep, name="one"), create(sleep, name="other")], WAIT)
    await until_commands_run(served, session.id, 2)
    await send(served.client, session.id, CANCEL)
    assert (await rest(served.client, session.id)).status == "idle"
    for subagent in await list_subagents(served, session.id):
        [(_, _, status)] = await list_commands(served, session.id, subagent.id)
        assert status in ("failed", "incomplete")
    await send(served.client, session.id, message(play([shell(f"{COUNT_SLEEPERS}; ls", id="c9")])))
    await rest(served.client, session.id)
    [(output, _, _)] = commands_of(await list_items(served.client, session.id))
    assert output == "0\noutputs\n"


async def list_commands_after_interruption(served: Served, session_id: str, running: int) -> list[Any]:
    """Answer the call of a session, which then interrupts its first subagent, once so many commands run. Return the
    commands of each subagent at the rest of the session."""
    await until_commands_run(served, session_id, running)
    session = await rest(served.client, session_id)
    await send(served.client, session_id, tool_result(session.required_actions[0]))
    assert (await rest(served.client, session_id)).status == "idle"
    return [await list_commands(served, session_id, each.id) for each in await list_subagents(served, session_id)]


async def test_the_interruption_of_a_subagent_leaves_the_workspace_to_another_one(served: Served) -> None:
    one = create([shell("echo begun; sleep 61")], name="one")
    interrupt: Script = [call("interrupt_subagent", '{"subagent_id": "$0"}', id="i")]
    other = create([shell(f"{COUNT_SLEEPERS}; echo went", id="c2")], name="other")
    session = await begin(served, [one], [call("get", "{}", id="g")], interrupt, [other], WAIT, tools=[FUNCTION])
    first, second = await list_commands_after_interruption(served, session.id, 1)
    assert first[0][2] in ("failed", "incomplete")
    assert [output for output, _, _ in second] == ["0\nwent\n"]


async def test_the_interruption_of_a_subagent_leaves_the_commands_of_another_one(served: Served) -> None:
    one = create([shell("echo begun; sleep 61")], name="one")
    other = create([shell(f"until [ -e interrupted ]; do sleep 0.02; done; {COUNT_SLEEPERS}; echo went")], name="other")
    interrupt: Script = [call("interrupt_subagent", '{"subagent_id": "$0"}', id="i")]
    ask: Script = [call("get", "{}", id="g")]
    done: Script = [shell(f"while [ $({COUNT_SLEEPERS}) != 0 ]; do sleep 0.02; done; touch interrupted", id="c9")]
    session = await begin(served, [one, other], ask, interrupt, done, WAIT, tools=[FUNCTION])
    first, second = await list_commands_after_interruption(served, session.id, 2)
    assert first[0][2] in ("failed", "incomplete")
    assert second == [("0\nwent\n", 0, "completed")]


async def test_a_workspace_is_not_suspended_while_a_subagent_works_and_is_there_again_for_one_that_waited() -> None:
    turns: list[Script] = [
        [shell("sleep 2.5; echo one > f")],
        [THOUGHT, call("get", "{}", id="g")],
        [shell("cat f", id="c2")],
    ]
    async with serving(
        MODEL, tool_runtime=PYTHON, more={**BRIEF, "agents": {**BRIEF["agents"], "environment_days": 1}}
    ) as served:
        session = await begin(served, [create(*turns)], WAIT, [shell("cat f", id="c3")], tools=[FUNCTION])
        session = await rest(served.client, session.id)
        assert session.status == "requires_action"
        before = kinds(await read_to_rest(served.client, session.id))
        assert [each for each in before if each.startswith("environment.")] == [
            *("environment.pending", "environment.ready", "environment.connected")
        ]
        await reach_status(served.client, environment_id(session), "suspended")
        await send(served.client, session.id, tool_result(session.required_actions[0]))
        assert (await rest(served.client, session.id)).status == "idle"
        assert commands_of(await list_items(served.client, session.id)) == [("one\n", 0, "completed")]
        [subagent] = await list_subagents(served, session.id)
        assert await list_commands(served, session.id, subagent.id) == [("", 0, "completed"), ("one\n", 0, "completed")]


async def test_a_subagent_of_an_expired_environment_fails_and_so_does_its_agent() -> None:
    async with serving(MODEL, tool_runtime=PYTHON, more=BRIEF) as served:
        child = create([call("get", "{}", id="g")], [shell("ls")])
        session = await rest(served.client, (await begin(served, [child], WAIT, tools=[FUNCTION])).id)
        await reach_status(served.client, environment_id(session), "expired")
        await send(served.client, session.id, tool_result(session.required_actions[0]))
        assert (await rest(served.client, session.id)).status == "failed"
        [subagent] = await list_subagents(served, session.id)
        api = served.client.beta.agents.sessions
        turns = [*(await api.subagents.turns.list(subagent.id, session_id=session.id)).data]
        turns += (await api.turns.list(session.id)).data
        assert [(turn.status, turn.error and turn.error.code) for turn in turns] == [("failed", "sandbox_error")] * 2
