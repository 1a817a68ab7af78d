"""Deployments of three machines with two workers each, process groups on one Redis with nginx in front: one machine is
lost, and the version before is replaced by this one, machine after machine.

STACK_PREVIOUS names the commit of the version before.
"""

import asyncio
import os
import random
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.conformance.test_automation_kills import run_under_kills
from tests.conformance.test_session_kills import AGENTS, check_session, live
from tests.support.sdk.client import sdk_client
from tests.support.servers.forked_process import ROOT
from tests.support.servers.machines import Deployment, deployed
from tests.support.servers.worker_processes import STEPPING, TURNS, Workers

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]
PREVIOUS: Final = os.environ.get("STACK_PREVIOUS", "b36b3150")
SESSIONS, BACKGROUND, AUTOMATIONS = 4, 8, 6
CLIENTS: Final = 4


class Front(Workers):
    """The deployment by way of nginx, which answers for a machine that was just lost."""

    async def ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """Send a request, again while nginx has no machine for it."""
        async with asyncio.timeout(60):
            while (answer := await super().ask(method, path, **fields)).status_code in (502, 503, 504):  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.1)
        return answer


def build_config(store: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": {"log_level": "info"},
        "inference": {"provider": f"{STEPPING}:Stepping", "turns": TURNS},
        "kv_store": store,
        "responses": {"provider": "loop", "background": {"lease_s": 1.5, "poll_s": 0.1}},
        "agents": AGENTS,
    }


@pytest.mark.parametrize("shared_store", ["redis", "postgres"], indirect=True)
async def test_nothing_is_lost_with_a_machine(shared_store: dict[str, Any], tmp_path: Path) -> None:
    async with deployed(tmp_path, build_config(shared_store)) as deployment:
        front = Front(deployment.url, psutil.Process())
        names = [f"input {number}" for number in range(SESSIONS)]
        sessions = [asyncio.create_task(live(front, name)) for name in names]
        background_ids = await asyncio.gather(*(front.begin(f"text {number}") for number in range(BACKGROUND)))
        automations = asyncio.create_task(run_under_kills(front, AUTOMATIONS, 0, sessions_are_others=True))
        await asyncio.sleep(random.uniform(1.0, 2.0))
        await deployment.machines[0].kill()
        for response_id in background_ids:
            assert response_id is not None
            assert (await front.ended(response_id, 60))["status"] == "completed"
        ids = await asyncio.gather(*sessions)
        await automations
        await asyncio.gather(*(check_session(front, name, each) for name, each in zip(names, ids, strict=True)))


async def unpack_previous(folder: Path) -> Path:
    """Return a folder with the code of the version before."""
    archive = folder / "previous.tar"
    command = ["git", "archive", "-o", str(archive), PREVIOUS]
    archiving = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, check=False)
    if archiving.returncode:
        pytest.skip(f"git does not have {PREVIOUS}: {archiving.stderr.decode()}")
    with tarfile.open(archive) as files:
        files.extractall(folder / "previous", filter="data")
    return folder / "previous"


async def ask_in_chains(deployment: Deployment, came: Counter[str]) -> None:
    """Send the turns of one chain after the other, without ever repeating a request."""
    async with sdk_client(deployment.url, max_retries=0) as client:
        while True:
            previous: str | None = None
            for number in range(20):
                try:
                    response = await client.responses.create(
                        model="scripted", input=f"{number}", previous_response_id=previous
                    )
                    assert (await client.responses.retrieve(response.id)).id == response.id
                    came["answered"] += 1
                    previous = response.id
                except Exception as exc:  # noqa: BLE001 - each is a request that failed
                    came[f"{type(exc).__name__}: {exc}"[:300]] += 1


@pytest.mark.parametrize("shared_store", ["redis"], indirect=True)
async def test_no_request_fails_while_machines_get_a_new_version(shared_store: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "server": {"log_level": "info"},
        "inference": {"provider": "scripted", "turns": [[{"text": "hello"}]]},
        "kv_store": shared_store,
        "responses": {"provider": "loop"},
    }
    came: Counter[str] = Counter()
    previous = await unpack_previous(tmp_path)
    async with deployed(tmp_path / "machines", config, code=previous) as deployment:
        clients = [asyncio.create_task(ask_in_chains(deployment, came)) for _ in range(CLIENTS)]
        for machine in deployment.machines:
            await wait_for_more(came)
            await machine.stop()
            machine.code = ROOT
            await machine.start()
        await wait_for_more(came)
        for client in clients:
            client.cancel()
    print(came)
    assert [*came] == ["answered"]


async def wait_for_more(came: Counter[str]) -> None:
    """Return when 50 more requests were answered."""
    goal = came["answered"] + 50
    async with asyncio.timeout(100):
        while came["answered"] < goal and len(came) < 2:  # noqa: ASYNC110 - several tasks count
            await asyncio.sleep(0.05)
