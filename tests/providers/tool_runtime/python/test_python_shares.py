"""Shares of Python sessions: one tenant's programs and containers leave the others theirs."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from apis.containers import CreateContainer
from apis.errors import Overloaded, ToolFailed
from apis.fair_share import FairShare, Tenants
from apis.tool_runtime import ToolCall
from providers.kv_store.memory import Memory
from providers.skills.kv import StoredSkills
from providers.tool_runtime.python.messages import SessionFailure
from providers.tool_runtime.python.provider import Python
from providers.tool_runtime.python.session import PythonSession
from providers.tool_runtime.python.sessions import PythonSessionPool, SessionSettings

ENDLESS = "import time\ntime.sleep(1000)"
SETTINGS = SessionSettings(1000, 2**26)


def program(tenant: str, session: str, code: str) -> ToolCall:
    return ToolCall("call_1", "python", {"code": code}, tenant=tenant, session=session)


async def never_start(*_: object) -> PythonSession:
    raise SessionFailure("unavailable", "No session starts in these tests.")


async def use_once(pool: PythonSessionPool, tenant: str, name: str) -> None:
    key = pool.create_session(tenant, name, SETTINGS)
    with pytest.raises(SessionFailure, match="these tests"):
        async with pool.use_session(key):
            pass


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_tenant_whose_programs_fill_its_share_takes_no_container_from_another(tmp_path: Path) -> None:
    """Programs of one tenant neither end another's idle container nor keep it from a new one."""
    config = Python.Config.model_validate({"max_sessions": 4})
    store = Memory(Memory.Config())
    python = Python(
        config, None, store, StoredSkills(StoredSkills.Config(), store), Tenants(frozenset({"loud", "quiet"}))
    )
    await python.start()
    try:
        await python.call(program("quiet", "one", "x = 'kept'"))
        loud = [asyncio.create_task(python.call(program("loud", f"{n}", ENDLESS))) for n in range(6)]
        running, refused = set(loud), set[asyncio.Task[Any]]()
        while len(running) > 2:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            refused |= ended
        for task in refused:
            assert "in use" in await outcome_of(task)
        assert "kept" in (await python.call(program("quiet", "one", "x"))).text
        assert await python.containers().create(CreateContainer(name="two"), tenant="quiet")
        with pytest.raises(Overloaded):
            await python.containers().create(CreateContainer(name="more"), tenant="loud")
        for task in loud:
            task.cancel()
        await asyncio.wait(loud)
    finally:
        await python.close()


async def outcome_of(task: "asyncio.Task[object]") -> str:
    with pytest.raises(ToolFailed) as failed:
        await task
    return failed.value.message


async def test_a_new_session_is_not_taken_away_before_its_first_use() -> None:
    """Between its creation and its first use, while its record is written, a session counts as in use."""
    pool = PythonSessionPool(never_start, FairShare("Python sessions", 2), 1)
    await use_once(pool, "t", "used")
    pool.create_session("t", "new", SETTINGS)
    pool.create_session("t", "newer", SETTINGS)
    assert sorted(pool.list_entries("t")) == ["new", "newer"]
    with pytest.raises(SessionFailure, match="in use"):
        pool.create_session("t", "newest", SETTINGS)
    pool.list_entries("t")["new"].first_use_deadline = 0.0
    pool.create_session("t", "newest", SETTINGS)  # no one came for the oldest in time
    assert sorted(pool.list_entries("t")) == ["newer", "newest"]
    await pool.close()


async def test_a_tenant_beyond_its_share_loses_its_own_session_first() -> None:
    """Room is made among the sessions of the tenant that creates one, and only one of them ends."""
    pool = PythonSessionPool(never_start, FairShare("Python sessions", 4), 1)
    for name in ("1", "2", "3"):
        await use_once(pool, "loud", name)
    await use_once(pool, "quiet", "1")
    await use_once(pool, "loud", "4")
    assert (sorted(pool.list_entries("loud")), sorted(pool.list_entries("quiet"))) == (["2", "3", "4"], ["1"])
    await pool.close()
