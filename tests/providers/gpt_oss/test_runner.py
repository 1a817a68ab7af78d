"""TorchRunner: rows of many sequences in a step, pages shared and used again, and what it says before it starts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from apis.errors import ConfigError
from providers.common.machine import usable_cores
from providers.inference.gpt_oss.checkpoint.checkpoint import Progress
from providers.inference.gpt_oss.engine.runner import Plan, PlanRow, Runner
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.sizing.fit import Machine
from providers.inference.gpt_oss.torch_backend import runner as torch_runner
from providers.inference.gpt_oss.torch_backend.machine import measure_device
from providers.inference.gpt_oss.torch_backend.runner import TorchSettings, load_runner
from tests.support.models.gpt_oss_reference import GREEDY, Hand, hand
from tests.support.models.random_checkpoints import TINY, tiny_spec_with, write_checkpoint

SPEC = tiny_spec_with(layers=TINY.layers[:2], experts=4, experts_per_token=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, SPEC)
    return path


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prompts(count: int) -> list[list[int]]:
    random = Random(6)
    return [[random.randrange(SPEC.vocabulary) for _ in range(random.randrange(1, 60))] for _ in range(count)]


def alone(runner: Hand, prompt: Sequence[int], count: int, sampling: RowSampling = GREEDY) -> list[int]:
    runner.open(0, sampling, prompt)
    tokens = [*prompt, runner.step(runner.row(0, 0, prompt))[0].token]
    while len(tokens) < len(prompt) + count:
        tokens.append(runner.step(runner.row(0, len(tokens) - 1, tokens[-1:]))[0].token)
    return tokens


def together(
    runner: Hand, prompts: Sequence[list[int]], count: int, samplings: Sequence[RowSampling]
) -> list[list[int]]:
    """All in one batch, arriving over time, prompts in pieces of any size; each is once paused and resumed."""
    random = Random(7)
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    waiting = list(range(len(prompts)))
    paused: set[int] = set()
    active: list[int] = []
    while waiting or active:
        while waiting and random.random() < 0.5:
            active.append(waiting.pop())
            runner.open(active[-1], samplings[active[-1]], prompts[active[-1]])
        rows: list[PlanRow] = []
        for slot in active:
            due = len(tokens[slot]) - computed[slot]
            take = due if due == 1 else random.randint(1, due)
            rows.append(runner.row(slot, computed[slot], tokens[slot][computed[slot] :][:take], samples=take == due))
            computed[slot] += take
        for slot, sampled in runner.step(*rows).items() if rows else ():
            tokens[slot].append(sampled.token)
        for slot in active[:]:
            if len(tokens[slot]) == len(prompts[slot]) + count:
                runner.runner.close(slot)
                active.remove(slot)
            elif slot not in paused and len(tokens[slot]) > len(prompts[slot]) + 3:
                paused.add(slot)
                pages = runner.tables[slot][: computed[slot] // 16]
                runner.runner.close(slot)
                runner.open(slot, samplings[slot], prompts[slot])
                runner.runner.open(slot, samplings[slot], prompts[slot], tokens[slot][len(prompts[slot]) :])
                runner.tables[slot], computed[slot] = pages, len(pages) * 16
    return tokens


def test_greedy_is_the_same_alone_and_in_a_batch_to_the_last_token(folder: Path) -> None:
    prompt_tokens = prompts(10)
    batch = together(hand(folder, "float64", slots=10), prompt_tokens, 9, [GREEDY] * 10)
    single = hand(folder, "float64", slots=10)
    assert batch == [alone(single, prompt, 9) for prompt in prompt_tokens]


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(folder: Path) -> None:
    prompt_tokens = prompts(6)
    ways = [
        RowSampling(seed=slot, top_p=0.9 if slot % 2 else 1.0, frequency_penalty=0.5 if slot % 3 else 0.0)
        for slot in range(6)
    ]
    batch = together(hand(folder, "float64"), prompt_tokens, 8, ways)
    single = hand(folder, "float64")
    assert batch == [alone(single, prompt, 8, way) for prompt, way in zip(prompt_tokens, ways, strict=True)]


def test_a_prefix_is_read_from_another_sequences_pages(folder: Path) -> None:
    prompt = (prompts(1)[0] * 50)[:50]
    expected = alone(hand(folder, "float64"), prompt, 6)
    runner = hand(folder, "float64")
    runner.open(3)
    runner.step(runner.row(3, 0, [*prompt[:48], 1, 2, 3]))
    shared = runner.tables[3][:3]
    runner.runner.close(3)
    runner.open(5)
    runner.tables[5] = list(shared)
    tokens = [*prompt, runner.step(runner.row(5, 48, prompt[48:]))[5].token]
    while len(tokens) < 56:
        tokens.append(runner.step(runner.row(5, len(tokens) - 1, tokens[-1:]))[5].token)
    assert tokens == expected


def test_a_page_that_held_rubbish_does_no_harm_to_its_next_owner(folder: Path) -> None:
    expected = alone(hand(folder, "float64"), [1, 2, 3], 4)
    runner = hand(folder, "float64", slots=1, context_tokens=64)
    for _ in range(9):
        assert alone(runner, [1, 2, 3], 4) == expected
        runner.runner.memory.keys.fill_(torch.nan)
        runner.runner.memory.values.fill_(torch.inf)


def test_only_rows_that_ask_are_sampled_and_only_of_what_is_allowed(folder: Path) -> None:
    runner = hand(folder)
    for slot in range(3):
        runner.open(slot)
    rows = [runner.row(slot, 0, [4] * (slot + 1), samples=slot > 0) for slot in range(3)]
    sampled_tokens = runner.step(*rows, masks={1: bytes([0] * 3 + [2])})
    assert sampled_tokens.keys() == {1, 2}
    assert sampled_tokens[1].token == 25
    assert runner.step(runner.row(0, 1, [4], samples=False)) == {}


def test_tokens_that_were_not_sampled_count_as_generated(folder: Path) -> None:
    """A grammar's forced tokens, say: two of them in one row, after the prompt."""
    runner = hand(folder)
    sampling = RowSampling(temperature=0.0, logit_bias={7: 1000.0}, frequency_penalty=2000.0)
    for forced, is_penalised in (([5, 6], False), ([5, 7], True)):
        runner.open(0, sampling, [9, 7])
        runner.step(runner.row(0, 0, [9, 7], samples=False))
        assert (runner.step(runner.row(0, 2, forced))[0].token != 7) == is_penalised


def test_a_loaded_runner_is_a_runner_and_reports_its_progress(folder: Path, threads: None) -> None:
    reports: list[Progress] = []
    settings = TorchSettings(device="cpu", dtype="float32", slots=3, context_tokens=100, threads=1)
    runner: Runner = load_runner(folder, settings, reports.append)
    assert torch.get_num_threads() == 1
    assert [each.layers for each in reports] == [1, 2]
    assert (runner.slots, runner.context_tokens, runner.vocabulary_size) == (3, 100, SPEC.vocabulary)
    assert (runner.page_tokens, runner.page_count) == (16, 3 * 7)
    runner.open(2, RowSampling(seed=1, presence_penalty=0.5), [1, 2], [])
    assert runner.step(Plan([PlanRow(2, 0, [1, 2], [20], needs_sample=True)]), {}).keys() == {2}
    runner.close(2)


def test_one_core_remains_for_others_unless_configured(folder: Path, threads: None) -> None:
    load_runner(folder, TorchSettings(device="cpu", context_tokens=64))
    assert torch.get_num_threads() == max(1, usable_cores() - 1)


def test_memory_for_keys_and_values_bounds_the_context(folder: Path, threads: None) -> None:
    page = SPEC.kv_bytes(4) * 16 / 2**30
    settings = TorchSettings(device="cpu", dtype="float32", slots=2)
    runner = load_runner(folder, replace(settings, kv_memory_gib=page * 300))
    assert (runner.page_count, runner.context_tokens) == (300, 4800)
    with pytest.raises(ConfigError, match=r"2400 tokens, fewer than 4096.*context_tokens.*kv_memory_gib"):
        load_runner(folder, replace(settings, kv_memory_gib=page * 150))
    with pytest.raises(ConfigError, match="2400 tokens, fewer than 2401"):
        load_runner(folder, replace(settings, kv_memory_gib=page * 150, context_tokens=2401))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "mps"])
def test_a_missing_device_is_named(folder: Path, threads: None, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: '{device}'"):
        load_runner(folder, TorchSettings(device=device))


def test_a_machine_that_is_too_slow_is_refused_unless_overridden(
    folder: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(device: torch.device, dtype: torch.dtype) -> Machine:
        return replace(measure_device(device, dtype), read_bytes_per_s=1e5)

    monkeypatch.setattr(torch_runner, "MIN_MEASURED_BYTES", 0)
    monkeypatch.setattr(torch_runner, "measure_device", slow)
    settings = TorchSettings(device="cpu", context_tokens=64)
    with pytest.raises(ConfigError, match=r"tokens/s on cpu.*llama_cpp.*run_anyway"):
        load_runner(folder, settings)
    load_runner(folder, replace(settings, run_anyway=True))
