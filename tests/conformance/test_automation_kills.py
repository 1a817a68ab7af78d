"""Workers that are killed while automations begin, on each shared store: each time is invoked once, and each invocation
begins one session or one response.

STACK_KILL_TRIALS says how many workers are killed in the long form (16 by default).
"""

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.worker_processes import Workers, worker_processes

TRIALS = int(os.environ.get("STACK_KILL_TRIALS", "16"))
BETA = {"OpenAI-Beta": "agents=v1"}
SECTIONS: dict[str, Any] = {
    "inference": {"provider": "scripted", "turns": [[{"text": "done"}]]},
    "agents": {"provider": "kv", "lease_s": 1, "poll_s": 0.1, "retry_s": 0.2},
}
MESSAGE = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
TARGETS: list[dict[str, Any]] = [
    {"type": "response", "request": {"model": "scripted", "input": "Hi"}},
    {"type": "new_session", "environment": {"type": "none"}, "agent": {"model": "scripted"}, "input": [MESSAGE]},
]


async def ask(workers: Workers, method: str, path: str, **fields: Any) -> Any:
    answer = await workers.ask(method, path, headers=BETA, **fields)
    assert answer.status_code < 300, answer.text
    return answer.json()


async def list_all(workers: Workers, path: str) -> list[Any]:
    """Return all objects of a listing."""
    listed: list[Any] = []
    while True:
        after = f"&after={listed[-1]['id']}" if listed else ""
        page = await ask(workers, "GET", f"{path}?limit=100&order=asc{after}")
        listed += page["data"]
        if not page["has_more"]:
            return listed


async def run_under_kills(workers: Workers, count: int, kills: int, *, sessions_are_others: bool = False) -> None:
    """Create automations of one time each, and kill workers around that time. With `sessions_are_others`, other clients
    create sessions meanwhile."""
    sessions_before = len(await list_all(workers, "/agents/sessions"))
    run_times: dict[str, int] = {}

    async def create(number: int) -> None:
        run_at = int(time.time()) + 3  # its own, since a busy machine takes long to create many
        body = {"type": "once", "name": str(number), "run_at": run_at, "target": TARGETS[number % 2]}
        answer = await workers.ask("POST", "/agents/automations", headers=BETA, json=body)
        assert answer.status_code == 201, answer.text
        run_times[answer.json()["id"]] = run_at

    await asyncio.gather(*map(create, range(count)))
    await asyncio.sleep(max(0.0, min(run_times.values()) - time.time()))
    for _ in range(kills):
        await asyncio.sleep(random.uniform(0.0, 0.3))
        if processes := workers.processes():
            random.choice(processes).kill()
    invocations: list[Any] = []
    for automation_id, run_at in run_times.items():
        async with asyncio.timeout(60):
            while True:
                listed = await list_all(workers, f"/agents/automations/{automation_id}/invocations")
                if listed and listed[0]["status"] != "queued":
                    break
                await asyncio.sleep(0.05)
        assert [(each["status"], each["scheduled_at"], each["error"]) for each in listed] == [
            ("completed", run_at, None)
        ]
        invocations += listed
    created = {each["session_id"] for each in invocations if each["session_id"]}
    assert len(created) == count // 2
    sessions = len(await list_all(workers, "/agents/sessions"))
    assert sessions_are_others or sessions == sessions_before + len(created)
    for invocation in invocations:
        if response_id := invocation.get("response_id"):
            await workers.ended(response_id, 60)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shared_store", ["redis"], indirect=True)
async def test_each_time_is_invoked_once(shared_store: dict[str, Any], tmp_path: Path) -> None:
    async with worker_processes(tmp_path, shared_store, more=SECTIONS) as workers:
        await run_under_kills(workers, 10, 1)


@pytest.mark.long
@pytest.mark.timeout(120 + 30 * TRIALS)
async def test_each_time_is_invoked_once_under_many_kills(shared_store: dict[str, Any], tmp_path: Path) -> None:
    async with worker_processes(tmp_path, shared_store, workers=3, more=SECTIONS) as workers:
        for _ in range(TRIALS // 4):
            await run_under_kills(workers, 30, 4)
