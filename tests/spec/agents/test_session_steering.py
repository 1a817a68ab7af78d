"""Messages to a session that works: the turn reads them after the round of tools that runs, not after its last one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import chat_requests, messages
from tests.support.sdk.sessions import NONE, list_items, list_turns, message, rest, send
from tests.support.servers.fetcher_hosts import SITE
from tests.support.servers.guarded_mcp import GuardedServer
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = [call("guarded__tell", "{}", id="c1")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[tuple[Served, GuardedServer]]:
    async with GuardedServer() as guarded:
        fetcher = {"provider": "safe", "allowed_private_networks": [f"{SITE}/32"], "allowed_ports": [guarded.port]}
        async with serving(MODEL, tool_servers={"provider": "mcp"}, more={"fetcher": fetcher}) as served:
            yield served, guarded


async def begin(served: Served, guarded: GuardedServer, text: str) -> str:
    """Begin a session, and return its id once it is within a call of its server."""
    guarded.calls_may_end.clear()
    guarded.is_called.clear()
    transport = {"type": "http", "server_url": guarded.mcp_url}
    agent: Any = {
        "model": "scripted",
        "tools": [{"type": "mcp", "server_label": "guarded", "transport": transport}],
    }
    session = await served.client.beta.agents.sessions.create(agent=agent, environment=NONE, input=text)
    async with asyncio.timeout(10):
        await guarded.is_called.wait()
    return session.id


async def test_a_message_is_read_after_the_round_of_tools_that_runs(world: tuple[Served, GuardedServer]) -> None:
    served, guarded = world
    before = len(chat_requests(served))
    session_id = await begin(served, guarded, play(CALL, CALL, CALL))
    await send(served.client, session_id, message(play()))
    await send(served.client, session_id, message(play([{"text": "Steered."}])))
    guarded.calls_may_end.set()
    session = await rest(served.client, session_id)
    assert (session.status, session.error) == ("idle", None)
    items: list[Any] = await list_items(served.client, session_id)
    assert [each.type for each in items].count("mcp_call") == 1
    assert [each["role"] for each in messages(served)] == ["user", "assistant", "tool", "user", "user"]
    assert items[-1].content[0].text == "Steered."
    assert len(chat_requests(served)) == before + 2
    [turn] = await list_turns(served.client, session_id)
    assert turn.status == "completed"


async def test_a_message_in_the_last_round_is_read_by_the_same_turn(world: tuple[Served, GuardedServer]) -> None:
    served, guarded = world
    before = len(chat_requests(served))
    session_id = await begin(served, guarded, play(CALL))
    await send(served.client, session_id, message(play([{"text": "Last."}])))
    guarded.calls_may_end.set()
    await rest(served.client, session_id)
    items: list[Any] = await list_items(served.client, session_id)
    assert items[-1].content[0].text == "Last."
    [turn] = await list_turns(served.client, session_id)
    assert (turn.status, len(chat_requests(served))) == ("completed", before + 2)
