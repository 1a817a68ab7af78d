"""The kernels on a card: `TRITON_INTERPRET=0 python -m pytest -m gpu tests/providers/gpt_oss/test_triton_gpu.py`.

SOAK_SECONDS says how long the last test goes on; with all layers that is `tests.bench.gpt_oss_gpu --parts soak`.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from providers.inference.gpt_oss.backend import load_backend
from providers.inference.gpt_oss.engine.engine import Engine, EngineSettings
from providers.inference.gpt_oss.engine.runner import Runner
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from providers.inference.gpt_oss.settings import BackendSettings
from providers.inference.gpt_oss.sizing.kv_memory import KvRequest
from providers.inference.gpt_oss.torch_backend.runner import TorchSettings
from providers.inference.gpt_oss.triton_backend.kernels import device
from providers.inference.gpt_oss.triton_backend.kernels.device import INTERPRETED
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON, launch_step
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights
from providers.inference.gpt_oss.triton_backend.runner import TritonRunner, TritonSettings
from tests.bench.gpu_agreement import agreement
from tests.bench.gpu_measures import decoding, prompting
from tests.bench.gpu_model import SPECS, make_weights
from tests.bench.gpu_soak import soak
from tests.support.models.random_checkpoints import TINY, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # A card's own driver and versions may have warnings that no other machine shows.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU, and TRITON_INTERPRET=0"),
]


@pytest.fixture(scope="module")
def weights() -> Weights:
    spec = replace(SPECS["20b"], layers=SPECS["20b"].layers[:2])
    return make_weights(spec, torch.device("cuda"), torch.bfloat16, "uniform")


def make_runner(weights: Weights, *, ahead: bool = True, guesses: bool = True) -> TritonRunner:
    kv_request = KvRequest(slots=8, context_tokens=2048, kv_memory_gib=1)
    runner = TritonRunner(weights, TritonSettings(kv_request, launch_ahead=ahead, use_drafts=guesses))
    with torch.inference_mode():
        runner.tables.keys.normal_()
        runner.tables.values.normal_()
    return runner


async def answers(runner: Runner, requests: Sequence[EngineRequest]) -> list[list[int]]:
    engine = Engine(runner, EngineSettings())
    await engine.start()

    async def answer(request: EngineRequest) -> list[int]:
        async with aclosing(engine.submit(request)) as steps:
            return [token async for step in steps for token in step.ids]

    try:
        return await asyncio.gather(*(answer(each) for each in requests))
    finally:
        await engine.close()


@pytest.mark.parametrize("model", ["20b", "120b"])
def test_every_kernel_is_its_reference_at_the_true_shapes(model: str) -> None:
    """Each by itself, with what a reference made before it; then two layers of them."""
    spec = replace(SPECS[model], layers=SPECS[model].layers[:2])
    cut = make_weights(spec, torch.device("cuda"), torch.bfloat16, "uniform")
    with torch.inference_mode():
        table = agreement(cut, TRITON, [1, 2, 4, 24, 48, 128], [200, 1100, 2048])
    wrong = [row for row in table if not row["ok"]]
    assert not wrong, "\n".join(map(str, wrong))


def test_a_step_makes_the_same_numbers_every_time(weights: Weights) -> None:
    """Whichever part of a sum comes last: what changes from one time to the next is a race."""
    runner = make_runner(weights)
    with torch.inference_mode():
        for step in (decoding(weights, runner.tables, 1, 1500), decoding(weights, runner.tables, 8, 700)):
            results: list[Tensor] = []
            for _ in range(50):
                launch_step(weights, step, TRITON)
                results.append(step.hidden.clone())
                assert not step.arrivals.any()
            assert all(torch.equal(each, results[0]) for each in results[1:])


@pytest.mark.parametrize("size", [300, 600, 2048])
def test_a_prompt_makes_the_same_numbers_every_time(weights: Weights, size: int) -> None:
    """Loops over 64 and 128 pairs prepare a turn's operands while tensor cores read those before."""
    runner = make_runner(weights)
    with torch.inference_mode():
        step = prompting(weights, runner.tables, size)
        results: list[Tensor] = []
        for _ in range(10):
            launch_step(weights, step, TRITON)
            results.append(step.hidden.clone())
        assert all(torch.equal(each, results[0]) for each in results[1:])


def test_kernels_that_begin_early_make_what_they_make_one_by_one(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(weights)
    results: list[Tensor] = []
    with torch.inference_mode():
        step = decoding(weights, runner.tables, 8, 700)
        for _ in range(2):
            launch_step(weights, step, TRITON)
            results.append(step.hidden.clone())
            monkeypatch.setattr(device, "MIN_DEPENDENT_CAPABILITY", sys.maxsize)
    assert torch.equal(*results)


async def test_graphs_are_what_is_launched_without_them(weights: Weights) -> None:
    """One request at a time: batches that fill differently round differently."""
    prompts = [[(place * 37 + 5) % 999 for place in range(size)] for size in (1, 17, 300)]
    requests = [EngineRequest(each, RowSampling(temperature=0.7, seed=3), max_tokens=60) for each in prompts]
    graphed, eager = make_runner(weights, guesses=False), make_runner(weights, ahead=False, guesses=False)
    eager.steps.clear_graphs()
    for request in requests:
        assert await answers(graphed, [request]) == await answers(eager, [request])


async def test_many_at_once_are_answered_in_full(weights: Weights) -> None:
    requests = [
        EngineRequest([seed, 5, 6, 7] * 20, RowSampling(temperature=seed % 2, seed=seed), max_tokens=200)
        for seed in range(20)
    ]
    outputs = await answers(make_runner(weights), requests)
    assert [len(each) for each in outputs] == [200] * 20


async def test_a_checkpoint_is_served_by_the_kernels(tmp_path: Path) -> None:
    await asyncio.to_thread(write_checkpoint, tmp_path, TINY)
    settings = BackendSettings("triton", torch=TorchSettings(slots=2, context_tokens=512, kv_memory_gib=0.1))
    runner = await asyncio.to_thread(load_backend, tmp_path, settings)
    (output,) = await answers(runner, [EngineRequest([1, 2, 3], RowSampling(temperature=0), max_tokens=20)])
    assert len(output) == 20


def test_a_soak_changes_and_loses_nothing(weights: Weights) -> None:
    figures = soak(make_runner(weights), float(os.environ.get("SOAK_SECONDS", "60")))
    assert figures["answered"] > 100
    assert figures["memory_grown"] < 2**28
