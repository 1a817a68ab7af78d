"""What the stack leaves of llama.cpp's own server: `python -m pytest tests/bench/test_llama_cpp_tax.py -m bench -s`.

One engine is used directly, with the prompts and sampling that the stack's provider sends; another one of the same file
is behind a stack. Rounds alternate, the best of each counts, and clients read bytes and no more.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from apis.chat import ChatRequest
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.llama_cpp.engine import LlamaCppEngine, LlamaCppSettings
from providers.inference.llama_cpp.models.fit import ContextMemory
from providers.inference.llama_cpp.models.packages import PACKAGED_MODELS, models_dir
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf
from tests.support.servers.stack_process import running_stack

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

TOKENS = 128
MIN_TOKENS = 16
"""The fewest that the Responses API lets a client ask for."""
ROUNDS = 3
CONTEXT_TOKENS = 4096
TODAY = "2026-01-01"
NO_END = {str(token): -100.0 for token in (200002, 200007, 200012, 199999, 2, 0)}
CONFIG = """
server: {{log_level: warning}}
inference:
  provider: llama_cpp
  model_path: {path}
  model: tiny
  threads: 1
  parallel: 4
  context_tokens: {context}
  harmony: {{current_date: {today}}}
kv_store: {{provider: memory}}
"""
LONG = "the quick brown fox jumps over the lazy dog " * 120

Figures = dict[str, float]


async def stream(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], mark: bytes) -> Figures:
    """Return seconds to the first event with `mark` and to the end, and the bytes of the last event."""
    began, first, seen = time.perf_counter(), 0.0, b""
    async with http.post(url, json=body) as answer:
        async for data in answer.content.iter_any():
            seen = (seen + data)[-20_000:]
            first = first or (time.perf_counter() - began if mark in seen else 0.0)
    assert answer.status == 200, seen
    return {"first_s": first, "whole_s": time.perf_counter() - began}


class Direct:
    """The engine without a stack."""

    def __init__(self, url: str, key: str, harmony: Harmony | None) -> None:
        self.url, self.harmony = url, harmony
        self.headers = {"Authorization": f"Bearer {key}"}

    async def ask(self, http: aiohttp.ClientSession, text: str, tokens: int) -> Figures:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        if self.harmony is None:
            limits = {"max_tokens": tokens, "temperature": 0, "logit_bias": NO_END, "stream": True}
            return await stream(http, f"{self.url}/v1/chat/completions", {**chat, **limits}, b'"content":"')
        ids = (await self.harmony.render_prompt(ChatRequest.model_validate(chat))).token_ids
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "logit_bias": NO_END, "stream": True}
        body |= {"return_tokens": True, "samplers": ["temperature"]}
        return await stream(http, f"{self.url}/completion", body, b'"tokens":[')


class Served:
    """The same engine behind a stack."""

    def __init__(self, url: str) -> None:
        self.url, self.headers = url, dict[str, str]()

    async def ask(self, http: aiohttp.ClientSession, text: str, tokens: int) -> Figures:
        body = {"model": "tiny", "input": text, "temperature": 0, "max_output_tokens": tokens, "stream": True}
        return await stream(http, f"{self.url}/v1/responses", {**body, "store": False, "logit_bias": NO_END}, b".delta")


async def measure(subject: Direct | Served, round_number: int) -> Figures:
    """Return tokens/s and time to the first token at 1 and 4 streams, and prompt tokens/s of a long prompt."""
    figures: Figures = {}
    # The engine closes idle connections at any time.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(headers=subject.headers, connector=connector) as http:
        for streams in (1, 4):
            began = time.perf_counter()
            texts = [f"Stream {number} of round {round_number}." for number in range(streams)]
            found = await asyncio.gather(*(subject.ask(http, text, TOKENS) for text in texts))
            figures[f"tokens/s at {streams}"] = streams * TOKENS / (time.perf_counter() - began)
            figures[f"first tokens/s at {streams}"] = 1 / max(each["first_s"] for each in found)
            began = time.perf_counter()
            await asyncio.gather(
                *(subject.ask(http, f"{round_number}{at} {LONG}", MIN_TOKENS) for at in range(streams))
            )
            figures[f"long prompts/s at {streams}"] = streams / (time.perf_counter() - began)
    return figures


@pytest.mark.parametrize("name", ["gpt-oss", "smollm2"])
async def test_llama_cpp_tax(name: str, tmp_path: Path) -> None:
    is_harmony = name == "gpt-oss"
    path = tiny_gpt_oss_gguf() if is_harmony else models_dir() / PACKAGED_MODELS["smollm2-135m-instruct"].filename
    config = tmp_path / "stack.yaml"
    config.write_text(CONFIG.format(path=path, context=CONTEXT_TOKENS, today=TODAY))
    options = HarmonyOptions.model_validate({"current_date": TODAY})
    engine = LlamaCppEngine(
        LlamaCppSettings("tiny", str(path), CONTEXT_TOKENS, 4, 1, {}, ContextMemory().prompt_cache_mib), 60
    )
    await engine.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        url, _ = await stack.enter_async_context(running_stack(str(config), cwd=tmp_path))
        address = engine.address()
        direct = Direct(address.url, address.api_key, await Harmony.load(options) if is_harmony else None)
        best: dict[str, Figures] = {"llama.cpp": {}, "stack": {}}
        for number in range(ROUNDS):
            for label, subject in (("llama.cpp", direct), ("stack", Served(url))):
                for figure, value in (await measure(subject, number)).items():
                    best[label][figure] = max(best[label].get(figure, 0.0), value)
    for figure, bare in best["llama.cpp"].items():
        row = {"model": name, "figure": figure, "llama.cpp": bare, "stack": best["stack"][figure]}
        print(json.dumps({**row, "share": round(best["stack"][figure] / bare, 3)}))
