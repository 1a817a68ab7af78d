"""Sampling by way of an int8 copy: `sample`'s token in every case, bounds that hold, and little that is read."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from providers.inference.gpt_oss.sizing.kv_memory import int8_unembedding_bytes
from providers.inference.gpt_oss.triton_backend.kernels.buffers import MAX_CERTIFIED_ROWS, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.narrow import quantize_unembedding
from providers.inference.gpt_oss.triton_backend.kernels.sample import GREEDY_BELOW, sample
from providers.inference.gpt_oss.triton_backend.kernels.sample_certified import (
    CertifiedScratch,
    sample_certified,
    slice_scratch,
)
from providers.inference.gpt_oss.triton_backend.kernels.unembed import unembed
from tests.providers.gpt_oss.kernels.comparing import ENDS_SHAPES, Case, Shape, assert_same, copied, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, Loop, check, compiled
from tests.support.models.kernel_references import gumbel, sample_reference
from tests.support.models.random_checkpoints import tiny_spec_with

BUDGETS = {
    80: Budget(registers=168, shared_bytes=73_728, instructions=2700),
    90: Budget(registers=120, shared_bytes=92_160, instructions=2900),
    100: Budget(registers=112, shared_bytes=92_176, instructions=3900),
}
PRODUCTS = {80: ["IMMA.16832.S8.S8"], 90: ["IGMMA.64x16x32.S8.S8"], 100: ["UTCIMMA", "IMMA.16832.S8.S8"]}
"""Before Triton 3.9 it is the older one on sm_100, too."""
FLOATS = re.compile(
    r"\b((?:fma|mul|add|sub|div|lg2)\.\S*f32|wgmma\.mma_async\S*|mma\.sync\S*|tcgen05\.mma\S*|cvt\.\S*f32\S*)"
)
TEMPERATURES = (1, 1, 0, 0.3, 1, 1, 2e-5, 1e3)
FIVE = Shape(sequences=((2, 1),) * 6, padding=0, dtype=torch.bfloat16)
"""Five rows are sampled, each at a temperature of its own."""


def with_copy(case: Case) -> Case:
    return replace(case, ends=replace(case.ends, int8_unembedding=quantize_unembedding(case.ends.unembedding)))


def same(case: Case) -> None:
    assert_same(case, (sample_certified, sample), ["sampled_tokens", "last_tokens"], poisoned=["sampled_tokens"])


def drawn(seed: int, change: Callable[[Case], None], shape: Shape = FIVE) -> Case:
    """A case as nothing in particular makes it, changed, and only then copied."""
    case = make_case(replace(shape, seed=seed))
    case.step.tables.temperatures.copy_(torch.tensor(TEMPERATURES))
    change(case)
    return with_copy(case)


def looked_at(case: Case) -> tuple[StepBuffers, CertifiedScratch]:
    """Return the intermediate results of a step whose scratch memory was NaN before."""
    step = copied(case.step)
    step.partials.fill_(torch.nan)
    sample_certified(case.ends, step)
    return step, slice_scratch(case.ends, step)


def scores(case: Case, step: StepBuffers, logits: Tensor) -> Tensor:
    """Return the scores of logits [S, V], in float64."""
    rows = step.sample_rows.long()
    slots = step.slots[rows].long()
    warmth = step.tables.temperatures[slots].double().unsqueeze(-1)
    noise = gumbel(step.tables.seeds[slots], step.positions[rows] + 1, case.ends.spec.vocabulary)
    return torch.where(warmth < GREEDY_BELOW, logits.double(), logits.double() / warmth + noise)


def lengths(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=-1).sqrt()


def unequal(case: Case) -> None:
    """Weights' magnitudes are far apart, within a row and from row to row."""
    weight = case.ends.unembedding
    weight.copy_(weight * torch.randn(weight.shape).mul(2).exp() * torch.randn(len(weight), 1).exp())


def near_ties(case: Case) -> None:
    """All rows are one, but for a last bit here and there."""
    weight = case.ends.unembedding
    bits = torch.randint(0, 40, weight.shape) == 0
    weight.copy_(weight[7].clone())
    weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32).bitwise_xor_(bits.short())


def equal_rows(case: Case) -> None:
    """One weight each: a sum of several may be rounded differently at the edge of a processor's tile."""
    case.ends.unembedding.zero_()
    case.ends.unembedding[:, 3] = 0.5


def pairs(case: Case) -> None:
    """The best of them are there twice, once in each block."""
    case.ends.unembedding[128:] = case.ends.unembedding[:128].clone()


def no_weights(case: Case) -> None:
    case.ends.unembedding.zero_()


def no_inputs(case: Case) -> None:
    case.step.hidden.zero_()


def one_channel(case: Case) -> None:
    case.step.hidden[:, 3] = 1e4


def one_row(case: Case) -> None:
    case.ends.unembedding[201] *= 1e4


def scaled(inputs: float, weights: float) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.ends.norm.mul_(inputs)
        case.ends.unembedding.mul_(weights)

    return change


CHANGES: dict[str, Callable[[Case], None]] = {
    "nothing": lambda case: None,
    "unequal": unequal,
    "near_ties": near_ties,
    "pairs": pairs,
    "no_weights": no_weights,
    "no_inputs": no_inputs,
    "one_channel": one_channel,
    "one_row": one_row,
    "huge_inputs": scaled(1e30, 1),
    "subnormal_inputs": scaled(1e-39, 1),
    "huge_weights": scaled(1, 1e30),
    "subnormal_weights": scaled(1, 1e-39),
    "opposed": scaled(1e-30, 1e34),
    "steep": scaled(1e3, 1),
}


def assert_certified(case: Case, *, bounded: bool = True) -> None:
    """The token is `sample`'s. Bounds hold for the products in float64, and for those that `unembed` makes."""
    (step, room), other = looked_at(case), copied(case.step)
    sample(case.ends, other)
    assert torch.equal(step.sampled_tokens, other.sampled_tokens)
    assert torch.equal(step.tables.last_tokens, other.tables.last_tokens)
    if not bounded:
        return
    normed = room.normed_rows.view(len(step.sample_rows), -1).double()
    bounds, blocks = (
        room.bounds.view(-1, len(step.sample_rows)).T,
        room.reached_scores.view(-1, len(step.sample_rows)).T,
    )
    unembed(case.ends, other)
    for logits in (normed @ case.ends.unembedding.double().T, other.logits):
        truth = scores(case, step, logits)
        assert bool((bounds >= truth).all())
        tokens = truth.shape[-1]
        best = torch.stack([truth[:, low : low + 128].amax(dim=-1) for low in range(0, tokens, 128)], dim=-1)
        assert bool((blocks <= best).all())
    assert torch.equal(room.floors, blocks.amax(dim=-1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers too large
@pytest.mark.parametrize("change", CHANGES)
def test_bounds_hold_and_the_token_is_samples(change: str) -> None:
    assert_certified(drawn(len(change), CHANGES[change]))


@pytest.mark.parametrize(
    ("shape", "dtype"), [("decoding", torch.bfloat16), ("one", torch.float32), ("mixed", torch.float32)]
)
def test_the_kernel_equals_its_reference(shape: str, dtype: torch.dtype) -> None:
    case = with_copy(make_case(replace(ENDS_SHAPES[shape], dtype=dtype)))
    assert_same(
        case, (sample_certified, sample_reference), ["sampled_tokens", "last_tokens"], poisoned=["sampled_tokens"]
    )


@pytest.mark.parametrize("rows", [MAX_CERTIFIED_ROWS, MAX_CERTIFIED_ROWS + 1])
def test_more_rows_than_it_certifies_are_samples(rows: int) -> None:
    """And a vocabulary that no block divides is read to its end."""
    spec = tiny_spec_with(hidden=96, vocabulary=333)
    case = with_copy(make_case(Shape(((2, 1),) * rows, padding=rows // 4, spec=spec, seed=rows)))
    assert len(case.step.sample_rows) == rows
    same(case)


def test_tokens_that_cannot_win_are_not_read() -> None:
    case = drawn(1, CHANGES["nothing"])
    expected, room = looked_at(case)
    candidates = (room.bounds.view(256, -1) >= room.floors).any(dim=-1)
    assert 5 <= int(candidates.sum()) < 100
    case.ends.unembedding[~candidates] = torch.nan
    result, _ = looked_at(case)
    assert torch.equal(result.sampled_tokens, expected.sampled_tokens)
    case.ends.unembedding[candidates] = torch.nan
    assert bool((looked_at(case)[0].sampled_tokens == -1).any())


def test_a_block_that_cannot_win_is_left_out() -> None:
    def change(case: Case) -> None:
        case.step.tables.temperatures.zero_()
        case.ends.unembedding[128:] *= 1e-3

    step, room = looked_at(drawn(2, change))
    scores = room.scores.view(2, -1)
    assert bool((scores[1] == -torch.inf).all())
    assert bool(scores[0].isfinite().all())
    assert bool((step.sampled_tokens < 128).all())
    assert not bool(step.arrivals.any())


def test_of_equal_scores_the_lowest_token_wins() -> None:
    def change(case: Case) -> None:
        case.step.tables.temperatures.zero_()
        equal_rows(case)

    assert bool((looked_at(drawn(3, change))[0].sampled_tokens == 0).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are none
@pytest.mark.parametrize(
    ("place", "value", "rows"),
    [("hidden", torch.nan, 1), ("weight", torch.inf, 5), ("weight", 3e38, 5), ("against", 1e37, 5)],
)
def test_rows_whose_logits_are_no_numbers_have_no_token(place: str, value: float, rows: int) -> None:
    """Bad numbers of an input; of a token's weights; of their product alone, though that token loses."""

    def change(case: Case) -> None:
        if place == "hidden":
            case.step.hidden[1, :40] = value
        elif place == "weight":
            case.ends.unembedding[130, :40] = value
        else:
            case.step.hidden.copy_(case.step.hidden[0].clone())
            case.ends.unembedding[130] = -value * case.step.hidden[0].sign()

    case = drawn(4, change)
    assert_certified(case, bounded=False)
    assert int((looked_at(case)[0].sampled_tokens == -1).sum()) == rows


def test_padding_wants_nothing() -> None:
    case = with_copy(make_case(replace(FIVE, padding=2)))
    case.step.sample_rows.fill_(-1)
    step, room = looked_at(case)
    assert bool((room.scores == -torch.inf).all())
    assert bool((step.sampled_tokens == -1).all())
    assert torch.equal(step.tables.last_tokens, case.step.tables.last_tokens)


def test_the_copy_is_as_near_as_it_says() -> None:
    drawing = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 96, generator=drawing).mul(torch.randn(300, 1, generator=drawing).exp()).bfloat16()
    weight[5], weight[6, 3], weight[7] = 0, torch.inf, weight[7] * 1e-37
    copy = quantize_unembedding(weight)
    restored = copy.codes.double() * copy.scales.double().unsqueeze(-1)
    rest_lengths = lengths(weight.double() - restored)
    fine = torch.arange(300) != 6
    assert bool((copy.spreads.double() >= rest_lengths)[fine].all())
    assert bool((copy.lengths.double() >= lengths(weight.double()))[fine].all())
    assert bool((copy.lengths.double() >= lengths(restored))[fine].all())
    assert float((copy.spreads.double() / copy.lengths.double())[fine & (torch.arange(300) != 7)].median()) < 0.01
    assert float(copy.spreads[6]) == float(copy.lengths[6]) == torch.inf
    copy_bytes = sum(each.nbytes for each in (copy.codes, copy.scales, copy.spreads, copy.lengths))
    assert copy_bytes == int8_unembedding_bytes(tiny_spec_with(vocabulary=300, hidden=96))


@pytest.mark.parametrize(("architecture", "rows"), [(80, 8), (90, 8), (100, 8)])
def test_the_kernel_is_within_its_budget(architecture: int, rows: int) -> None:
    kernels = check(Job("sample_certified", architecture, rows=rows), BUDGETS[architecture])
    _, bounds, candidates, _ = kernels
    assert [kernel.name.removesuffix("_kernel") for kernel in kernels] == [
        "norm_digits",
        "bounds_of_block",
        "best_of_candidates",
        "best_of_all",
    ]
    product = next(loop for loop in bounds.loops if any(map(loop.count, PRODUCTS[architecture])))
    # A thread's share of 128 tokens' 128 weights is 128 of them; at 4.3 TB/s there is time for 7 instructions each.
    assert product.instructions / 128 < 2
    assert not product.count("I2F"), "integers are multiplied as they are"
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x\w+)", bounds.ptx)) == {"0x10"}, "16 bytes each"
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x\w+)", candidates.ptx)) == {"0x10"}, "16 bytes each"


def test_its_scores_are_computed_as_samples_are() -> None:
    """To the bit, for the compiler has the same operations on floats in both, and contracts the same ones."""
    theirs = compiled(Job("sample", 90))[1]
    ours = compiled(Job("sample_certified", 90, rows=8))[2]
    assert Counter(FLOATS.findall(ours.ptx)) == Counter(FLOATS.findall(theirs.ptx))
    for opcode in ("FFMA", "FADD", "FMUL", "MUFU", "HGMMA"):
        assert Loop(ours.opcodes).count(opcode) == Loop(theirs.opcodes).count(opcode), opcode
