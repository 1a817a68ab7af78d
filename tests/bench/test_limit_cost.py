"""CPU of a request that is checked, limited and counted, against one of an open stack. Prints figures only."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.servers.stack_process import STACK, running_stack
from tests.support.servers.upstream_process import running_upstream

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
REQUESTS = 600
AT_ONCE = 8
ROUNDS = 5
CONFIG = """
server: {{log_level: warning}}
inference: {{provider: vllm, base_url: "http://127.0.0.1:{port}/v1"}}
kv_store: {{provider: sqlite, path: {name}.db}}
{more}
"""
LIMITS = {
    "max_requests_per_1_minute": 1_000_000,
    "max_tokens_per_1_minute": 900_000_000,
    "max_tokens_per_1_month": 900_000_000,
    "max_concurrent_responses": 1000,
}


def cpu_s(server: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in [server, *server.children(recursive=True)])


async def create_key(folder: Path, file: str, *arguments: str) -> str:
    command = (str(STACK), "keys", "create", file, *arguments)
    created = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    printed, _ = await created.communicate()
    return printed.decode().split()[0]


async def measure(
    http: aiohttp.ClientSession, url: str, server: psutil.Process, body: Mapping[str, Any], key: str
) -> float:
    """Return the milliseconds of CPU that one request costs, of `REQUESTS` with `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask() -> None:
        async with (
            gate,
            http.post(f"{url}/v1/responses", json=body, headers={"authorization": f"Bearer {key}"}) as answer,
        ):
            assert answer.status == 200, await answer.text()
            await answer.read()

    before = cpu_s(server)
    await asyncio.gather(*(ask() for _ in range(REQUESTS)))
    await asyncio.sleep(0.2)  # what is counted a moment later belongs to it
    return (cpu_s(server) - before) * 1000 / REQUESTS


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_cost_of_keys_limits_and_usage(tmp_path: Path, unused_tcp_port: int, *, stored: bool) -> None:
    body = {"model": "fake-model", "input": "n=4 d=0", "store": stored}
    port = unused_tcp_port
    best: dict[str, float] = {}
    async with (
        running_upstream(port),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        for name in ("open", "keys", "limits"):
            more = "" if name == "open" else "accounts: {provider: stored}"
            file = f"{name}.yaml"
            (tmp_path / file).write_text(CONFIG.format(port=port, name=name, more=more))
            key = admin = "none"
            if name != "open":
                admin = await create_key(tmp_path, file, "--admin", "--name", "root")
                key = await create_key(tmp_path, file, "--project", "p", "--name", "app")
            async with running_stack(file, cwd=tmp_path) as (url, process_id):
                server = psutil.Process(process_id)
                if name == "limits":
                    path = f"{url}/v1/organization/projects/p/rate_limits/rl-*"
                    headers = {"authorization": f"Bearer {admin}"}
                    async with http.post(path, json=LIMITS, headers=headers) as answer:
                        assert answer.status == 200, await answer.text()
                    await asyncio.sleep(1.5)
                costs = [await measure(http, url, server, body, key) for _ in range(ROUNDS)]
                best[name] = min(costs)
    print(
        f"\n{'stored' if stored else 'not stored'}: {best['open']:.3f} ms of CPU without accounts, "
        f"{best['keys'] - best['open']:+.3f} ms with keys and usage, "
        f"{best['limits'] - best['open']:+.3f} ms with limits"
    )
