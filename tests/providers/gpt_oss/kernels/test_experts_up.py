"""Kernel 4 for few rows: as its reference says, and within its numbers."""

from dataclasses import replace

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.experts_up import experts_up
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import SINGLE_PAIR_TILING
from tests.providers.gpt_oss.kernels.comparing import Case, Shape, assert_same, choose, make_case
from tests.providers.gpt_oss.kernels.compiling import ARCHITECTURES, Budget, Job, check, multiplying
from tests.support.models.kernel_references import experts_up_reference
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = tiny_spec_with(hidden=96, intermediate=32, heads=12, kv_heads=4, experts=5, experts_per_token=3)
# Two turns of the inner loop and a rest.
DEEP = tiny_spec_with(hidden=576, intermediate=32, experts=3, experts_per_token=1)
BUDGETS = {
    80: Budget(registers=72, shared_bytes=26_624, instructions=740),
    90: Budget(registers=120, shared_bytes=30_720, instructions=800),
    100: Budget(registers=104, shared_bytes=30_736, instructions=1400),
}
# That a thread unpacks in one turn of the inner loop.
WEIGHTS = 4 * 64 * 64 // 128
# Instructions of integers for a weight. At 80 its 2 TB/s would allow 2.8, and Triton 3.7 takes 2.2: it orders operands
# of HMMA otherwise than words lie in memory.
INTEGER = {80: 2.3, 90: 2.1}


def same(case: Case) -> None:
    assert_same(case, (experts_up, experts_up_reference), ["inner"], poisoned=["inner"])


@BOTH
@pytest.mark.parametrize("rows", [1, 2])
def test_the_kernel_equals_its_reference(dtype: torch.dtype, rows: int) -> None:
    same(make_case(Shape(sequences=((3, 1),) * rows, padding=rows - 1, dtype=dtype)))


@BOTH
@pytest.mark.parametrize("spec", [ODD, DEEP], ids=["odd", "deep"])
def test_shapes_between_the_tiles(dtype: torch.dtype, spec: ModelSpec) -> None:
    same(make_case(Shape(sequences=((3, 1), (4, 1)), padding=0, dtype=dtype, spec=spec)))


def test_gates_and_linear_parts_are_clamped() -> None:
    case = make_case(Shape(sequences=((3, 1),), padding=0))
    case.step.normed_hidden.mul_(8)
    same(case)
    same(replace(case, layer=replace(case.layer, spec=replace(TINY, swiglu_limit=0.5, swiglu_alpha=2.0))))


def test_rows_of_padding_may_hold_anything() -> None:
    case = make_case(Shape(sequences=((3, 1),), padding=2))
    case.step.normed_hidden[case.step.positions < 0] = torch.nan
    same(case)
    choose(case.step, torch.zeros(3, 4, dtype=torch.int64))
    same(case)


def test_nan_stays_nan() -> None:
    case = make_case(Shape(sequences=((3, 1), (4, 1)), padding=0))
    case.step.normed_hidden[0, 5] = torch.nan
    same(case)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_is_within_its_budget(architecture: int) -> None:
    (kernel,) = check(Job("experts_up", architecture), BUDGETS[architecture])
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
