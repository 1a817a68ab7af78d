"""Ctrl-C while background work runs: the server says so and ends at once; what can go on does with the next start."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.support.damage import stored_keys
from tests.support.sdk.client import TLS
from tests.support.sdk.requests import responses
from tests.support.servers.forked_process import STACK_PROGRAM, ForkedProcess, forked_process
from tests.support.servers.serving import scripted, serving
from tests.support.waiting import until_ended

ROOT = Path(__file__).resolve().parents[3]
SOON_S = 20.0
"""Less than the grace period, however busy the machine."""
LOST = [{"text": ["one ", "two "]}, {"wait_s": 600}, {"text": "three"}]


@asynccontextmanager
async def running_server(folder: Path, workers: int) -> AsyncGenerator[tuple[ForkedProcess, str]]:
    """`stack run` as a process; yields it and its URL. What it says goes to the file `log`."""
    config = {
        "server": {"log_level": "info"},
        "inference": {"provider": "scripted", "turns": [LOST]},
        "kv_store": {"provider": "sqlite", "path": str(folder / "store.db")},
        "responses": {"provider": "loop", "background": {"lease_s": 2, "poll_s": 0.1}},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    arguments = ("run", str(file), "--port", "0", "--workers", str(workers))
    with (folder / "log").open("ab") as log:
        async with forked_process(STACK_PROGRAM, *arguments, stderr=log.fileno()) as process:
            yield process, await process.listening()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_an_interrupted_server_ends_its_background_responses_at_once(workers: int, tmp_path: Path) -> None:
    """Counted in the line, handed back or failed, without a dump of threads, with exit code 0."""
    database = tmp_path / "store.db"
    async with (
        running_server(tmp_path, workers) as (process, url),
        httpx.AsyncClient(trust_env=False, verify=TLS) as client,
    ):
        body = {"model": "scripted", "input": "hi", "background": True}
        unread, read = [(await client.post(f"{url}/v1/responses", json=body)).json()["id"] for _ in range(2)]
        async with client.stream("GET", f"{url}/v1/responses/{read}?stream=true") as stream:
            async for line in stream.aiter_lines():
                if '"delta":"two "' in line:
                    break
        async with asyncio.timeout(30):
            while await asyncio.to_thread(count_batches, database, unread) < 3:  # noqa: ASYNC110 - a store sets no event
                await asyncio.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        async with asyncio.timeout(SOON_S):
            assert await process.wait() == 0
    said = (tmp_path / "log").read_text()
    assert re.search(
        r"Finishing [12] background responses? for at most 30 s. Ctrl-C or a second signal ends now.", said
    )
    assert "Timeout (" not in said
    assert "Traceback" not in said
    store: dict[str, Any] = {"provider": "sqlite", "path": str(database)}
    options = {"background": {"lease_s": 2, "poll_s": 0.1}}
    async with serving(scripted([{"text": ["four ", "five"]}]), kv_store=store, responses=options) as served:
        failed = await responses(served).retrieve(read)
        response = await until_ended(responses(served), unread)
    assert (failed.status, failed.output_text) == ("failed", "one two ")
    assert "shut down" in failed.error.message
    assert (response.status, response.output_text) == ("completed", "four five")


def count_batches(database: Path, response_id: str) -> int:
    """Return the number of batches of events in the log of a response."""
    return sum(key.startswith(f"default/event/{response_id}/") for key in stored_keys(database))


@pytest.mark.long
async def test_workers_that_cannot_start_are_started_less_and_less_often(tmp_path: Path) -> None:
    """A mistake in the run config, which one restarted worker finds, while the other one serves."""
    async with running_server(tmp_path, 2) as (process, url):
        worker, _ = psutil.Process(process.pid).children()
        (tmp_path / "run.yaml").write_text("inference: {provider: none-such}")
        worker.kill()
        async with asyncio.timeout(60):
            while "in 8 s at most" not in (said := (tmp_path / "log").read_text()):  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.1)
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
            assert (await client.get(f"{url}/healthz")).status_code == 200
    assert re.findall(r"in (\d) s at most", said) == ["1", "2", "4", "8"]
