"""A step made of launch functions alone is today's forward pass: prompts, single tokens, and both in one step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.checkpoint import open_checkpoint
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON
from providers.inference.gpt_oss.triton_backend.kernels.weights import load_weights
from tests.providers.gpt_oss.kernels.stepping import CPU, Asked, Stepper, stepper
from tests.support.models.gpt_oss_reference import Hand, hand, relative_error
from tests.support.models.kernel_references import REFERENCE
from tests.support.models.random_checkpoints import TINY, SaveFormat, tiny_spec_with, write_checkpoint

ODD = tiny_spec_with(
    layers=TINY.layers[:3], hidden=96, intermediate=32, heads=12, kv_heads=4, experts=5, experts_per_token=3
)
TOKENS = [(7 * place * place + 3 * place) % TINY.vocabulary for place in range(200)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, TINY)
    return folder


def ask(slot: int, start: int, stop: int) -> Asked:
    return Asked(slot, start, [(token + 11 * slot) % TINY.vocabulary for token in TOKENS[start:stop]])


STEPS: Sequence[Sequence[Asked]] = (
    [ask(0, 0, 1), ask(1, 0, 17)],
    [ask(0, 1, 2), ask(1, 17, 18), ask(2, 0, 40), ask(3, 0, 2)],
    [ask(0, 2, 3), ask(1, 18, 19), ask(2, 40, 41), ask(3, 2, 3)],
    [ask(2, 41, 100), ask(0, 3, 19)],
    [ask(4, 0, 150), ask(3, 3, 4)],
    [ask(3, 4, 5), ask(2, 99, 100), ask(1, 19, 33), ask(0, 19, 20)],
)


def both(by_step: Stepper, by_torch: Hand, tolerance: float, steps: Sequence[Sequence[Asked]] = STEPS) -> None:
    for slot in range(5):
        by_torch.open(slot)
    for padding, runs in enumerate(steps):
        logits = by_step.logits(runs, padding=padding)
        expected = by_torch.logits(*(by_torch.row(each.slot, each.start, each.tokens) for each in runs))
        assert relative_error(logits, expected) < tolerance


@pytest.mark.parametrize("alone_rows", [0, 1000], ids=["grouped", "alone"])
@pytest.mark.parametrize("spec", [TINY, ODD], ids=["tiny", "odd"])
def test_references_make_todays_forward_pass(tmp_path: Path, spec: ModelSpec, alone_rows: int) -> None:
    write_checkpoint(tmp_path, spec)
    both(stepper(tmp_path, torch.float64, alone_rows=alone_rows), hand(tmp_path, "float64"), 1e-12)


@pytest.mark.long
def test_attention_by_kernels_makes_it_too(tiny: Path) -> None:
    kernels = replace(
        REFERENCE,
        qkv=TRITON.qkv,
        attend_decode=TRITON.attend_decode,
        attend_prefill=TRITON.attend_prefill,
        project_out=TRITON.project_out,
    )
    both(stepper(tiny, kernels=kernels), hand(tiny, "float64"), 1e-5, STEPS[:2])


@pytest.mark.parametrize("spec", [TINY, ODD], ids=["tiny", "odd"])
def test_ends_by_kernels_make_it_too(tmp_path: Path, spec: ModelSpec) -> None:
    write_checkpoint(tmp_path, spec)
    kernels = replace(REFERENCE, embed=TRITON.embed, unembed=TRITON.unembed, sample=TRITON.sample)
    both(stepper(tmp_path, kernels=kernels), hand(tmp_path, "float64"), 1e-5)


@pytest.mark.long
def test_experts_by_kernels_make_it_too(tmp_path: Path) -> None:
    """The fewest rows are computed alone, others in groups."""
    write_checkpoint(tmp_path, ODD)
    kernels = replace(
        REFERENCE,
        experts_up=TRITON.experts_up,
        experts_down=TRITON.experts_down,
        route=TRITON.route,
        grouped_up=TRITON.grouped_up,
        grouped_down=TRITON.grouped_down,
    )
    both(stepper(tmp_path, kernels=kernels, alone_rows=6), hand(tmp_path, "float64"), 1e-5, STEPS[:3])


def test_references_in_bfloat16_are_near_it(tiny: Path) -> None:
    both(stepper(tiny, torch.bfloat16), hand(tiny, "float64"), 2e-2)


def test_greedy_tokens_stay_on_the_device(tiny: Path) -> None:
    """A row of token -1 takes what was sampled for its slot: nothing is read back between steps."""
    by_step, by_torch = stepper(tiny, torch.float64), hand(tiny, "float64")
    by_torch.open(2)
    expected = [*TOKENS[:20], by_torch.step(by_torch.row(2, 0, TOKENS[:20]))[2].token]
    assert by_step.sampled([Asked(2, 0, TOKENS[:20])])[2] == expected[-1]
    for _ in range(20):
        expected.append(by_torch.step(by_torch.row(2, len(expected) - 1, expected[-1:]))[2].token)
        assert by_step.sampled([Asked(2, len(expected) - 2, [-1])], padding=3)[2] == expected[-1]


def test_several_tokens_of_a_slot_may_be_singles(tiny: Path) -> None:
    """Drafted tokens are verified so: each is a row of its own, and sees those before it."""
    by_step, by_torch = stepper(tiny, torch.float64), hand(tiny, "float64")
    by_torch.open(1)
    by_step.step([Asked(1, 0, TOKENS[:30])])
    by_torch.step(by_torch.row(1, 0, TOKENS[:30]))
    logits = by_step.logits([Asked(1, 30 + place, [TOKENS[30 + place]]) for place in range(4)])
    for place in range(4):
        expected = by_torch.logits(by_torch.row(1, 30 + place, [TOKENS[30 + place]]))
        assert relative_error(logits[place : place + 1], expected) < 1e-12


def test_a_step_of_nothing_but_padding_changes_nothing(tiny: Path) -> None:
    by_step = stepper(tiny)
    assert by_step.sampled([], padding=4) == {}
    assert bool(by_step.tables.keys.isnan().all())
    assert not by_step.tables.last_tokens.any()


def test_unpacked_experts_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, SaveFormat("dense"))
    with pytest.raises(ConfigError, match="MXFP4"):
        load_weights(open_checkpoint(tmp_path), CPU, torch.float32)
