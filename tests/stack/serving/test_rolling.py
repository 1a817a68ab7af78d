"""Stacks that are drained, and whose workers are restarted one after the other, while clients ask.

STACK_ROLLS says how often all workers are restarted (once by default).
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from tests.support.laws.stream_laws import check_frames, check_stream
from tests.support.sdk.client import TLS, sdk_client
from tests.support.servers.worker_processes import UNLOSABLE_LEASE_S, Workers, worker_processes
from tests.support.waiting import until

ROLLS = int(os.environ.get("STACK_ROLLS", "1"))
GRACE_S = 10.0
READY_S = 2.0
"""Ten times what is promised: the machine may be busy."""
pytestmark = pytest.mark.timeout(120 + 60 * ROLLS)


def sqlite(folder: Path) -> dict[str, Any]:
    return {"provider": "sqlite", "path": str(folder / "store.db")}


async def seconds_until(line: Any) -> float:
    began = time.monotonic()
    await until(line, within_s=30)
    return time.monotonic() - began


async def is_unready(workers: Workers) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
            return (await client.get(f"{workers.url}/readyz")).status_code == 503
    except httpx.TransportError:  # it has ended already
        return True


async def test_a_drained_stack_finishes_what_is_asked_and_hands_over_the_rest(tmp_path: Path) -> None:
    store = sqlite(tmp_path)
    grace = {"server": {"grace_period_s": GRACE_S}}
    async with (
        worker_processes(tmp_path, store, workers=1, lease_s=UNLOSABLE_LEASE_S) as other,
        worker_processes(tmp_path, store, workers=1, lease_s=UNLOSABLE_LEASE_S, more=grace) as leaving,
    ):
        body = {"model": "scripted", "input": "a stream", "stream": True}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=20, verify=TLS) as client,
            client.stream("POST", f"{leaving.url}/v1/responses", json=body) as foreground,
        ):
            lines = foreground.aiter_lines()
            events_read = [await anext(lines)]
            background = await leaving.begin("wait", tools=[{"type": "web_search"}])
            assert background is not None
            reading = asyncio.create_task(leaving.until(background, "response.web_search_call.completed"))
            before = await reading
            leaving.parent.send_signal(signal.SIGTERM)
            began = time.monotonic()
            unready_s = await seconds_until(lambda: is_unready(leaving))
            handed = await other.until(background, "response.output_text.delta")
            handed_s = time.monotonic() - began
            events_read += [line async for line in lines]
        check_stream(check_frames("".join(f"{line}\n" for line in events_read).encode()))
        assert handed.startswith(before)
        assert (await other.ended(background, 10))["status"] == "completed"
        await asyncio.to_thread(psutil.wait_procs, [leaving.parent], timeout=GRACE_S)
        ended_s = time.monotonic() - began
    print(f"not ready after {unready_s:.2f} s, gone on with elsewhere after {handed_s:.1f} s, ended {ended_s:.1f} s")
    assert unready_s < READY_S
    assert ended_s < GRACE_S


class Clients:
    """Clients that ask without a pause: some as plain HTTP does, some through the SDK, which asks again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.came: Counter[str] = Counter()

    async def plain(self) -> None:
        body = {"model": "scripted", "input": "hi", "store": False}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            while True:
                try:
                    async with client.post(f"{self._url}/v1/responses", json=body) as answer:
                        self.came[f"plain {answer.status}"] += await answer.read() != b""
                except aiohttp.ClientError as exc:
                    self.came[f"plain {type(exc).__name__}"] += 1

    async def persistent(self) -> None:
        """Keep one connection until a response says `connection: close`, and never repeat a request."""
        where = httpx.URL(self._url)
        body = b'{"model":"scripted","input":"hi","store":false}'
        lines = ("POST /v1/responses HTTP/1.1", "host: localhost", "content-type: application/json")
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()
        while True:
            reader, writer = await asyncio.open_connection(where.host, where.port)
            try:
                closing = False
                while not closing:
                    writer.write(head + body)
                    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                    await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\r\n")[0]))
                    self.came[f"persistent {answer.split()[1].decode()}"] += 1
                    closing = b"connection: close" in answer
            except (OSError, asyncio.IncompleteReadError) as exc:
                self.came[f"persistent {type(exc).__name__}"] += 1
            finally:
                writer.close()

    async def patient(self) -> None:
        async with sdk_client(self._url, max_retries=2, timeout_s=20) as client:
            while True:
                answer = await client.responses.create(model="scripted", input="hi")
                self.came[f"sdk {answer.status}"] += 1

    @asynccontextmanager
    async def asking(self) -> AsyncGenerator[None]:
        tasks = [
            asyncio.create_task(each()) for each in (*[self.plain] * 8, *[self.patient] * 4, *[self.persistent] * 4)
        ]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def test_workers_are_restarted_one_by_one_and_no_request_fails(tmp_path: Path) -> None:
    """No kept-alive connection is reset, even if its client repeats nothing."""
    echo = {"inference": {"provider": "scripted", "turns": [[{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}]]}}
    async with worker_processes(tmp_path, sqlite(tmp_path), workers=2, more=echo) as workers:
        clients = Clients(workers.url)

        async def are_two() -> bool:
            return len(workers.processes()) == 2

        async with clients.asking():
            for _ in range(ROLLS):
                for worker in workers.processes():
                    count = clients.came.total()
                    worker.terminate()
                    await asyncio.to_thread(psutil.wait_procs, [worker], timeout=GRACE_S)
                    with suppress(psutil.NoSuchProcess):
                        assert worker.status() == psutil.STATUS_ZOMBIE
                    await seconds_until(are_two)
                    await seconds_until(lambda count=count: served_more(clients, count + 50))
    print(f"{ROLLS} times all workers: {dict(clients.came)}")
    assert set(clients.came) == {"plain 200", "sdk completed", "persistent 200"}


async def served_more(clients: Clients, count: int) -> bool:
    return clients.came.total() > count
