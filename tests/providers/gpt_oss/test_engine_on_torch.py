"""The engine over the torch runner: a request gets the output that it gets alone, with others coming and going."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from providers.inference.gpt_oss.engine.engine import Engine, EngineSettings
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from providers.inference.gpt_oss.torch_backend.runner import TorchRunner, TorchSettings, load_runner
from tests.support.models.random_checkpoints import TINY, tiny_spec_with, write_checkpoint

SPEC = tiny_spec_with(layers=TINY.layers[:2], experts=4, experts_per_token=2)
CONTEXT_TOKENS = 192
PAGES = 20
REQUESTS = 16


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    """In double precision, for sums do not depend on the batch there; with far fewer pages than its slots could use."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(Path(folder), SPEC)
    page_bytes = SPEC.kv_bytes(8) * 16
    settings = TorchSettings(
        device="cpu",
        dtype="float64",
        threads=1,
        slots=8,
        context_tokens=CONTEXT_TOKENS,
        kv_memory_gib=PAGES * page_bytes / 2**30,
    )
    return load_runner(folder, settings)


@asynccontextmanager
async def running(runner: TorchRunner) -> AsyncGenerator[Engine]:
    engine = Engine(runner, EngineSettings(step_tokens=64))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def answer(engine: Engine, request: EngineRequest, leave_after: int | None = None) -> tuple[list[int], int]:
    """The tokens, as far as they were wanted, and how many of the prompt's were cached."""
    tokens: list[int] = []
    cached = 0
    async with asyncio.timeout(60), aclosing(engine.submit(request)) as steps:
        async for step in steps:
            tokens += step.ids
            cached = step.cached_tokens
            if leave_after is not None and len(tokens) >= leave_after:
                break
    return tokens, cached


def requests(seed: int) -> list[EngineRequest]:
    """Families of prompts that begin alike; greedy ones, and some that are sampled by a seed of their own."""
    random = Random(seed)
    stems = [[random.randrange(SPEC.vocabulary) for _ in range(random.randrange(20, 90))] for _ in range(4)]
    engine_requests: list[EngineRequest] = []
    for number in range(REQUESTS):
        stem = random.choice(stems)
        rest = [random.randrange(SPEC.vocabulary) for _ in range(random.randrange(1, 30))]
        sampling = RowSampling(seed=number, temperature=1.0 if number % 4 == 0 else 0.0)
        engine_requests.append(
            EngineRequest(
                ids=[*stem[: random.randrange(1, len(stem) + 1)], *rest],
                sampling=sampling,
                max_tokens=random.randrange(20, 90),
                tenant=f"tenant {number % 3}",
            )
        )
    return engine_requests


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_together_all_get_what_they_would_alone(seed: int, runner: TorchRunner) -> None:
    engine_requests, random = requests(seed), Random(seed)
    alone: list[list[int]] = []
    for request in engine_requests:
        async with running(runner) as engine:
            alone.append((await answer(engine, request))[0])

    async with running(runner) as engine:

        async def arrive(number: int) -> tuple[list[int], int]:
            for _ in range(random.randrange(40)):
                await asyncio.sleep(0)
            leave_after = random.randrange(1, 20) if number % 5 == 4 else None
            return await answer(engine, engine_requests[number], leave_after)

        outputs = await asyncio.gather(*(arrive(number) for number in range(REQUESTS)))
        metrics = engine.metrics()
    for number, (tokens, _) in enumerate(outputs):
        assert tokens == alone[number][: len(tokens)]
        assert number % 5 == 4 or len(tokens) == len(alone[number])
    assert sum(cached for _, cached in outputs) > 0
    assert metrics.pauses > 0
    assert metrics.running == 0
