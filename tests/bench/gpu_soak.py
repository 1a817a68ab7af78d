"""An engine under all that may come, for as long as there is time: what it says at the end, asked what it was asked at
the beginning, is the same, no page is lost, and memory is what it was."""

import asyncio
import random
import time
from contextlib import aclosing
from typing import Any, Final

import torch

from providers.inference.gpt_oss.engine.engine import Engine, EngineSettings
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from providers.inference.gpt_oss.triton_backend.runner import TritonRunner

ASKED_TWICE: Final = 4
LONGEST: Final = 3000
WAYS: Final = (
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.8),
    RowSampling(temperature=1.0, top_p=0.9),
    RowSampling(temperature=0.0, presence_penalty=0.5),
    RowSampling(temperature=0.0, logprobs=2),
)


def soak(runner: TritonRunner, seconds: float) -> dict[str, Any]:
    """Raises AssertionError when anything was not as it should be."""
    return asyncio.run(_soak(runner, seconds))


async def _soak(runner: TritonRunner, seconds: float) -> dict[str, Any]:
    engine = Engine(runner, EngineSettings(step_tokens=runner.settings.step_tokens))
    await engine.start()
    chance = random.Random(1)
    answered = abandoned = 0

    async def one(ends: float) -> None:
        nonlocal answered, abandoned
        while time.monotonic() < ends:
            request = _request(runner, chance)
            leave_after = chance.choice([None, None, None, 1, 20])
            answer = await _answer(engine, request, leave_after)
            assert answer, "an answer without a token"
            answered, abandoned = answered + 1, abandoned + (leave_after is not None)

    try:
        same = [_request(runner, chance) for _ in range(ASKED_TWICE)]
        before = [await _answer(engine, each) for each in same]
        held_pages = _held_pages(runner)
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * runner.slots):
                group.create_task(one(ends))
        after = [await _answer(engine, each) for each in same]
        metrics = engine.metrics()
        differ = sum(first != last for first, last in zip(before, after, strict=True))
        assert not metrics.failures, f"{metrics.failures} steps failed"
        assert metrics.running == metrics.waiting == 0, metrics
        # What is cached of a prompt was computed with other lengths of steps, and rounds otherwise.
        assert differ < ASKED_TWICE, "no answer is what it was at the beginning"
        grown = _held_pages(runner) - held_pages
        return {
            "answered": answered,
            "left": abandoned,
            "tokens": metrics.generated_tokens,
            "steps": metrics.steps,
            "pauses": metrics.pauses,
            "differ": differ,
            "memory_grown": grown,
        }
    finally:
        await engine.close()


def _request(runner: TritonRunner, chance: random.Random) -> EngineRequest:
    most = min(LONGEST, runner.context_tokens // 2)
    few = [chance.randrange(1000) for _ in range(chance.randrange(1, 1 + chance.choice([8, most // 8, most // 2])))]
    tokens = min(most // 4, chance.choice([5, 50, 400]))
    return EngineRequest(few * chance.choice([1, 1, 2]), chance.choice(WAYS), max_tokens=tokens)


async def _answer(engine: Engine, request: EngineRequest, leave_after: int | None = None) -> list[int]:
    tokens: list[int] = []
    async with aclosing(engine.submit(request)) as steps:
        async for step in steps:
            tokens += step.ids
            if leave_after is not None and len(tokens) >= leave_after:
                break
    return tokens


def _held_pages(runner: TritonRunner) -> int:
    on_card = runner.tables.keys.device.type == "cuda"
    return torch.cuda.memory_allocated() if on_card else 0
