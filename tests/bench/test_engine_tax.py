"""The share of the model's own speed that HTTP, the scheduler and Harmony leave: `python -m pytest
tests/bench/test_engine_tax.py -m bench -s`.

The bare loop steps the same runner in a process of its own, with nothing around it; the server's clients read bytes and
no more. Shares are of one run; nothing is asserted but that every answer was whole.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from providers.inference.gpt_oss.engine.runner import Plan, PlanRow
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.torch_backend.runner import TorchSettings, load_runner
from tests.support.models.random_checkpoints import TINY, SaveFormat, write_checkpoint
from tests.support.servers.stack_process import running_stack

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

STREAMS = (1, 8, 32)
TOKENS = 128
PROMPT_TOKENS = 48
CONTEXT_TOKENS = 512
SPEC = replace(TINY, layers=TINY.layers[:2], vocabulary=201088, window=128)
CONFIG = """
server: {{log_level: warning}}
inference:
  provider: gpt_oss
  path: {path}
  model: tiny
  dtype: float32
  threads: 1
  slots: 32
  context_tokens: {context}
kv_store: {{provider: memory}}
"""


def bare(path: str, streams: int) -> float:
    """Tokens per second of nothing but the runner's steps."""
    settings = TorchSettings(dtype="float32", threads=1, slots=32, context_tokens=CONTEXT_TOKENS)
    runner = load_runner(path, settings)
    each = CONTEXT_TOKENS // runner.page_tokens
    pages = [list(range(slot * each, (slot + 1) * each)) for slot in range(streams)]
    prompt = list(range(1000, 1000 + PROMPT_TOKENS))
    last: dict[int, int] = {}
    for slot in range(streams):
        runner.open(slot, RowSampling(temperature=0), prompt, [])
        tokens_sampled = runner.step(Plan([PlanRow(slot, 0, prompt, pages[slot], needs_sample=True)]), {})
        last[slot] = tokens_sampled[slot].token
    began = time.perf_counter()
    for at in range(PROMPT_TOKENS, PROMPT_TOKENS + TOKENS):
        rows = [PlanRow(slot, at, [last[slot]], pages[slot], needs_sample=True) for slot in range(streams)]
        last = {slot: sampled.token for slot, sampled in runner.step(Plan(rows), {}).items()}
    return streams * TOKENS / (time.perf_counter() - began)


async def served(url: str, streams: int) -> float:
    """Tokens per second that clients are sent, from the first to the last."""
    gate = asyncio.Barrier(streams + 1)

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": "tiny",
            "input": f"Stream {number}.",
            "temperature": 0,
            "max_output_tokens": TOKENS,
            "stream": True,
            "store": False,
        }
        await gate.wait()
        received = b""
        async with http.post(f"{url}/v1/responses", json=body) as answer:
            async for data in answer.content.iter_any():
                received = (received + data)[-8000:]
        assert b"response.incomplete" in received
        assert b'"output_tokens":%d' % TOKENS in received

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(http, number)) for number in range(streams)]
        await gate.wait()
        began = time.perf_counter()
        await asyncio.wait(tasks)
        return streams * TOKENS / (time.perf_counter() - began)


async def test_engine_tax(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_checkpoint(folder, SPEC, SaveFormat(layout="transformers"))
    config = tmp_path / "stack.yaml"
    config.write_text(CONFIG.format(path=folder, context=CONTEXT_TOKENS))
    table: list[dict[str, float]] = []
    for streams in STREAMS:
        command = [sys.executable, "-m", "tests.bench.test_engine_tax", str(folder), str(streams)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        table.append({"streams": streams, "bare": float(done.stdout)})
    async with running_stack(str(config), cwd=tmp_path) as (url, _):
        await served(url, 2)
        for row in table:
            row["served"] = max([await served(url, int(row["streams"])) for _ in range(3)])
            row["share"] = row["served"] / row["bare"]
    for row in table:
        print(json.dumps({name: round(value, 2) for name, value in row.items()}))


if __name__ == "__main__":
    print(max(bare(sys.argv[1], int(sys.argv[2])) for _ in range(2)))
