"""The share of the speed of llama.cpp's server that the stack leaves: `python -m pytest
tests/bench/test_llama_cpp_tax.py -m bench -s`.

llama.cpp's server, with its own defaults, is used directly; a stack uses another one of the same file, with the same
threads and slots. Each load of some seconds goes to both, one after the other, and the figure is the median of the
ratios, since a shared machine is faster in one minute than in the next. Clients read bytes and no more.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from apis.chat import ChatRequest
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.model_files.packages import PACKAGED_MODELS, models_dir
from tests.bench import llama_server
from tests.support.models.grown_gguf import grown_gguf
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf
from tests.support.servers.stack_process import running_stack

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

TOKENS = 32
MIN_TOKENS = 16
"""The fewest that the Responses API lets a client ask for."""
ROUNDS = 10
THREADS = 1
STREAMS = 4
CONTEXT_TOKENS = 4096
TODAY = "2026-01-01"
NO_END = {str(token): -100.0 for token in (200002, 200007, 200012, 199999, 2, 0)}
CONFIG = """
server: {{log_level: warning}}
inference:
  provider: llama_cpp
  model_path: {path}
  model: tiny
  threads: {threads}
  parallel: {streams}
  context_tokens: {context}
  harmony: {{current_date: {today}}}
kv_store: {{provider: memory}}
"""
HEADER_TOKENS = 3
"""Tokens of a Harmony message before its text: a channel is named first, so the stack's first text is of the fourth."""
LONG = "the quick brown fox jumps over the lazy dog " * 8


def smollm2() -> Path:
    return models_dir() / PACKAGED_MODELS["smollm2-135m-instruct"].filename


MODELS: Mapping[str, tuple[bool, Callable[[], Path]]] = {
    "gpt-oss of real cost": (True, lambda: grown_gguf(tiny_gpt_oss_gguf(), 20, 4096)),
    "llama of real cost": (False, lambda: grown_gguf(smollm2(), 60)),
    "smollm2": (False, smollm2),
    "tiny gpt-oss": (True, tiny_gpt_oss_gguf),
}
"""Models by name, and if they are used in Harmony. Those of real cost compute 20 wide and 60 layers."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Answer:
    """Seconds to the first event with text and to the end."""

    first_s: float
    whole_s: float


async def stream(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], mark: bytes, count: int = 1) -> Answer:
    """Send the body; `count` marks are of the first event with text."""
    began, first, received = time.perf_counter(), 0.0, b""
    async with http.post(url, json=body) as answer:
        async for data in answer.content.iter_any():
            received = (received + data)[-20_000:]
            first = first or (time.perf_counter() - began if received.count(mark) >= count else 0.0)
    assert answer.status == 200, received
    assert first, received
    return Answer(first, time.perf_counter() - began)


class Direct:
    """llama.cpp's server without a stack."""

    def __init__(self, url: str, pid: int, harmony: Harmony | None) -> None:
        self.url, self.pid, self.harmony = url, pid, harmony

    async def ask(self, http: aiohttp.ClientSession, text: str, tokens: int) -> Answer:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        if self.harmony is None:
            limits = {"max_tokens": tokens, "temperature": 0, "logit_bias": NO_END, "stream": True}
            return await stream(http, f"{self.url}/v1/chat/completions", {**chat, **limits}, b'"content":"')
        ids = (await self.harmony.render_prompt(ChatRequest.model_validate(chat))).token_ids
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "logit_bias": NO_END, "stream": True}
        return await stream(http, f"{self.url}/completion", body, b'"tokens":[', 1 + HEADER_TOKENS)


class Served:
    """A stack that serves the model of the llama.cpp server."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    async def ask(self, http: aiohttp.ClientSession, text: str, tokens: int) -> Answer:
        body = {"model": "tiny", "input": text, "temperature": 0, "max_output_tokens": tokens, "stream": True}
        return await stream(http, f"{self.url}/v1/responses", {**body, "store": False, "logit_bias": NO_END}, b".delta")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@dataclass(frozen=True)
class Load:
    """Requests at once: how many, how long the texts are, and the tokens of each answer."""

    name: str
    streams: int
    text: str
    tokens: int

    async def measure(self, subject: Direct | Served, salt: str, header_tokens: int) -> Figures:
        """Return figures of which each is better when it is higher."""
        used_s = cpu_s(subject.pid)
        # The engine closes idle connections at any time.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            texts = [f"{salt}-{number} {self.text}" for number in range(self.streams)]
            answers = await asyncio.gather(*(subject.ask(http, text, self.tokens) for text in texts))
        total, first_s = self.streams * self.tokens, max(answer.first_s for answer in answers)
        figures = {f"1/s to the first token, {self.name}": 1 / first_s}
        if self.tokens > MIN_TOKENS:
            figures[f"tokens/s, {self.name}"] = total / max(answer.whole_s for answer in answers)
            decode_s = max(answer.whole_s for answer in answers) - min(answer.first_s for answer in answers)
            figures[f"tokens/s after the first, {self.name}"] = (total - self.streams * (1 + header_tokens)) / decode_s
        figures[f"tokens/CPU s, {self.name}"] = total / (cpu_s(subject.pid) - used_s)
        return figures


LOADS = (
    Load("1 stream", 1, "is a number. Tell a story.", 3 * TOKENS),
    Load("4 streams", STREAMS, "is a number. Tell a story.", TOKENS),
    Load("1 long prompt", 1, LONG, MIN_TOKENS),
)


@asynccontextmanager
async def running_llama_server(path: Path) -> AsyncGenerator[tuple[str, int]]:
    arguments = (llama_server.__file__, path, THREADS, STREAMS, CONTEXT_TOKENS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *map(str, arguments), stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip(), process.pid
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("name", MODELS)
async def test_llama_cpp_tax(name: str, tmp_path: Path) -> None:
    is_harmony, find_path = MODELS[name]
    path = await asyncio.to_thread(find_path)
    config = tmp_path / "stack.yaml"
    config.write_text(CONFIG.format(path=path, threads=THREADS, streams=STREAMS, context=CONTEXT_TOKENS, today=TODAY))
    options = HarmonyOptions.model_validate({"current_date": TODAY})
    harmony = await Harmony.load(options) if is_harmony else None
    rounds: list[tuple[Figures, Figures]] = []
    async with running_llama_server(path) as bare, running_stack(str(config), cwd=tmp_path) as stack:
        subjects = (Direct(*bare, harmony), Served(*stack))
        for number in range(-1, ROUNDS):
            print(f"{name}: round {number + 1} of {ROUNDS}", file=sys.stderr)
            bare_figures, our_figures = Figures(), Figures()
            for load in LOADS:
                # each goes first in every other round
                sides = ((subjects[0], bare_figures), (subjects[1], our_figures))
                for subject, figures in sides if number % 2 else sides[::-1]:
                    salt = f"{number}{'a' if subject is subjects[0] else 'b'}"  # as many tokens for both
                    figures.update(await load.measure(subject, salt, HEADER_TOKENS if is_harmony else 0))
            if number >= 0:
                rounds.append((bare_figures, our_figures))
    report(name, rounds)


def report(name: str, rounds: Sequence[tuple[Figures, Figures]]) -> None:
    """Print the medians of both sides, and the quartiles of the ratios."""
    for figure in rounds[0][0]:
        ratios = [ours[figure] / bare[figure] for bare, ours in rounds]
        medians = [round(statistics.median(each[side][figure] for each in rounds), 2) for side in (0, 1)]
        quartiles = [round(value, 3) for value in statistics.quantiles(ratios, method="inclusive")]
        row = {"model": name, "rounds": len(rounds), "figure": figure, "llama.cpp": medians[0], "stack": medians[1]}
        print(json.dumps({**row, "ratio (quartiles)": quartiles}), flush=True)
