"""Kernel 5 for few rows: as its reference says, the same every time, and within its numbers."""

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.experts_down import experts_down
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import SINGLE_PAIR_TILING
from tests.providers.gpt_oss.kernels.comparing import Case, Shape, assert_same, choose, copied, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, check, multiplying
from tests.support.models.kernel_references import experts_down_reference
from tests.support.models.random_checkpoints import tiny_spec_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = tiny_spec_with(hidden=96, intermediate=32, heads=12, kv_heads=4, experts=5, experts_per_token=3)
# Three turns of the inner loop and a rest: of two parts the second has an empty turn.
DEEP = tiny_spec_with(hidden=64, intermediate=800, experts=3, experts_per_token=2)
BUDGETS = {
    80: Budget(registers=76, shared_bytes=26_624, instructions=1000),
    90: Budget(registers=120, shared_bytes=30_720, instructions=1100),
    100: Budget(registers=128, shared_bytes=30_736, instructions=1700),
}
# That a thread unpacks in one turn of the inner loop.
WEIGHTS = 4 * 64 * 64 // 128
# Instructions of integers for a weight. At 80 its 2 TB/s would allow 2.8, and Triton 3.7 takes 2.2: it orders operands
# of HMMA otherwise than words lie in memory.
INTEGER = {80: 2.3, 90: 2.1}


def same(case: Case) -> None:
    assert_same(case, (experts_down, experts_down_reference), ["hidden"])


@BOTH
@pytest.mark.parametrize("rows", [1, 2])
def test_the_kernel_equals_its_reference(dtype: torch.dtype, rows: int) -> None:
    same(make_case(Shape(sequences=((3, 1),) * rows, padding=rows - 1, dtype=dtype)))


@BOTH
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("spec", [ODD, DEEP], ids=["odd", "deep"])
def test_shapes_between_the_tiles(dtype: torch.dtype, spec: ModelSpec, rows: int) -> None:
    same(make_case(Shape(sequences=((3, 1),) * rows, padding=0, dtype=dtype, spec=spec)))


def test_rows_of_padding_may_hold_anything() -> None:
    case = make_case(Shape(sequences=((3, 1),), padding=2))
    padding = case.step.positions < 0
    for filled in (case.step.hidden, case.step.inner, case.step.shares):
        filled[padding] = torch.nan
    same(case)
    choose(case.step, torch.tensor([[1, 2, 3, 0]]).repeat(3, 1))
    same(case)


def test_the_sum_has_the_same_bits_every_time_and_counts_from_zero() -> None:
    case = make_case(Shape(sequences=((3, 1), (5, 1)), padding=0, dtype=torch.bfloat16))
    first, again = copied(case.step), copied(case.step)
    for step in (first, again):
        experts_down(case.layer, step)
        assert not step.arrivals.any()
    assert torch.equal(first.hidden, again.hidden)


@pytest.mark.parametrize(("architecture", "rows"), [(80, 1), (90, 1), (90, 2), (100, 1)])
def test_the_kernel_is_within_its_budget(architecture: int, rows: int) -> None:
    (kernel,) = check(Job("experts_down", architecture, rows=rows), BUDGETS[architecture])
    product = multiplying(architecture, SINGLE_PAIR_TILING.pair_columns)
    assert sum(count for opcode, count in kernel.opcodes.items() if opcode.startswith(product)) >= 16
    if architecture == 100:
        return  # Its waits look like loops too.
    loop = kernel.main_loop
    assert loop.instructions <= 4.0 * WEIGHTS
    assert loop.integer <= INTEGER[architecture] * WEIGHTS
    assert loop.count("WARPGROUP.DEPBAR") <= 2, "products wait for each other"
    assert loop.count("LDGSTS.E.BYPASS.128") >= 4, "words are not read 16 bytes at a time, and ahead"
    assert loop.count("LDG.") == 0, "something is waited for in every turn"
