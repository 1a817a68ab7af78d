"""Sessions with environments through the SDK: created, driven by scripts of shell commands, and read."""

import asyncio
import base64
import json
from typing import Any

from openai import AsyncOpenAI
from openai.types.beta import AgentSession

from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.input_model import play
from tests.support.sdk.sessions import rest
from tests.support.servers.normal_user import SHARED_PYTHON

Json = dict[str, Any]
PYTHON: Json = {"provider": "python", "timeout_s": 10, **SHARED_PYTHON}
MORE: Json = {
    "agents": {"provider": "kv", "poll_s": 0.05, "retry_s": 0.05, "lease_s": 2},
    "files": {"provider": "kv"},
}


def shell(*commands: str, id: str = "c1") -> Json:  # noqa: A002 - the name of the script's own field
    return call("shell", json.dumps({"commands": [*commands]}), id=id)


def inline(path: str, text: str) -> Any:
    """A file of an environment that is sent with it."""
    return {"type": "inline", "path": path, "data": base64.b64encode(text.encode()).decode()}


def hosted(**fields: Any) -> Any:
    """The configuration of an environment."""
    return {"type": "openai_hosted", **fields}


async def begin_hosted(client: AsyncOpenAI, *turns: Script, **environment: Any) -> AgentSession:
    """A session with an environment, whose first turn plays these turns; without any, it has no turn."""
    fields: Any = {"input": play(*turns)} if turns else {}
    agent: Any = {"model": "scripted"}
    sessions: Any = client.beta.agents.sessions
    return await sessions.create(agent=agent, environment=hosted(**environment), **fields)


async def run_hosted(client: AsyncOpenAI, *turns: Script, **environment: Any) -> AgentSession:
    """The session of `begin_hosted` at rest."""
    return await rest(client, (await begin_hosted(client, *turns, **environment)).id)


async def read_to_rest(client: AsyncOpenAI, session_id: str, times: int = 1) -> list[Any]:
    """The events of a session until it rests for that time, whose numbers have no gaps."""
    stream = await client.beta.agents.sessions.events.stream(session_id, extra_query={"starting_after": 0})
    events: list[Any] = []
    async with asyncio.timeout(20), stream:
        async for event in stream:
            events.append(event)
            times -= event.type in ("agent.session.idle", "agent.session.failed", "agent.session.requires_action")
            if not times:
                break
    assert [event.sequence_number for event in events] == [*range(1, len(events) + 1)]
    return events


async def reach_status(client: AsyncOpenAI, name: str, status: str) -> None:
    """Wait until an environment has this status."""
    async with asyncio.timeout(20):
        while (await client.beta.agents.environments.retrieve(name)).status != status:  # noqa: ASYNC110 - of a server
            await asyncio.sleep(0.02)


def environment_id(session: AgentSession) -> str:
    environment = session.environment
    assert environment.type == "openai_hosted"
    return environment.id


def workspace_id(session: AgentSession) -> str:
    """The id of the container of a session."""
    return environment_id(session).replace("env_", "cntr_env_", 1)


def commands_of(items: list[Any]) -> list[tuple[str | None, int | None, str]]:
    """The output, the exit code and the status of each command."""
    return [(item.output, item.exit_code, item.status) for item in items if item.type == "command_execution"]
