"""Kernel 3, from attention to the choice of experts: as its reference says, and within its numbers."""

import re
from typing import Literal

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.project_out import project_out
from tests.providers.gpt_oss.kernels.comparing import Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, check
from tests.support.models.kernel_references import project_out_reference
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
KERNELS = (project_out, project_out_reference)
MADE = ["normed_hidden", "chosen_experts", "shares"]
SORTED = [*MADE, "order", "starts"]
ODD = tiny_spec_with(layers=TINY.layers[:2], hidden=96, heads=12, kv_heads=4, experts=5, experts_per_token=3)
MANY = tiny_spec_with(layers=TINY.layers[:2], experts=128)


@BOTH
def test_the_kernel_equals_its_reference(dtype: torch.dtype) -> None:
    case = make_case(Shape(sequences=((0, 1), (15, 1), (16, 1), (100, 1), (3, 7)), dtype=dtype))
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


@BOTH
def test_one_row(dtype: torch.dtype) -> None:
    case = make_case(Shape(sequences=((31, 1),), padding=0, dtype=dtype))
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (20, torch.float32),
        pytest.param(34, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(128, torch.float32, marks=pytest.mark.long),
    ],
)
def test_the_other_tilings_of_decoding(dtype: torch.dtype, rows: int) -> None:
    case = make_case(Shape(sequences=[(3, 1)] * (rows - 5), padding=5, dtype=dtype))
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


def test_many_rows_are_sorted_elsewhere() -> None:
    case = make_case(Shape(sequences=((5, 1), (13, 128)), padding=1, dtype=torch.bfloat16))
    assert_same(case, KERNELS, ["hidden", *MADE], poisoned=MADE)


@pytest.mark.parametrize("rows", [6, 33])
def test_odd_shapes(rows: int) -> None:
    case = make_case(Shape(sequences=[(3, 1)] * (rows - 1), padding=1, spec=ODD))
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


@pytest.mark.parametrize("rows", [2, 5])
def test_many_experts(rows: int) -> None:
    """With so many, a CTA of the router takes several rows."""
    case = make_case(Shape(sequences=[(3, 1)] * (rows - 1), padding=1, spec=MANY))
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


def test_nothing_but_padding() -> None:
    case = make_case(Shape(sequences=(), padding=4))
    assert_same(case, KERNELS, ["chosen_experts", "order", "starts"], poisoned=SORTED)


def test_of_equal_scores_the_lower_expert_is_first() -> None:
    case = make_case(Shape(sequences=((3, 1), (4, 1), (5, 1)), padding=1))
    case.layer.router_weight.zero_()
    case.layer.router_bias.fill_(0.5)
    case.layer.router_bias[5] = 1
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


def test_rows_of_padding_may_hold_anything() -> None:
    case = make_case(Shape(padding=3))
    case.step.hidden[case.step.positions < 0] = torch.nan
    case.step.attention_output[case.step.positions < 0] = torch.nan
    assert_same(case, KERNELS, ["hidden", *SORTED], poisoned=SORTED)


BUDGETS = {
    ("20b", 80, 1): Budget(registers=160, shared_bytes=61_440, instructions=1_020),
    ("20b", 90, 1): Budget(registers=128, shared_bytes=71_680, instructions=1_020),
    ("20b", 100, 1): Budget(registers=160, shared_bytes=71_700, instructions=1_020),
    ("20b", 90, 32): Budget(registers=152, shared_bytes=73_728, instructions=1_260),
    ("20b", 90, 64): Budget(registers=152, shared_bytes=73_728, instructions=1_220),
    ("120b", 80, 128): Budget(registers=160, shared_bytes=65_536, instructions=2_220),
    ("120b", 90, 128): Budget(registers=152, shared_bytes=73_728, instructions=2_220),
    ("120b", 100, 128): Budget(registers=160, shared_bytes=82_000, instructions=2_080),
    ("120b", 80, 2048): Budget(registers=176, shared_bytes=65_536, instructions=1_360),
    ("120b", 90, 2048): Budget(registers=128, shared_bytes=98_304, instructions=1_300),
    ("120b", 100, 2048): Budget(registers=128, shared_bytes=98_400, instructions=1_300),
}


@pytest.mark.parametrize(("model", "architecture", "rows"), BUDGETS)
def test_the_kernel_is_within_its_budget(model: Literal["20b", "120b"], architecture: int, rows: int) -> None:
    job = Job("project_out", architecture, rows, singles=rows <= 128, model=model)
    kernels = check(job, BUDGETS[model, architecture, rows])
    assert len(kernels) == (2 if rows <= 128 else 3)
    project = kernels[0]
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", project.ptx)
    if rows == 1:
        assert project.main_loop.instructions <= 6 * 16
        assert ("cp.async.bulk.prefetch.L2" in project.ptx) == (architecture >= 90)
        # What waits for no kernel: the router's weights, 16 bytes at a time.
        before = kernels[1].ptx.split("griddepcontrol.wait")[0]
        assert architecture < 90 or before.count("ld.global.v4") >= 8
    if rows >= 128 and architecture == 90:
        assert project.main_loop.count("HGMMA") == 4
        assert project.main_loop.instructions <= 125
    if rows >= 128 and architecture == 100:
        assert project.ptx.count("tcgen05.mma")
