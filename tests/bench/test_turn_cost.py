"""CPU of a turn of a session, against one of a background response in a conversation: the same model and tokens.

    .venv/bin/python -m pytest tests/bench/test_turn_cost.py -m bench -s

Both are read to their ends as streams, in turns, so that what else the machine does is the same for both. The ratio is
the median of the rounds.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.servers.ports import free_port
from tests.support.servers.stack_process import running_stack
from tests.support.servers.upstream_process import running_upstream

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
AT_ONCE = 8
TURNS = 8
ROUNDS = 7
MAX_RATIO = 2.0
"""The goal is 1.3, and 1.5 is measured. No round below this is more than the noise of a busy machine."""
HEADERS = {"OpenAI-Beta": "agents=v1"}
CONFIG = """
server: {{log_level: warning}}
inference: {{provider: vllm, base_url: "http://127.0.0.1:{port}/v1"}}
kv_store: {{provider: sqlite, path: bench.db}}
agents: {{provider: kv}}
"""


def _build_input(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]


class Turns:
    """A served stack, to which turns are sent."""

    def __init__(self, url: str, http: aiohttp.ClientSession, server: psutil.Process) -> None:
        self.url = f"{url}/v1"
        self.http = http
        self.server = server
        self.streams: dict[str, aiohttp.ClientResponse] = {}
        """The events of each session that has had a turn, which its client reads until it has had the last one."""

    def cpu_s(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in [self.server, *self.server.children(recursive=True)])

    def close_streams(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()

    async def post(self, path: str, **body: Any) -> Any:
        async with self.http.post(f"{self.url}{path}", json=body, headers=HEADERS) as answer:
            assert answer.status < 300, await answer.text()
            return await answer.json() if answer.status != 202 else None

    async def measure(self, run: Callable[[str, str], Awaitable[None]], ids: Sequence[str], tokens: int) -> float:
        """The milliseconds of CPU of one of `TURNS` turns in each of the sessions or conversations."""

        async def run_all(each: str) -> None:
            for _ in range(TURNS):
                await run(each, f"n={tokens} d=0")

        before = self.cpu_s()
        await asyncio.gather(*map(run_all, ids))
        return (self.cpu_s() - before) * 1e3 / TURNS / len(ids)

    async def create_sessions(self) -> list[str]:
        """Sessions after their first turns."""
        agent, first = {"model": "fake-model"}, "n=1 d=0"
        body = {"agent": agent, "environment": {"type": "none"}, "input": first, "stream": True}
        ids: list[str] = []
        for _ in range(AT_ONCE):
            async with self.http.post(f"{self.url}/agents/sessions", json=body, headers=HEADERS) as answer:
                events = await answer.read()
            ids.append(events.partition(b'"session":{"id":"')[2].partition(b'"')[0].decode())
        return ids

    async def create_conversations(self) -> list[str]:
        """Conversations after their first responses."""
        ids = [(await self.post("/conversations"))["id"] for _ in range(AT_ONCE)]
        for each in ids:
            await self.run_response(each, "n=1 d=0")
        return ids

    async def run_turn(self, session_id: str, text: str) -> None:
        """Run a turn, and read its events until the session rests."""
        path = f"/agents/sessions/{session_id}/events"
        event = {"type": "agent.session.input.message", "input": _build_input(text)}
        events = self.streams.get(session_id)
        if events is None:
            events = self.streams[session_id] = await self.http.get(f"{self.url}{path}", headers=HEADERS)
        await self.post(path, events=[event])
        async for line in events.content:
            assert not line.startswith(b"event: agent.session.failed")
            if line.startswith(b"event: agent.session.idle"):
                return

    async def run_response(self, conversation_id: str, text: str) -> None:
        body = {"model": "fake-model", "input": _build_input(text), "conversation": conversation_id}
        body |= {"background": True, "stream": True}
        async with self.http.post(f"{self.url}/responses", json=body) as answer:
            assert b"event: response.completed" in await answer.read()


async def test_cost_of_a_turn_against_a_background_response(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "bench.yaml").write_text(CONFIG.format(port=port))
    async with (
        running_upstream(port),
        running_stack("bench.yaml", cwd=tmp_path) as (url, _),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        server = next(child for child in psutil.Process().children() if "bench.yaml" in child.cmdline())
        turns = Turns(url, http, server)
        for tokens in (32, 256):
            ratios: list[float] = []
            costs: list[float] = []
            for number in range(ROUNDS + 1):
                conversations, sessions = await turns.create_conversations(), await turns.create_sessions()
                plain = await turns.measure(turns.run_response, conversations, tokens)
                turn = await turns.measure(turns.run_turn, sessions, tokens)
                turns.close_streams()
                if number:  # the first round loads what the server needs
                    ratios.append(turn / plain)
                    costs.append(turn)
            ratio, cost = statistics.median(ratios), statistics.median(costs)
            print(f"\n{tokens} tokens: {cost:.1f} ms of CPU per turn, {ratio:.2f} of a background response")
            assert min(ratios) < MAX_RATIO
