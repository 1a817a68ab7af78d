"""`stack run --workers N` as real processes, whose workers are killed, stopped and drained under load."""

import asyncio
import random
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.support.laws.stream_laws import check_frames, check_stream
from tests.support.sdk.client import TLS
from tests.support.servers.forked_process import STACK_PROGRAM, forked_process

STEPPING = "tests.support.servers.stepping_provider"
UNLOSABLE_LEASE_S = 30
"""No worker that lives loses such a lease, however busy the machine is."""
TERMINAL = ("completed", "incomplete", "failed", "cancelled")
TURNS: list[list[dict[str, Any]]] = [
    [{"text": ["a "] * 30}, {"wait_s": 0.3}, {"text": ["b "] * 30}, {"wait_s": 0.6}, {"text": ["c "] * 30}],
    [{"wait_s": 0.8}, {"reasoning": ["hm "] * 20}, {"wait_s": 0.2}, {"text": "done"}],
    [{"reasoning": "x"}, {"calls": [{"call": "f", "arguments": ['{"a":', "1}"]}, {"call": "g", "arguments": "{}"}]}],
]


@dataclass
class Workers:
    """A running stack of several workers."""

    url: str
    parent: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """The workers that serve now."""
        workers: list[psutil.Process] = []
        for child in self.parent.children():
            with suppress(psutil.NoSuchProcess):  # one that was killed may go while it is looked at
                if child.status() != psutil.STATUS_ZOMBIE:
                    workers.append(child)
        return workers

    async def ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """One request on a connection of its own, asked again while a worker that dies takes it along."""
        async with asyncio.timeout(60):
            while True:
                try:
                    async with httpx.AsyncClient(trust_env=False, timeout=5, verify=TLS) as client:
                        return await client.request(method, f"{self.url}/v1{path}", **fields)
                except httpx.TransportError:
                    await asyncio.sleep(0.05)

    async def begin(self, text: str, **fields: Any) -> str | None:
        """A background response's id, if the server has acknowledged it."""
        body = {"model": "scripted", "input": text, "background": True, "tools": TOOLS, **fields}
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=20, verify=TLS) as client:
                answer = await client.post(f"{self.url}/v1/responses", json=body)
                answer.raise_for_status()
                return answer.json()["id"]
        except httpx.TransportError:
            return None

    async def ended(self, response_id: str, within_s: float) -> dict[str, Any]:
        """The response at its end."""
        async with asyncio.timeout(within_s):
            while True:
                answer = await self.ask("GET", f"/responses/{response_id}")
                assert answer.status_code == 200, answer.text
                if answer.json()["status"] in TERMINAL:
                    return answer.json()
                await asyncio.sleep(0.1)

    async def until(self, response_id: str, name: str, times: int = 1) -> bytes:
        """Return the bytes of the stream up to the event of that name, at its given number of occurrences."""
        output = b""
        async with (
            asyncio.timeout(20),
            httpx.AsyncClient(trust_env=False, verify=TLS) as client,
            client.stream("GET", f"{self.url}/v1/responses/{response_id}?stream=true", timeout=20) as answer,
        ):
            async for line in answer.aiter_lines():
                output += line.encode() + b"\n"
                times -= line == f"event: {name}"
                if not times and not line:
                    return output
        raise AssertionError(f"the stream has no {name}: {output.decode()}")

    async def log(self, response_id: str) -> bytes:
        """The whole stream, from the first event on."""
        return (await self.ask("GET", f"/responses/{response_id}?stream=true")).content


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "name": name, "parameters": NO_PARAMETERS} for name in "fg"]


def check_log(raw: bytes, response: Mapping[str, Any]) -> None:
    """The log keeps the laws and ends as the response did."""
    events = check_frames(raw)
    cancelled = response["status"] == "cancelled"
    check_stream(events, whole=not cancelled)
    if not cancelled:
        assert events[-1]["response"] == response


@asynccontextmanager
async def worker_processes(
    folder: Path,
    kv_store: Mapping[str, Any],
    *,
    workers: int = 2,
    slow_s: float = 0.5,
    lease_s: float = 1.5,
    more: Mapping[str, Any] | None = None,
) -> AsyncGenerator[Workers]:
    """Some workers on one store, with a scripted model and a search, which may take `slow_s`; `more` sections take the
    place of these. Work of a worker that is killed goes on after `lease_s`: where none is killed, let it be
    UNLOSABLE_LEASE_S."""
    config = {
        "server": {"log_level": "info"},
        "inference": {"provider": f"{STEPPING}:Stepping", "turns": TURNS},
        "tool_runtime": {"provider": f"{STEPPING}:Search", "slow_s": slow_s},
        "kv_store": dict(kv_store),
        "responses": {"provider": "loop", "background": {"lease_s": lease_s, "poll_s": 0.1}},
        **(more or {}),
    }
    file = folder / f"run{random.getrandbits(32):x}.yaml"
    file.write_text(yaml.safe_dump(config))
    arguments = ("run", str(file), "--port", "0", "--workers", str(workers))
    with (folder / "log").open("ab") as log:
        async with forked_process(STACK_PROGRAM, *arguments, stderr=log.fileno()) as process:
            try:
                yield Workers(await process.listening(), psutil.Process(process.pid))
            finally:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    for child in psutil.Process(process.pid).children():
                        child.send_signal(signal.SIGCONT)
                    process.terminate()
                async with asyncio.timeout(60):
                    await process.wait()
