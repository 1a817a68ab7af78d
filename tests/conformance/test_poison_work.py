"""Work that ends every process which executes it, among work that does not: it fails alone, after a known number of
processes, on each shared store."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAIError

from tests.support.sdk.batch_files import ENDED, batch_line, create_batch, read_results
from tests.support.sdk.client import TLS, sdk_client
from tests.support.servers.worker_processes import TERMINAL, Workers, worker_processes

GOOD = [{"wait_s": 0.1}, {"text": "good"}]
pytestmark = pytest.mark.timeout(180)


class Deployment:
    """A stack of some workers, whose only worker is started again each time that it ends."""

    def __init__(self, folder: Path, store: dict[str, Any], workers: int) -> None:
        self._folder = folder
        self._store = store
        self._count = workers
        self._deaths = folder / "deaths"
        self.workers: Workers | None = None

    def deaths(self) -> Counter[str]:
        """Return by their inputs how many processes have ended."""
        return Counter(self._deaths.read_text().splitlines() if self._deaths.exists() else ())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        restarting = asyncio.create_task(self._keep_running())
        try:
            async with asyncio.timeout(60):
                while self.workers is None:
                    await asyncio.sleep(0.05)
                    assert not restarting.done(), restarting.exception()
            yield
        finally:
            restarting.cancel()
            await asyncio.wait({restarting})

    async def _keep_running(self) -> None:
        more = {
            "inference": {
                "provider": "tests.support.servers.deadly_model:Deadly",
                "deaths": str(self._deaths),
                "turns": [GOOD],
            },
            "files": {"provider": "kv"},
            "batches": {"provider": "leased", "max_running": 16, "lease_s": 1, "poll_s": 0.1},
            "responses": {"provider": "loop", "background": {"lease_s": 1, "poll_s": 0.1}},
        }
        while True:
            async with worker_processes(self._folder, self._store, workers=self._count, more=more) as self.workers:
                parent = self.workers.parent
                while psutil.pid_exists(parent.pid) and parent.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - a process that ends sets no event
                    await asyncio.sleep(0.05)

    async def ask(self, method: str, path: str, **fields: Any) -> Any:
        """Return the JSON answer of the first process that answers."""
        async with asyncio.timeout(60):
            while True:
                assert self.workers is not None
                with suppress(httpx.TransportError):
                    async with httpx.AsyncClient(trust_env=False, timeout=5, verify=TLS) as client:
                        answer = await client.request(method, f"{self.workers.url}/v1{path}", **fields)
                        if answer.status_code == 200:
                            return answer.json()
                await asyncio.sleep(0.05)


@asynccontextmanager
async def deployment(folder: Path, store: dict[str, Any], workers: int) -> AsyncGenerator[Deployment]:
    deployed = Deployment(folder, store, workers)
    async with deployed.running():
        yield deployed


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_poison_work_fails_alone(shared_store: dict[str, Any], tmp_path: Path, workers: int) -> None:
    """A line after two processes, a background response after three; all the others are completed."""
    async with deployment(tmp_path, shared_store, workers) as deployed:
        await check_batch(deployed, [f"good {number}" for number in range(17)], "poison line")
        await check_runs(deployed, [f"good {number}" for number in range(4)], "poison run")
    assert deployed.deaths() == {"poison line": 2, "poison run": 3}


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
async def test_several_poison_lines_fail_alone(shared_store: dict[str, Any], tmp_path: Path, workers: int) -> None:
    """Also where one process was ended by several of them, among lines of other batches."""
    poison = ["poison one", "poison two", "poison three"]
    async with deployment(tmp_path, shared_store, workers) as deployed:
        good = [f"good {number}" for number in range(40)]
        await asyncio.gather(check_batch(deployed, good, *poison), check_batch(deployed, good))
    deaths = deployed.deaths()
    # those that ran together when a process ended have cost it together
    assert deaths.keys() == set(poison)
    assert set(deaths.values()) <= {1, 2}
    assert deaths.total() in (4, 5, 6)


@pytest.mark.long
async def test_good_lines_are_not_blamed_for_a_poison_response(shared_store: dict[str, Any], tmp_path: Path) -> None:
    """Though each process that it ends executes some of them, too."""
    async with deployment(tmp_path, shared_store, 1) as deployed:
        batch = check_batch(deployed, [f"good {number}" for number in range(100)])
        await asyncio.gather(batch, check_runs(deployed, ["good run"], "poison run"))
    assert deployed.deaths() == {"poison run": 3}


async def check_batch(deployed: Deployment, good: Sequence[str], *poison: str) -> None:
    """Run a batch whose poison lines are among good ones."""
    inputs = [*good[:3], *poison, *good[3:]]
    batch, output, errors = await run_batch(deployed, [batch_line(text) for text in inputs])
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": len(inputs), "completed": len(good), "failed": len(poison)}
    assert [line["custom_id"] for line in output] == [*good]
    assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [(each, "worker_lost") for each in poison]


async def check_runs(deployed: Deployment, good: Sequence[str], poison: str) -> None:
    """Run background responses, one of which is poison."""
    bodies = [{"model": "scripted", "input": text, "background": True} for text in (*good, poison)]
    ids = [(await deployed.ask("POST", "/responses", json=body))["id"] for body in bodies]
    *completed, failed = [await end_of(deployed, response_id) for response_id in ids]
    assert {response["status"] for response in completed} == {"completed"}
    assert failed["status"] == "failed"
    assert "3 servers" in failed["error"]["message"]
    assert [await deployed.ask("GET", f"/responses/{response_id}") for response_id in ids] == [*completed, failed]


async def run_batch(
    deployed: Deployment, lines: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a batch of the lines at its end, and the lines of its output and its errors."""
    assert deployed.workers is not None
    async with sdk_client(deployed.workers.url, max_retries=9) as client:
        batch_id = (await create_batch(client, lines)).id
    async with asyncio.timeout(120):
        while (batch := await deployed.ask("GET", f"/batches/{batch_id}"))["status"] not in ENDED:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.1)
    results = list[list[dict[str, Any]]]()
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        while True:
            with suppress(OpenAIError):
                async with sdk_client(deployed.workers.url, max_retries=2) as client:
                    results.append(await read_results(client, file_id))
                    break
            await asyncio.sleep(0.1)
    return batch, results[0], results[1]


async def end_of(deployed: Deployment, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(90):
        while (response := await deployed.ask("GET", f"/responses/{response_id}"))["status"] not in TERMINAL:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.1)
    return response
