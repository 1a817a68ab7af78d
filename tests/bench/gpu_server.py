"""The engine's last mile: what HTTP, Harmony and the scheduler leave of the steps' speed, in this process."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from providers.inference.gpt_oss.backend import LoadedRunner
from providers.inference.gpt_oss.engine.runner import Plan
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.provider import GptOss
from tests.bench.gpu_measures import Row
from tests.support.servers.serving import serving

HEADER: Final = (200005, 17196, 200008)
"""<|channel|>final<|message|>: without it, what a random model says is no text, and nothing would be sent."""

LENT: Final[dict[str, LoadedRunner]] = {}
"""Runners of models that are no file, by the name of the path that stands for them."""

SERVED: Final[dict[str, GptOss]] = {}


class Speaking:
    """A runner whose sequences begin with HEADER in place of the tokens that the model chose."""

    def __init__(self, runner: LoadedRunner) -> None:
        self._runner = runner
        self._said: dict[int, int] = {}
        self.page_tokens, self.page_count = runner.page_tokens, runner.page_count
        self.slots, self.context_tokens = runner.slots, runner.context_tokens
        self.vocabulary_size, self.kv_bytes = runner.vocabulary_size, runner.kv_bytes

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._said[slot] = len(generated)
        self._runner.open(slot, sampling, prompt, generated)

    def close(self, slot: int) -> None:
        self._runner.close(slot)

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        sampled = dict(self._runner.step(plan, masks))
        for slot in sampled:
            if self._said[slot] < len(HEADER):
                sampled[slot] = SampledToken(HEADER[self._said[slot]])
                self._said[slot] += 1
        return sampled


class RandomGptOss(GptOss):
    """GptOss over a runner that was made beforehand."""

    def _load(self) -> LoadedRunner:
        SERVED[self._config.path.name] = self
        return Speaking(LENT[self._config.path.name])


async def serve(runner: LoadedRunner, streams: tuple[int, ...], tokens: int, prompt_words: int) -> list[Row]:
    """Rows for so many streams at once, each with a prompt of its own; the second round finds it in the cache. A
    request comes before all: `very_first_ms` is when its first token came. A stop token by chance ends a stream early:
    what counts is what was made."""
    LENT["random"] = runner
    section: dict[str, Any] = {
        "provider": "tests.bench.gpu_server:RandomGptOss",
        "path": str(Path("random")),
        "model": "random",
        "slots": runner.slots,
        "step_tokens": max(2048, runner.slots),
    }
    table: list[Row] = []
    try:
        async with serving(section) as served:
            # The first request of a process is for a process to become ready.
            ready = await _round(served.url, 1, 2, prompt_words, "first")
            for count in streams:
                for cached in (False, True):
                    row = await _round(served.url, count, tokens, prompt_words, "then")
                    table.append({"streams": count, "cached": cached} | row)
            table[0]["very_first_ms"] = ready["first_ms"]
    finally:
        # The next part needs the memory.
        LENT.clear()
        SERVED.clear()
    return table


async def _round(url: str, count: int, tokens: int, prompt_words: int, opening: str) -> Row:
    gate = asyncio.Barrier(count + 1)
    firsts: list[float] = []
    gaps: list[float] = []

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        words = " ".join(f"w{(number * 31 + place * 7) % 997}" for place in range(prompt_words))
        body = {
            "model": "random",
            "messages": [{"role": "user", "content": f"{opening} {count} {number} {words}"}],
            "temperature": 1,
            "seed": number,
            "max_completion_tokens": tokens,
            "stream": True,
        }
        await gate.wait()
        began = last = time.perf_counter()
        received = b""
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            async for data in answer.content.iter_any():
                now = time.perf_counter()
                if not received:
                    firsts.append(now - began)
                else:
                    gaps.append(now - last)
                last, received = now, (received + data)[-200:]
        assert b"[DONE]" in received, received

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(http, number)) for number in range(count)]
        process = psutil.Process()
        await gate.wait()
        began, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
        token_count = SERVED["random"].metrics().generated_tokens
        await asyncio.wait(tasks)
        seconds = time.perf_counter() - began
        token_count = SERVED["random"].metrics().generated_tokens - token_count
    gaps.sort()
    return {
        "tokens/s": token_count / seconds,
        "first_ms": 1e3 * statistics.median(firsts),
        "gap_p50_ms": 1e3 * gaps[len(gaps) // 2] if gaps else 0.0,
        "gap_p99_ms": 1e3 * gaps[len(gaps) * 99 // 100] if gaps else 0.0,
        "cpu": (sum(process.cpu_times()[:2]) - cpu) / seconds,
    }
