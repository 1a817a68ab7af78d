"""The sampling kernel: the reference's tokens, ties and rows without a choice, and within its numbers."""

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.sample import sample
from tests.providers.gpt_oss.kernels.comparing import ENDS_SHAPES, Case, Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, check
from tests.support.models.kernel_references import sample_reference

BUDGETS = {
    80: Budget(registers=128, shared_bytes=49_152, instructions=4100),
    90: Budget(registers=144, shared_bytes=73_728, instructions=4900),
    100: Budget(registers=136, shared_bytes=73_760, instructions=6200),
}
PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTC"}


def same(case: Case) -> None:
    assert_same(case, (sample, sample_reference), ["sampled_tokens", "last_tokens"], poisoned=["sampled_tokens"])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ENDS_SHAPES)
def test_the_kernel_equals_its_reference(shape: str, dtype: torch.dtype, seed: int) -> None:
    ends_shape = ENDS_SHAPES[shape]
    same(make_case(Shape(ends_shape.sequences, ends_shape.padding, spec=ends_shape.spec, dtype=dtype, seed=seed)))


def test_of_equal_scores_the_lowest_token_wins() -> None:
    case = make_case()
    case.step.tables.temperatures.zero_()
    case.ends.unembedding[200:] = case.ends.unembedding[100:156].clone()
    case.ends.unembedding[40:80] = case.ends.unembedding[0:40].clone()
    same(case)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_whose_logits_are_no_numbers_has_no_token() -> None:
    case = make_case(Shape(sequences=((2, 1),) * 8, padding=0))
    case.step.hidden[0] = torch.nan
    case.step.hidden[1] = torch.inf
    same(case)
    sample(case.ends, case.step)
    assert int(case.step.sampled_tokens[0]) == int(case.step.sampled_tokens[1]) == -1


def test_temperatures_near_nothing_are_greedy_and_large_ones_are_noise() -> None:
    case = make_case(Shape(sequences=((2, 1),) * 6, padding=0))
    case.step.tables.temperatures.copy_(torch.tensor([0, 9e-6, 2e-5, 1e-3, 1, 1e3, 1e30, 0.7]))
    same(case)


def test_nothing_but_padding_is_left_alone() -> None:
    case = make_case()
    case.step.sample_rows.fill_(-1)
    same(case)


@pytest.mark.parametrize(("architecture", "rows"), [(80, 128), (90, 1), (90, 128), (100, 128)])
def test_the_kernel_is_within_its_budget(architecture: int, rows: int) -> None:
    kernels = check(Job("sample", architecture, rows=rows), BUDGETS[architecture])
    assert [kernel.name for kernel in kernels] == ["norm_rows_kernel", "best_of_block_kernel", "best_of_all_kernel"]
    assert any(opcode.startswith(PRODUCTS[architecture]) for opcode in kernels[1].opcodes)
