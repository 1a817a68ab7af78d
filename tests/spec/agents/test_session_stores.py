"""Sessions in their stores: over restarts, with damaged records, and after many turns."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from apis.errors import StoreUnavailable
from apis.storage.kv_store import Entry, Op, Put
from providers.kv_store.memory import Memory
from tests.support.damage import DAMAGES, damage_record, stored_keys
from tests.support.sdk.sessions import (
    CALL,
    FUNCTION,
    list_items,
    list_turns,
    message,
    rest,
    run_session,
    send,
    tool_result,
)
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.servers.serving import MEMORY, Served, scripted, serving

Json = dict[str, Any]
AGENTS: Json = {"agents": {"provider": "kv", "poll_s": 0.05, "retry_s": 0.05, "lease_s": 2}}


@asynccontextmanager
async def with_wiki(*turns: Any, store: Json, real: RealServer) -> AsyncGenerator[Served]:
    """A stack whose run config has the MCP server as the connector `wiki`."""
    servers = with_mcp(real.url, connectors={"wiki": real.url})
    async with serving(scripted(*turns), tool_servers=servers, kv_store=store) as served:
        yield served


WIKI: Any = {
    "type": "mcp",
    "server_label": "real",
    "transport": {"type": "http", "server_url": "connector:wiki"},
    "require_approval": "always",
}
APPROVAL: Json = {
    "type": "agent.session.input.mcp_approval_request_result",
    "response": {"type": "mcp_tool_call", "decision": "approve"},
}


@pytest.mark.parametrize("decision", ["approve", "deny"])
async def test_a_call_of_an_mcp_server_waits_for_its_approval_over_a_restart(decision: str, tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    real = RealServer()
    call = {"call": "real__note", "arguments": '{"text": "a"}', "id": "c1"}
    async with real.serving("streamable_http"):
        async with with_wiki([call], store=store, real=real) as served:
            session = await run_session(served.client, tools=[WIKI])
            assert session.agent.tools[0].to_dict()["transport"] == {"type": "http", "server_url": "connector:wiki"}
            [action] = session.required_actions
            assert action.type == "mcp_approval_request"
            assert (action.request.name, action.request.arguments) == ("note", {"text": "a"})
            assert real.notes == []
        async with with_wiki([{"text": "done"}], store=store, real=real) as served:
            answer = {"type": "mcp_tool_call", "decision": decision}
            await send(served.client, session.id, {**APPROVAL, "response": answer, "request_id": action.request_id})
            assert (await rest(served.client, session.id)).status == "idle"
            items = await list_items(served.client, session.id)
    assert real.notes == (["a"] if decision == "approve" else [])
    assert items[-1].output_text == "done"
    calls = [item for item in items if item.type == "mcp_call"]
    assert [(each.name, each.arguments, each.status) for each in calls] == (
        [("note", {"text": "a"}, "completed")] if decision == "approve" else []
    )


@pytest.mark.parametrize(("name", "arguments"), [("note", '{"text": "a"}'), ("fail", '{"why": "no"}')])
async def test_an_approved_call_is_made_once_where_the_response_that_made_it_fails(name: str, arguments: str) -> None:
    real = RealServer()
    call = {"call": f"real__{name}", "arguments": arguments, "id": "c1"}
    async with (
        real.serving("streamable_http"),
        with_wiki([call], [{"fail": "the model is gone"}], [{"text": "done"}], store=MEMORY, real=real) as served,
    ):
        session: Any = await run_session(served.client, tools=[WIKI])
        await send(served.client, session.id, {**APPROVAL, "request_id": session.required_actions[0].request_id})
        assert (await rest(served.client, session.id)).status == "idle"
        items = await list_items(served.client, session.id)
    assert [headers.get("mcp-method") for headers in real.sent].count("tools/call") == 1
    assert [item.name for item in items if item.type == "mcp_call"] == [name]
    assert items[-1].output_text == "done"


DAMAGED = {
    "agent_session/": "all",
    "agent_session_state/": "all",
    "agent_turn/": "turn",
    "agent_item/": "item",
    "agent/": "agent",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", DAMAGED)
async def test_a_damaged_record_stops_its_owner_alone(kind: str, damage: str, tmp_path: Path) -> None:
    database = tmp_path / "store.db"
    async with serving(scripted([{"text": "hi"}]), kv_store={"provider": "sqlite", "path": str(database)}) as served:
        agents = served.client.beta.agents
        agent = await agents.create(model="scripted")
        spared = await agents.create(model="scripted")
        session, other = [await run_session(served.client) for _ in range(2)]
        owner = agent.id if kind == "agent/" else session.id
        key = next(key for key in stored_keys(database) if key.startswith(f"default/{kind}{owner}"))
        damage_record(database, key, damage)
        sessions = agents.sessions
        assert (await sessions.retrieve(other.id)).status == "idle"
        assert len(await list_items(served.client, other.id)) == 2
        await send(served.client, other.id, message("go on"))
        await rest(served.client, other.id)
        listed = [each.id async for each in sessions.list()]
        assert other.id in listed
        assert [each.id async for each in agents.list()] == [spared.id, *([] if kind == "agent/" else [agent.id])]
        match DAMAGED[kind]:
            case "all":
                assert session.id not in listed
                with pytest.raises(openai.InternalServerError):
                    await sessions.retrieve(session.id)
                assert (await sessions.delete(session.id)).deleted
            case "turn":
                assert await list_turns(served.client, session.id) == []
                await send(served.client, session.id, message("go on"))
                assert (await rest(served.client, session.id)).status == "idle"
            case "item":
                assert len(await list_items(served.client, session.id)) == 1
            case _:
                with pytest.raises(openai.InternalServerError):
                    await agents.retrieve(agent.id)
                assert (await agents.delete(agent.id)).deleted


@pytest.mark.parametrize("kind", ["agent_session_state/", "agent_turn/", "agent_action/", "agent_input/"])
async def test_a_damaged_record_of_a_turn_stops_no_other_turn(kind: str, tmp_path: Path) -> None:
    database = tmp_path / "store.db"
    store = {"provider": "sqlite", "path": str(database)}
    calls = [CALL, {**CALL, "id": "call_2"}]
    async with serving(scripted([{"calls": calls}]), kv_store=store, more=AGENTS) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        first, second = session.required_actions
        await send(served.client, session.id, tool_result(first))
        key = next(key for key in stored_keys(database) if key.startswith(f"default/{kind}{session.id}"))
        damage_record(database, key, "junk")
        if kind == "agent_input/":
            await send(served.client, session.id, tool_result(second))
            assert (await rest(served.client, session.id)).status == "failed"
        else:
            with pytest.raises(openai.InternalServerError):
                await send(served.client, session.id, tool_result(second))
        other = await run_session(served.client, tools=[FUNCTION])
        assert other.status == "requires_action"
        assert await served.stack.kv_store.scan("/agent_turn/") == []


class CountingMemory(Memory):
    """A store that notes its calls: their kinds, the keys, and the bytes that they read."""

    calls: ClassVar[list[tuple[str, str, int]]] = []

    class Config(Memory.Config):
        """The fields of the memory store."""

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        entries = await super().get_many(keys)
        self.calls.append(("read", " ".join(keys), sum(len(entry.value) for entry in entries if entry is not None)))
        return entries

    async def scan(self, prefix: str, **bounds: Any) -> list[tuple[str, Entry]]:
        rows = await super().scan(prefix, **bounds)
        self.calls.append(("read", prefix, sum(len(entry.value) for _, entry in rows)))
        return rows

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        self.calls.append(("write", " ".join(op.key for op in ops), 0))
        return await super().write(ops, durable=durable)


COUNTED: Json = {"provider": "tests.spec.agents.test_session_stores:CountingMemory"}


async def run_turn(served: Served, session_id: str) -> None:
    """Run a turn with nothing else, and wait until its worker has let go of it."""
    await send(served.client, session_id, message("go on"))
    async with asyncio.timeout(10):
        while len(await served.stack.kv_store.scan("/agent_turn")):  # noqa: ASYNC110 - no event is set
            await asyncio.sleep(0.005)


async def measure_turn(served: Served, session_id: str) -> tuple[int, int]:
    """Run a turn, and list the ends of its session; return the calls of the store about it, and the bytes read."""
    CountingMemory.calls.clear()
    await run_turn(served, session_id)
    await served.client.beta.agents.sessions.items.list(session_id, limit=2)
    await served.client.beta.agents.sessions.turns.list(session_id, limit=2)
    sizes = [size for _, keys, size in CountingMemory.calls if "default/agent_" in keys]
    return len(sizes), sum(sizes)


async def test_turn_60_of_a_session_reads_and_writes_as_much_of_it_as_turn_10() -> None:
    async with serving(scripted([{"text": "hi"}]), kv_store=COUNTED) as served:
        session = await run_session(served.client)
        counts = [await measure_turn(served, session.id) for _ in range(60)]
    # the deltas of a model may come in one batch or two: of some turns, the one with the fewest calls counts
    (early_calls, early_bytes), (late_calls, late_bytes) = min(counts[6:10]), min(counts[56:])
    assert late_calls == early_calls <= 16
    assert late_bytes < 1.1 * early_bytes


class DeafMemory(Memory):
    """A store that does not answer a scan or a write of keys with the text `deaf_to`, where that is set."""

    deaf_to: ClassVar[str] = ""

    class Config(Memory.Config):
        """The fields of the memory store."""

    async def scan(self, prefix: str, **bounds: Any) -> list[tuple[str, Entry]]:
        self._require(prefix)
        return await super().scan(prefix, **bounds)

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        self._require(" ".join(op.key for op in ops))
        return await super().write(ops, durable=durable)

    def _require(self, keys: str) -> None:
        if self.deaf_to and self.deaf_to in keys:
            raise StoreUnavailable("The store does not answer.")


@pytest.mark.parametrize("key", ["/webhook_endpoint/", "/agent_turn_lease/"])
async def test_a_turn_that_could_not_be_written_leaves_nothing(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a place that is in use nor a state of the session that was not stored."""
    store = {"provider": f"{__name__}:DeafMemory"}
    one_turn = {"agents": {"provider": "kv", "max_turns": 1}}
    async with serving(scripted([{"text": "hi"}]), kv_store=store, more=one_turn) as served:
        session = await run_session(served.client)
        monkeypatch.setattr(DeafMemory, "deaf_to", key)
        with pytest.raises(openai.InternalServerError):
            await send(served.client.with_options(max_retries=0), session.id, message("lost"))
        monkeypatch.setattr(DeafMemory, "deaf_to", "")
        await run_turn(served, session.id)
        assert [turn.status for turn in await list_turns(served.client, session.id)] == ["completed"] * 2


class LosingMemory(Memory):
    """A store in which the lock of a conversation is lost once, as its response is added."""

    floor_key: ClassVar[str] = ""

    class Config(Memory.Config):
        """The fields of the memory store."""

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        if LosingMemory.floor_key and any(op.key.startswith("/run/") for op in ops):
            key, LosingMemory.floor_key = LosingMemory.floor_key, ""
            [lock] = await self.get_many([key])
            assert lock is not None
            await super().write([Put(key, lock.value)])
        return await super().write(ops, durable=durable)


async def test_a_response_whose_beginning_loses_the_conversation_is_begun_again() -> None:
    """A process that stalls while it begins one meets another process, which begins it meanwhile."""
    store = {"provider": f"{__name__}:LosingMemory"}
    async with serving(scripted([{"text": "hi"}]), kv_store=store, more=AGENTS) as served:
        session = await run_session(served.client)
        [(key, _)] = await served.stack.kv_store.scan("default/conversation/")
        LosingMemory.floor_key = key.replace("/conversation/", "/conversation_floor/")
        await send(served.client, session.id, message("go on"))
        assert (await rest(served.client, session.id)).status == "idle"
        assert LosingMemory.floor_key == ""
        assert [turn.status for turn in await list_turns(served.client, session.id)] == ["completed"] * 2


def count_calls() -> tuple[int, int]:
    """The writes and the reads of the tenant's records; looking for work of all tenants is not one of them."""
    kinds = [kind for kind, keys, _ in CountingMemory.calls if "default/" in keys]
    CountingMemory.calls.clear()
    return kinds.count("write"), kinds.count("read")


async def test_a_turn_calls_the_store_some_times_more_than_its_response() -> None:
    """The fewest calls of some turns, because deltas may come in several batches, and of as many responses."""
    async with serving(scripted([{"text": "hi"}]), kv_store=COUNTED) as served:
        session, conversation = await run_session(served.client), await served.client.conversations.create()
        turns: list[tuple[int, int]] = []
        responses: list[tuple[int, int]] = []
        for _ in range(8):
            count_calls()
            await run_turn(served, session.id)
            turns.append(count_calls())
            stream = await served.client.responses.create(
                model="scripted", input="go on", conversation=conversation.id, background=True, stream=True
            )
            assert [event.type async for event in stream][-1] == "response.completed"
            responses.append(count_calls())
    writes, reads = (min(each) for each in zip(*turns, strict=True))
    own_writes, own_reads = (min(each) for each in zip(*responses, strict=True))
    assert own_writes <= 4
    assert own_reads <= 9
    assert writes <= own_writes + 3
    assert reads <= own_reads + 6
