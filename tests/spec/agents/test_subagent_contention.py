"""Six subagents that speak at the same time: each of their changes writes the state of their session, and few of these
writes are in vain."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from apis.storage.kv_store import Op
from providers.kv_store.sqlite import SQLite
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.sessions import create_session, list_items, rest
from tests.support.servers.serving import serving

SPEECH: Script = [step for _ in range(25) for step in ({"text": ["word "]}, {"wait_s": 0.02})]
CHILDREN: Script = [call("create_subagent", json.dumps({"task": play(SPEECH)}), id=f"c{each}") for each in range(6)]
WAIT: Script = [call("wait_for_subagents", "{}", id="w")]
AGENTS: dict[str, Any] = {"provider": "kv", "poll_s": 0.05, "retry_s": 0.05}


class CountingStore(SQLite):
    """Counts the writes of the states of sessions, by whether their conditions held."""

    writes: ClassVar[Counter[bool]] = Counter()

    class Config(SQLite.Config):
        pass

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        versions = await super().write(ops, durable=durable)
        if any("/agent_session_state/" in op.key for op in ops):
            self.writes[versions is not None] += 1
        return versions


@pytest.mark.parametrize(("servers", "most_in_vain"), [(1, 0.25), (2, 2.0)])
async def test_six_subagents_change_their_session_with_few_writes_in_vain(
    servers: int, most_in_vain: float, tmp_path: Path
) -> None:
    store = {"provider": "tests.spec.agents.test_subagent_contention:CountingStore", "path": str(tmp_path / "store.db")}
    async with AsyncExitStack() as stacks:
        served, *_ = [
            await stacks.enter_async_context(serving(MODEL, kv_store=store, more={"agents": AGENTS}))
            for _ in range(servers)
        ]
        CountingStore.writes.clear()
        session = await create_session(served.client, play(CHILDREN, WAIT), multi_agent={"enabled": True})
        session = await rest(served.client, session.id, within_s=60)
        writes = CountingStore.writes
        assert (session.status, session.error) == ("idle", None)
        items = await list_items(served.client, session.id)
        assert [item.type for item in items].count("agent_message") == 6
        assert writes[True] > 60
        assert writes[False] < most_in_vain * writes[True], writes
