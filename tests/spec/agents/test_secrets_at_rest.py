"""Confidential parts of agents, sessions and automations: where they go, and how they are stored."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import create as create_response
from tests.support.sdk.sessions import NONE, list_items, message, rest, send
from tests.support.servers.fetcher_hosts import SITE
from tests.support.servers.guarded_mcp import GuardedServer
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

Json = dict[str, Any]
OLD = "the first key, which is thirty-two characters long"
NEW = "another key, which is thirty-two characters long"
TOKEN = "token-0123456789-confidential"
OTHER = "token-9876543210-confidential"
USE_TOOL = [call("guarded__tell", "{}", id="c1")]
HOURLY: Any = {"type": "periodic", "name": "news", "expression": "0 * * * *", "timezone": "UTC"}
KINDS = ("agent_secrets", "automation_target")
"""Kinds of the records that hold secrets."""


class World:
    """A server, and an MCP server that it may reach."""

    def __init__(self, served: Served, guarded: GuardedServer) -> None:
        self.served = served
        self.guarded = guarded
        self.agents: Any = served.client.beta.agents

    def agent(self, token: str = TOKEN, **fields: Any) -> Json:
        transport = {"type": "http", "server_url": self.guarded.mcp_url, "authorization": token}
        return {
            "model": "scripted",
            "tools": [{"type": "mcp", "server_label": "guarded", "transport": transport}],
        } | fields

    def target(self) -> Json:
        content = [{"type": "input_text", "text": play(USE_TOOL)}]
        return {
            "type": "new_session",
            "environment": NONE,
            "agent": self.agent(),
            "input": [{"role": "user", "content": content}],
        }

    def response_target(self) -> Json:
        secret = {"server_url": self.guarded.mcp_url, "authorization": TOKEN}
        tool = {"type": "mcp", "server_label": "guarded", "require_approval": "never", **secret}
        return {"type": "response", "request": {"model": "scripted", "input": play(USE_TOOL), "tools": [tool]}}

    async def begin(self, **fields: Any) -> Any:
        """A session at rest that has used the tool."""
        session = await self.agents.sessions.create(environment=NONE, **{"input": play(USE_TOOL), **fields})
        return await rest(self.served.client, session.id)

    async def invoke(self, automation_id: str) -> Any:
        """An invocation whose work has ended, which has used the tool."""
        invocation = await self.agents.automations.invocations.create(automation_id)
        ended: list[Any] = []

        async def has_ended() -> bool:
            ended[:] = [await self.agents.automations.invocations.retrieve(invocation.id, automation_id=automation_id)]
            return ended[0].status != "queued"

        await until(has_ended)
        assert ended[0].status == "completed", ended[0].error
        if ended[0].session_id is not None:
            await rest(self.served.client, ended[0].session_id)
            return ended[0]

        async def is_completed() -> bool:
            return (await self.served.client.responses.retrieve(ended[0].response_id)).status == "completed"

        await until(is_completed)
        return ended[0]

    def take_tokens(self) -> set[str | None]:
        """The tokens that the MCP server has got since the last call."""
        tokens = set(self.guarded.tokens)
        self.guarded.tokens.clear()
        return tokens

    async def values(self) -> list[bytes]:
        """All that the store holds."""
        return [entry.value for _, entry in await self.served.stack.kv_store.scan("", limit=100_000)]

    async def keys_of_secrets(self) -> list[str]:
        """The keys of all that is confidential, and of the notes about it."""
        keys = [key for key, _ in await self.served.stack.kv_store.scan("", limit=100_000)]
        return [key for key in keys if any(f"/{kind}/" in key for kind in (*KINDS, "vault_sealed"))]


@asynccontextmanager
async def opened(guarded: GuardedServer, path: Path, *keys: str) -> AsyncGenerator[World]:
    """A server with these keys for vaults; without any, it has none."""
    fetcher = {"provider": "safe", "allowed_private_networks": [f"{SITE}/32"], "allowed_ports": [guarded.port]}
    more: Json = {"fetcher": fetcher, "agents": {"provider": "kv", "poll_s": 0.05, "retry_s": 0.05}}
    if keys:
        more["vaults"] = {"provider": "kv", "keys": [*keys]}
    store = {"provider": "sqlite", "path": str(path / "store.db")}
    mcp = {"provider": "mcp", "list_timeout_s": 5, "call_timeout_s": 5}
    async with serving(MODEL, kv_store=store, tool_servers=mcp, more=more) as served:
        yield World(served, guarded)


@pytest.fixture
async def guarded() -> AsyncGenerator[GuardedServer]:
    async with GuardedServer() as guarded:
        guarded.accepted = {TOKEN, OTHER}
        yield guarded


@pytest.mark.parametrize("keys", [(OLD,), ()], ids=["with keys", "without keys"])
async def test_secrets_reach_their_server_and_are_stored_encrypted(
    guarded: GuardedServer, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    async with opened(guarded, tmp_path, *keys) as world:
        agent = await world.agents.create(**world.agent())
        sessions = [await world.begin(agent_id=agent.id), await world.begin(agent=world.agent())]
        assert world.take_tokens() == {TOKEN}
        await create_response(world.served, model=f"agent/{agent.id}", input=play(USE_TOOL))
        assert world.take_tokens() == {TOKEN}
        automations = [
            await world.agents.automations.create(**HOURLY, target=target)
            for target in (world.target(), world.response_target())
        ]
        for automation in automations:
            invoked = await world.invoke(automation.id)
            assert world.take_tokens() == {TOKEN}
            sessions += [invoked] if invoked.session_id else []
        listed = [each async for each in world.agents.automations.list()] + [each async for each in world.agents.list()]
        visible = repr([agent, sessions, automations, listed])
        assert (guarded.url in visible, TOKEN in visible) == (True, False)
        is_plain = any(TOKEN.encode() in value for value in await world.values())
        assert is_plain is not bool(keys)


async def test_subagents_have_the_secrets_of_their_session(guarded: GuardedServer, tmp_path: Path) -> None:
    async with opened(guarded, tmp_path, OLD) as world:
        task = call("create_subagent", json.dumps({"task": play(USE_TOOL)}), id="s")
        turns = [task], [call("wait_for_subagents", "{}", id="w")]
        session = await world.begin(agent=world.agent(multi_agent={"enabled": True}), input=play(*turns))
        [subagent] = [each async for each in world.agents.sessions.subagents.list(session.id)]
        items = [each async for each in world.agents.sessions.subagents.items.list(subagent.id, session_id=session.id)]
        assert "mcp_call" in [item.type for item in items]
        assert world.take_tokens() == {TOKEN}
        assert [value for value in await world.values() if TOKEN.encode() in value] == []


async def test_other_secrets_take_the_place_of_the_first_ones(guarded: GuardedServer, tmp_path: Path) -> None:
    async with opened(guarded, tmp_path, OLD) as world:
        agent = await world.agents.create(**world.agent())
        session = await world.begin(agent_id=agent.id)
        await world.agents.update(agent.id, tools=world.agent(OTHER)["tools"])
        world.take_tokens()
        await send(world.served.client, session.id, message(play(USE_TOOL)))
        await rest(world.served.client, session.id)
        assert world.take_tokens() == {TOKEN}, "a session goes on with the agent that it began with"
        later = await world.begin(agent_id=agent.id)
        assert world.take_tokens() == {OTHER}
        await world.agents.sessions.update(session.id, agent={"tools": world.agent(OTHER)["tools"]})
        await send(world.served.client, session.id, message(play(USE_TOOL)))
        await rest(world.served.client, session.id)
        assert world.take_tokens() == {OTHER}
        await world.agents.update(agent.id, tools=[])
        await world.agents.sessions.delete(session.id)
        await world.agents.sessions.delete(later.id)
        assert await world.keys_of_secrets() == []
        with_headers = world.agent()
        with_headers["tools"][0]["transport"]["headers"] = {"X-Team": "blue"}
        agent = await world.agents.create(**with_headers)
        assert agent.tools[0].transport.headers == {"X-Team": "blue"}
        [listed] = [each async for each in world.agents.list() if each.id == agent.id]
        assert listed.tools == agent.tools
        await world.agents.delete(agent.id)
        assert await world.keys_of_secrets() == []


async def test_an_invocation_that_waits_has_the_target_of_its_time(guarded: GuardedServer, tmp_path: Path) -> None:
    async with opened(guarded, tmp_path, OLD) as world:
        client, automations = world.served.client, world.agents.automations
        guarded.calls_may_end.clear()
        session = await world.agents.sessions.create(environment=NONE, agent=world.agent(), input=play(USE_TOOL))
        await guarded.is_called.wait()
        target = {
            "type": "existing_session",
            "session_id": session.id,
            "instructions": json.dumps([[{"text": "First."}]]),
        }
        automation = await automations.create(**HOURLY, target=target)
        await automations.invocations.create(automation.id)
        changed = {**target, "instructions": json.dumps([[{"text": "Second."}]])}
        await automations.update(automation.id, target=changed)
        targets = [key for key in await world.keys_of_secrets() if "automation_target" in key and key[0] != "/"]
        assert len(targets) == 2
        guarded.calls_may_end.set()

        async def is_delivered() -> bool:
            return [each.status async for each in automations.invocations.list(automation.id)] == ["completed"]

        await until(is_delivered)
        await rest(client, session.id)
        assert (await list_items(client, session.id))[-1].output_text == "First."
        remaining = [key for key in await world.keys_of_secrets() if "automation_target" in key]
        assert [key.rpartition("/")[2] for key in remaining] == ["1", "1"]
        assert (await automations.retrieve(automation.id)).target.instructions == changed["instructions"]
        await automations.delete(automation.id)
        assert [key for key in await world.keys_of_secrets() if "automation_target" in key] == []


async def test_a_new_key_takes_over_and_the_old_one_may_leave(guarded: GuardedServer, tmp_path: Path) -> None:
    async with opened(guarded, tmp_path, OLD) as world:
        agent = await world.agents.create(**world.agent())
        session = await world.begin(agent=world.agent())
        automations = [
            await world.agents.automations.create(**HOURLY, target=target)
            for target in (world.target(), world.response_target())
        ]
    async with opened(guarded, tmp_path, NEW, OLD) as world:
        vaults: Any = world.served.stack.vaults

        async def is_taken_over() -> bool:
            return (await vaults.describe_secrets()).endswith("(0) can still be decrypted")

        await until(is_taken_over)
    world.take_tokens()
    async with opened(guarded, tmp_path, NEW) as world:
        await world.begin(agent_id=agent.id)
        assert world.take_tokens() == {TOKEN}
        await send(world.served.client, session.id, message(play(USE_TOOL)))
        assert (await rest(world.served.client, session.id)).status == "idle"
        assert world.take_tokens() == {TOKEN}
        for automation in automations:
            await world.invoke(automation.id)
            assert world.take_tokens() == {TOKEN}


async def test_what_has_lost_its_key_fails_alone(guarded: GuardedServer, tmp_path: Path) -> None:
    async with opened(guarded, tmp_path, OLD) as world:
        agent = await world.agents.create(**world.agent())
        session = await world.begin(agent=world.agent())
        automation = await world.agents.automations.create(**HOURLY, target=world.target())
    async with opened(guarded, tmp_path, NEW) as world:
        with pytest.raises(openai.InternalServerError):
            await world.agents.sessions.create(environment=NONE, agent_id=agent.id, input="x")
        assert [each.id async for each in world.agents.list()] == [agent.id]
        await send(world.served.client, session.id, message(play(USE_TOOL)))
        assert (await rest(world.served.client, session.id)).status == "failed"
        with pytest.raises(AssertionError, match="stor"):
            await world.invoke(automation.id)
        world.take_tokens()
        await world.agents.automations.update(automation.id, target=world.target())
        await world.invoke(automation.id)
        assert world.take_tokens() == {TOKEN}
