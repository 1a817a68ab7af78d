"""The server's cost, measured from outside: `python -m pytest tests/bench -m bench -s`.

CPU times are those of the server's whole process tree; they differ between machines, their ratios hardly do. Nothing
is asserted of them, only that every answer was whole. Of memory there are bounds.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import psutil
import pytest

from tests.support.servers.ports import free_port
from tests.support.servers.stack_process import running_stack
from tests.support.servers.upstream_process import running_upstream

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
MAX_SERVER_MIB: Final = 72
CONFIG = """
server: {{log_level: warning}}
inference: {{provider: vllm, base_url: "http://127.0.0.1:{port}/v1"}}
kv_store: {{provider: sqlite, path: bench.db}}
"""


@dataclass
class Bench:
    url: str
    server: psutil.Process
    http: aiohttp.ClientSession

    def cpu_s(self) -> float:
        tree = [self.server, *self.server.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in tree)

    async def ask(self, tokens: int, pause_us: int, **fields: object) -> tuple[float, str]:
        """One request; seconds to the first text, and the id of the response."""
        body = {"model": "fake-model", "input": f"n={tokens} d={pause_us}", **fields}
        began = time.perf_counter()
        first = 0.0
        received = b""
        async with self.http.post(f"{self.url}/v1/responses", json=body) as answer:
            async for data in answer.content.iter_any():
                if not first and b"output_text" in data:
                    first = time.perf_counter() - began
                received += data
        assert b'"status":"completed"' in received
        assert b" w%04d" % (tokens - 1) in received
        return first, received.rpartition(b'"id":"resp_')[2].partition(b'"')[0].decode()

    async def ask_message(self, tokens: int, pause_us: int) -> None:
        """Read the stream that `ask` reads, by Anthropic's Messages API."""
        question = {"role": "user", "content": f"n={tokens} d={pause_us}"}
        body = {"model": "fake-model", "max_tokens": 2 * tokens, "messages": [question], "stream": True}
        async with self.http.post(f"{self.url}/v1/messages", json=body) as answer:
            received = await answer.read()
        assert b'"stop_reason":"end_turn"' in received
        assert b" w%04d" % (tokens - 1) in received

    async def ask_after(self, delay_s: float, tokens: int) -> None:
        """A stream of 50 tokens/s that begins after `delay_s`."""
        await asyncio.sleep(delay_s)
        await self.ask(tokens, 20_000, stream=True)

    async def run_agent(self, turns: int) -> list[float]:
        """One chain of responses whose model calls the client's function in each but the last; the seconds of each."""
        function: dict[str, object] = {
            "type": "function",
            "name": "look_up",
            "parameters": {"type": "object", "properties": {}},
        }
        fields: dict[str, object] = {"model": "fake-model", "stream": True, "tools": [function]}
        outputs: list[dict[str, str]] = []
        times: list[float] = []
        for turn in range(turns + 1):
            is_last = turn == turns
            body = {**fields, "input": [*outputs, {"role": "user", "content": f"n=16 d=0{'' if is_last else ' call'}"}]}
            began = time.perf_counter()
            async with self.http.post(f"{self.url}/v1/responses", json=body) as answer:
                final = (await answer.read()).rpartition(b"event: response.completed\ndata: ")[2].partition(b"\n")[0]
            times.append(time.perf_counter() - began)
            response = json.loads(final)["response"]
            fields["previous_response_id"] = response["id"]
            calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
            assert len(calls) == (0 if is_last else 1)
            outputs = [{"type": "function_call_output", "call_id": call, "output": "22 C"} for call in calls]
        return times

    async def together(self, count: int, at_once: int, tokens: int, pause_us: int = 0, **fields: object) -> list[float]:
        """`count` requests, `at_once` at a time; the seconds to the first text of each."""
        gate = asyncio.Semaphore(at_once)

        async def one() -> float:
            async with gate:
                return (await self.ask(tokens, pause_us, **fields))[0]

        return await asyncio.gather(*(one() for _ in range(count)))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncGenerator[Bench]:
    port = free_port()
    (tmp_path / "bench.yaml").write_text(CONFIG.format(port=port))
    async with (
        running_upstream(port),
        running_stack("bench.yaml", cwd=tmp_path) as (url, _),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        server = next(child for child in psutil.Process().children() if "bench.yaml" in child.cmdline())
        bench = Bench(url, server, http)
        await bench.together(32, 8, 64, stream=True)
        yield bench


async def test_cost_of_a_token(bench: Bench) -> None:
    for name, count, at_once, tokens, pause_us in (
        ("flood, 16 streams", 64, 16, 256, 0),
        ("paced, 16 streams x 50 tokens/s", 16, 16, 256, 20_000),
    ):
        before = bench.cpu_s()
        await bench.together(count, at_once, tokens, pause_us, stream=True)
        print(f"\n{name}: {(bench.cpu_s() - before) * 1e6 / count / tokens:.1f} us of CPU per token")


async def test_cost_of_a_token_by_when_tokens_arrive(bench: Bench) -> None:
    """Sixteen streams of 50 tokens/s, whose tokens arrive together or one by one: a token that wakes the server costs
    more, in every server. Engines send the tokens of one step together; those of many engines come one by one."""
    streams, tokens, interval_s = 16, 256, 0.02
    for name, distance_s in (("together", 0.0), ("one by one", interval_s / streams)):
        starts = [bench.ask_after(number * (interval_s + distance_s), tokens) for number in range(streams)]
        asking = asyncio.gather(*starts)
        await asyncio.sleep(1)  # all streams are open for the next three seconds
        cpu_s, wakeups = bench.cpu_s(), bench.server.num_ctx_switches().voluntary
        await asyncio.sleep(3)
        cpu_s, wakeups = bench.cpu_s() - cpu_s, bench.server.num_ctx_switches().voluntary - wakeups
        count = 3 / interval_s * streams
        print(f"\n{name}: {cpu_s * 1e6 / count:.1f} us of CPU and {wakeups / count:.2f} wake-ups per token")
        await asking


async def test_cost_of_a_background_token_against_a_plain_one(bench: Bench) -> None:
    for name, count, tokens, pause_us in (("flood", 64, 256, 0), ("paced, 50 tokens/s", 16, 256, 20_000)):
        for _ in range(2):
            costs: list[float] = []
            for background in (False, True):
                before = bench.cpu_s()
                await bench.together(count, 16, tokens, pause_us, stream=True, background=background)
                costs.append((bench.cpu_s() - before) * 1e6 / count / tokens)
            plain, logged = costs
            print(f"\n{name}: {plain:.1f} us plain, {logged:.1f} us in the background, {logged / plain:.2f}")


async def test_cost_of_a_token_of_a_message_against_one_of_a_response(bench: Bench) -> None:
    """In turns, so that what else the machine does is the same for both."""
    count, tokens = 16, 1000
    for name, pause_us in (("flood", 0), ("paced, 200 tokens/s", 5000)):
        ratios: list[float] = []
        costs: list[float] = []
        for _ in range(7):
            before = bench.cpu_s()
            await asyncio.gather(*(bench.ask(tokens, pause_us, stream=True, store=False) for _ in range(count)))
            between = bench.cpu_s()
            await asyncio.gather(*(bench.ask_message(tokens, pause_us) for _ in range(count)))
            after = bench.cpu_s()
            ratios.append((after - between) / (between - before))
            costs.append((after - between) * 1e6 / count / tokens)
        ratio, cost = statistics.median(ratios), statistics.median(costs)
        print(f"\n{name}: {cost:.1f} us of CPU per token of a message, {ratio:.2f} of one of a response")


async def test_time_to_the_first_token(bench: Bench) -> None:
    for at_once in (1, 64):
        firsts = await bench.together(128, at_once, 4, stream=True)
        print(f"\nfirst token with {at_once} at once: median {statistics.median(firsts) * 1e3:.2f} ms")


async def test_requests_per_second(bench: Bench) -> None:
    for store in (True, False):
        began, before = time.perf_counter(), bench.cpu_s()
        await bench.together(1000, 16, 32, store=store)
        wall, cpu = time.perf_counter() - began, bench.cpu_s() - before
        print(f"\nnot streamed, store={store}: {1000 / wall:.0f} requests/s, {cpu:.2f} ms of CPU each")


async def test_growth_of_a_chain(bench: Bench) -> None:
    costs: list[float] = []
    previous: dict[str, str] = {}
    for _ in range(50):
        began = time.perf_counter()
        _, response_id = await bench.ask(32, 0, stream=True, **previous)
        costs.append(time.perf_counter() - began)
        previous = {"previous_response_id": f"resp_{response_id}"}
    early, late = statistics.median(costs[2:8]), statistics.median(costs[-6:])
    print(f"\nchain: turn 50 takes {late / early:.2f} times what turn 5 takes")


async def test_cost_of_an_agent_of_ten_tool_turns(bench: Bench) -> None:
    await bench.run_agent(10)
    for at_once in (1, 8):
        before = bench.cpu_s()
        runs = [await asyncio.gather(*(bench.run_agent(10) for _ in range(at_once))) for _ in range(8)]
        cpu_ms = (bench.cpu_s() - before) * 1e3 / 8 / at_once
        times = [times for together in runs for times in together]
        early, late = (statistics.median(each[turn] for each in times) for turn in (1, 9))
        print(
            f"\nagent of ten tool turns, {at_once} at once: {cpu_ms:.1f} ms of CPU, turn 10 / turn 2 {late / early:.2f}"
        )


async def test_memory_of_a_server_after_its_first_answer(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "bench.yaml").write_text(CONFIG.format(port=port))
    async with (
        running_upstream(port),
        running_stack("bench.yaml", cwd=tmp_path) as (url, pid),
        aiohttp.ClientSession() as http,
    ):
        server = psutil.Process(pid)
        start_mib = server.memory_info().rss / 1024 / 1024
        await Bench(url, server, http).ask(16, 0, stream=True)
        size_mib = server.memory_info().rss / 1024 / 1024
        print(f"\na server at its start: {start_mib:.1f} MiB, after its first answer: {size_mib:.1f} MiB")
        assert not server.children()
        assert size_mib < MAX_SERVER_MIB


async def test_memory_of_an_open_stream(bench: Bench) -> None:
    before = bench.server.memory_info().rss
    streams = asyncio.create_task(bench.together(1000, 1000, 12, 1_000_000, stream=True))
    await asyncio.sleep(8)
    open_kib = (bench.server.memory_info().rss - before) / 1024 / 1000
    await streams
    print(f"\n1,000 open streams: {open_kib:.1f} KiB each, pid {os.getpid()}")
