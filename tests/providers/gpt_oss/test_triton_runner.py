"""TritonRunner under the engine, on a CPU: with steps launched ahead and drafts, a request gets the output that it gets
alone, and a greedy one the torch runner's."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.checkpoint import open_checkpoint
from providers.inference.gpt_oss.engine.engine import Engine, EngineSettings
from providers.inference.gpt_oss.engine.runner import Plan, PlanRow, Runner, SampledRun
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from providers.inference.gpt_oss.settings import BackendSettings
from providers.inference.gpt_oss.sizing.kv_memory import KvRequest
from providers.inference.gpt_oss.torch_backend.runner import TorchSettings, load_runner
from providers.inference.gpt_oss.triton_backend.batch import TritonBatch
from providers.inference.gpt_oss.triton_backend.kernels.embed import embed
from providers.inference.gpt_oss.triton_backend.kernels.sample import sample
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON, Kernels
from providers.inference.gpt_oss.triton_backend.kernels.unembed import unembed
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights, load_weights
from providers.inference.gpt_oss.triton_backend.runner import TritonRunner, TritonSettings, load_triton_runner
from providers.inference.gpt_oss.triton_backend.steps import PendingTokens
from tests.support.models.kernel_references import REFERENCE
from tests.support.models.random_checkpoints import TINY, tiny_spec_with, write_checkpoint

SPEC = tiny_spec_with(layers=TINY.layers[:2], experts=4, experts_per_token=2)
CONTEXT_TOKENS = 192
PAGES = 14
REQUESTS = 10
CPU = torch.device("cpu")
ENDS = replace(REFERENCE, embed=embed, unembed=unembed, sample=sample)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, SPEC)
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    """In double precision, for sums do not depend on the batch there."""
    torch.set_num_threads(1)
    return load_weights(open_checkpoint(folder), CPU, torch.float64)


@pytest.fixture(scope="module")
def single_precision(folder: Path) -> Weights:
    torch.set_num_threads(1)
    return load_weights(open_checkpoint(folder), CPU, torch.float32)


@pytest.fixture(scope="module")
def circling(folder: Path) -> Weights:
    """Its attention adds nothing, so that a token follows from the last alone, and it soon goes round in circles."""
    weights = load_weights(open_checkpoint(folder), CPU, torch.float64)
    for layer in weights.layers:
        layer.out_weight.zero_()
        layer.out_bias.zero_()
    return weights


@pytest.fixture(scope="module")
def torch_runner(folder: Path) -> Runner:
    settings = TorchSettings("cpu", "float64", threads=1, slots=8, context_tokens=CONTEXT_TOKENS)
    return load_runner(folder, settings)


class Watched(TritonRunner):
    """Records its plans and their results."""

    def __init__(self, weights: Weights, settings: TritonSettings, kernels: Kernels = REFERENCE) -> None:
        super().__init__(weights, settings, kernels)
        self.recorded_steps: list[tuple[Plan, Mapping[int, SampledToken]]] = []
        with torch.inference_mode():
            self.tables.keys.fill_(torch.nan)
            self.tables.values.fill_(torch.nan)

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        sampled_tokens = super().step(plan, masks)
        self.recorded_steps.append((plan, sampled_tokens))
        return sampled_tokens


def runner(weights: Weights, *, ahead: bool = True, guesses: bool = True, kernels: Kernels = REFERENCE) -> Watched:
    """With far fewer pages than its slots could use."""
    page_bytes = SPEC.kv_bytes(weights.ends.embedding.dtype.itemsize) * 16
    kv_request = KvRequest(slots=8, context_tokens=CONTEXT_TOKENS, kv_memory_gib=PAGES * page_bytes / 2**30)
    return Watched(weights, TritonSettings(kv_request, step_tokens=64, launch_ahead=ahead, use_drafts=guesses), kernels)


def count_rows(runner: Watched) -> list[int]:
    """The rows of each step that is launched from now on."""
    launched: list[int] = []
    launch = runner.steps.launch

    def counted(batch: TritonBatch) -> PendingTokens:
        launched.append(len(batch.slots))
        return launch(batch)

    runner.steps.launch = counted  # pyright: ignore[reportAttributeAccessIssue] - it is launched all the same
    return launched


@pytest.fixture(scope="module")
def expected(weights: Weights) -> list[list[SampledToken]]:
    """Return the output of each request alone, a token a step."""
    with asyncio.Runner() as loop:
        return loop.run(alone(runner(weights, ahead=False, guesses=False), requests()))


@asynccontextmanager
async def running(runner: Runner) -> AsyncGenerator[Engine]:
    engine = Engine(runner, EngineSettings(step_tokens=64))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def answer(engine: Engine, request: EngineRequest, leave_after: int | None = None) -> list[SampledToken]:
    tokens: list[SampledToken] = []
    async with asyncio.timeout(60), aclosing(engine.submit(request)) as steps:
        async for step in steps:
            tokens += step.logprobs or [SampledToken(token) for token in step.ids]
            if leave_after is not None and len(tokens) >= leave_after:
                break
    return tokens


async def alone(runner: Runner, requests: list[EngineRequest]) -> list[list[SampledToken]]:
    outputs: list[list[SampledToken]] = []
    for request in requests:
        async with running(runner) as engine:
            outputs.append(await answer(engine, request))
    return outputs


def requests() -> list[EngineRequest]:
    """Prompts that begin alike, some of which repeat themselves; sampled in every way."""
    random = Random(4)
    stems = [[random.randrange(SPEC.vocabulary) for _ in range(random.randrange(20, 90))] for _ in range(3)]
    ways = (
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.3),
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.9, top_p=0.9, logprobs=2),
        RowSampling(temperature=0.0, presence_penalty=0.7),
    )
    engine_requests: list[EngineRequest] = []
    for number in range(REQUESTS):
        stem = random.choice(stems)[: random.randrange(1, 80)]
        rest = [random.randrange(SPEC.vocabulary) for _ in range(random.randrange(1, 9))] * random.choice([1, 1, 3])
        sampling = replace(ways[number % len(ways)], seed=number - 3)
        engine_requests.append(EngineRequest([*stem, *rest], sampling, max_tokens=random.randrange(15, 40)))
    return engine_requests


async def test_greedy_tokens_are_the_torch_runners(expected: list[list[SampledToken]], torch_runner: Runner) -> None:
    """And those that the sampler in torch chooses."""
    by_torch = await alone(torch_runner, requests())
    for request, own, theirs in zip(requests(), expected, by_torch, strict=True):
        if request.sampling.temperature == 0 or request.sampling.logprobs is not None:
            assert [each.token for each in own] == [each.token for each in theirs]


async def test_named_tokens_have_the_scores_of_the_torch_runner(weights: Weights, torch_runner: Runner) -> None:
    """And a row that has a prefix in the cache has the same."""
    random = Random(5)
    stem = [random.randrange(SPEC.vocabulary) for _ in range(70)]
    sampling = RowSampling(temperature=0.0, logprobs=0, score_ids=[7, 3, SPEC.vocabulary - 1, SPEC.vocabulary])
    rows = [EngineRequest([*stem, number], sampling, max_tokens=1) for number in range(6)]
    by_torch = await alone(torch_runner, rows)
    async with running(runner(weights)) as engine:
        together = [await answer(engine, rows[0]), *await asyncio.gather(*(answer(engine, row) for row in rows[1:]))]
    for (own,), (theirs,) in zip(together, by_torch, strict=True):
        assert own.scores[:3] == pytest.approx(theirs.scores[:3], abs=0.02)
        assert own.scores[3] == -math.inf


@pytest.mark.parametrize(("ahead", "guesses"), [(True, True), (True, False), (False, True)])
async def test_together_all_get_what_they_would_alone(
    weights: Weights, expected: list[list[SampledToken]], ahead: bool, guesses: bool
) -> None:
    engine_requests, random = requests(), Random(4)
    watched = runner(weights, ahead=ahead, guesses=guesses)
    async with running(watched) as engine:

        async def arrive(number: int) -> list[SampledToken]:
            for _ in range(random.randrange(40)):
                await asyncio.sleep(0)
            return await answer(engine, engine_requests[number], random.randrange(1, 20) if number % 5 == 4 else None)

        outputs = await asyncio.gather(*(arrive(number) for number in range(len(engine_requests))))
        metrics = engine.metrics()
    for number, tokens in enumerate(outputs):
        assert [each.token for each in tokens] == [each.token for each in expected[number][: len(tokens)]]
        assert number % 5 == 4 or len(tokens) == len(expected[number])
    assert metrics.failures == 0
    assert metrics.pauses > 0


@pytest.mark.parametrize(("temperature", "sequences"), [(0.0, 1), (0.1, 3)])
async def test_drafts_make_fewer_steps_and_no_other_tokens(
    circling: Weights, temperature: float, sequences: int
) -> None:
    engine_requests = [
        EngineRequest([7, 8, 9 + seed], RowSampling(temperature=temperature, seed=seed), max_tokens=40)
        for seed in range(sequences)
    ]
    plain, guessing = runner(circling, guesses=False), runner(circling)
    expected = await alone(plain, engine_requests)
    async with running(guessing) as engine:
        assert await asyncio.gather(*(answer(engine, each) for each in engine_requests)) == expected
    assert any(
        isinstance(each, SampledRun)
        for _, sampled_tokens in guessing.recorded_steps
        for each in sampled_tokens.values()
    )
    if sequences == 1:
        assert len(guessing.recorded_steps) < len(plain.recorded_steps) * 0.6


@pytest.mark.long
async def test_sequences_that_are_paused_between_drafts_lose_nothing(circling: Weights) -> None:
    """Four together need more pages than there are, and leave and take their slots all the time."""
    engine_requests = [
        EngineRequest([seed, 8, 9 + seed % 2] * 9, RowSampling(temperature=0.1 * (seed % 2), seed=seed), max_tokens=90)
        for seed in range(6)
    ]
    expected = await alone(runner(circling, ahead=False, guesses=False), engine_requests)
    watched = runner(circling)
    async with running(watched) as engine:
        gate = asyncio.Semaphore(4)

        async def arrive(request: EngineRequest) -> list[SampledToken]:
            async with gate:
                return await answer(engine, request)

        assert await asyncio.gather(*(arrive(each) for each in engine_requests)) == expected
        metrics = engine.metrics()
    assert metrics.pauses > 0
    assert metrics.failures == 0
    assert any(
        isinstance(each, SampledRun) for _, sampled_tokens in watched.recorded_steps for each in sampled_tokens.values()
    )


async def test_a_sequence_whose_guesses_fail_is_left_alone(weights: Weights) -> None:
    """Every three of its prompt's tokens stood there before; what follows them is chance at this temperature."""
    watched = runner(weights)
    launched = count_rows(watched)
    await alone(watched, [EngineRequest([1, 2, 3, 4] * 20, RowSampling(temperature=9, seed=1), max_tokens=90)])
    assert sum(rows > 1 for rows in launched) <= 3


async def test_the_next_step_is_under_way_before_it_is_asked_for(weights: Weights) -> None:
    """So a step of decoding launches one, too: that of its last tokens, which the engine never plans, is in vain."""
    plain = runner(weights, guesses=False)
    launched = count_rows(plain)
    await alone(plain, [EngineRequest([3, 1, 2], RowSampling(temperature=0), max_tokens=40)])
    assert launched == [3, *[1] * 40]


def test_a_row_that_goes_on_otherwise_than_was_sampled_is_computed_again(weights: Weights) -> None:
    """Another token, or more of them than the step that was launched ahead knew."""
    for tokens in ([7], [7, 8]):
        results: list[SampledToken] = []
        for ahead in (True, False):
            triton_runner = runner(weights, ahead=ahead)
            triton_runner.open(0, RowSampling(temperature=0), [1, 2], [])
            first = triton_runner.step(Plan([PlanRow(0, 0, [1, 2], [3], needs_sample=True)]), {})[0]
            assert first.token != 7
            results.append(triton_runner.step(Plan([PlanRow(0, 2, tokens, [3], needs_sample=True)]), {})[0])
        assert results[0] == results[1]


def test_rows_whose_logits_are_no_numbers_fail_the_step(weights: Weights) -> None:
    broken = replace(weights, ends=replace(weights.ends, norm=weights.ends.norm * torch.nan))
    for sampling in (RowSampling(temperature=0), RowSampling(top_p=0.5)):
        triton_runner = runner(broken)
        triton_runner.open(0, sampling, [1, 2], [])
        with pytest.raises(FloatingPointError):
            triton_runner.step(Plan([PlanRow(0, 0, [1, 2], [3], needs_sample=True)]), {})


def test_a_mask_holds_its_row_and_no_other(weights: Weights) -> None:
    triton_runner = runner(weights)
    for slot in range(3):
        triton_runner.open(slot, RowSampling(temperature=0), [4], [])
    rows = [PlanRow(slot, 0, [4], [slot], needs_sample=slot > 0) for slot in range(3)]
    masked = triton_runner.step(Plan(rows), {1: bytes([0] * 3 + [2])})
    free = triton_runner.step(Plan(rows), {})
    assert masked.keys() == free.keys() == {1, 2}
    assert masked[1].token == 25
    assert masked[2] == free[2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows of padding, which may hold anything
@pytest.mark.parametrize("kernels", [REFERENCE, ENDS], ids=["references", "kernels"])
def test_every_shape_is_there_before_anyone_waits_for_it(single_precision: Weights, kernels: Kernels) -> None:
    triton_runner = runner(single_precision, kernels=kernels)
    with torch.inference_mode():
        for shape in triton_runner.shapes.all_shapes()[:: 1 if kernels is REFERENCE else 5]:
            assert triton_runner.steps.launch(TritonBatch(shape)).wait() == []
    triton_runner.open(1, RowSampling(temperature=0.7, seed=5), [1], [])
    sampled_tokens = triton_runner.step(Plan([PlanRow(1, 0, [9, 8, 7], [2], needs_sample=True)]), {})
    assert sampled_tokens.keys() == {1}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows of padding, which may hold anything
async def test_the_kernels_make_the_references_tokens(single_precision: Weights) -> None:
    """All of them, interpreted: prompts next to single tokens, steps ahead, drafts."""
    engine_requests = [
        EngineRequest([9, 8, 7, 6, 5, 4] * 3, RowSampling(temperature=0), max_tokens=3),
        EngineRequest([3], RowSampling(temperature=0.8, seed=4), max_tokens=3),
    ]
    settings = TritonSettings(KvRequest(slots=2, context_tokens=64, kv_memory_gib=0.1), step_tokens=64)
    outputs: list[list[list[SampledToken]]] = []
    for kernels in (REFERENCE, TRITON):
        async with running(Watched(single_precision, settings, kernels)) as engine:
            outputs.append(await asyncio.gather(*(answer(engine, each) for each in engine_requests)))
    assert outputs[0] == outputs[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows of padding, which may hold anything
def test_a_certified_head_makes_the_same_tokens(folder: Path) -> None:
    """From the option to the kernels: a prompt and a single token, greedy and warm."""
    outputs: list[Mapping[int, SampledToken]] = []
    for certified in (False, True):
        torch_settings = TorchSettings("cpu", "float32", threads=1, slots=2, context_tokens=64, kv_memory_gib=0.1)
        settings = BackendSettings("triton", step_tokens=64, certified_head=certified, torch=torch_settings)
        triton_runner = load_triton_runner(open_checkpoint(folder), CPU, settings)
        assert triton_runner.certified_head == certified
        triton_runner.settings = replace(triton_runner.settings, launch_ahead=False)
        triton_runner.open(0, RowSampling(temperature=0), [1, 2, 3], [])
        triton_runner.open(1, RowSampling(temperature=0.8, seed=4), [5], [])
        rows = [PlanRow(1, 0, [5], [1], needs_sample=True), PlanRow(0, 0, [1, 2, 3], [0], needs_sample=True)]
        outputs.append(triton_runner.step(Plan(rows), {}))
    assert outputs[0] == outputs[1]
    assert outputs[0].keys() == {0, 1}


def test_too_little_memory_for_a_context_is_said_before_anything_is_served(weights: Weights) -> None:
    with pytest.raises(ConfigError, match="kv_memory_gib"):
        TritonRunner(weights, TritonSettings(KvRequest(2, 4096, 1e-6)), REFERENCE)
