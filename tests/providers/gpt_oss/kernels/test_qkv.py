"""Kernel 1, to queries, keys and values: as its reference says, and within its numbers."""

import re

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.qkv import qkv
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer
from tests.providers.gpt_oss.kernels.comparing import Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, check
from tests.support.models.kernel_references import fill_input, qkv_reference, rms_norm
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

OUTPUTS = ["queries", "keys", "values", "normed_hidden"]
POISONED = ["queries", "normed_hidden"]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = tiny_spec_with(layers=TINY.layers[:2], hidden=96, intermediate=32, heads=12, kv_heads=4)


def norming_reference(layer: Layer, step: StepBuffers) -> None:
    """Runs `qkv_reference` and stores the norm, as the launch function does."""
    qkv_reference(layer, step)
    step.normed_hidden.copy_(rms_norm(step.hidden, layer.attention_norm, layer.spec.norm_eps))


KERNELS = (qkv, norming_reference)


@BOTH
def test_the_kernel_equals_its_reference(dtype: torch.dtype) -> None:
    case = make_case(Shape(sequences=((0, 1), (14, 1), (15, 1), (16, 1), (100, 1), (3, 7)), dtype=dtype))
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


@BOTH
@pytest.mark.parametrize("place", [0, 3000])
def test_one_row(dtype: torch.dtype, place: int) -> None:
    case = make_case(Shape(sequences=((place, 1),), padding=0, dtype=dtype))
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


@BOTH
def test_tiles_of_32_rows(dtype: torch.dtype) -> None:
    case = make_case(Shape(sequences=((5, 1), (13, 30)), padding=1, dtype=dtype))
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


@pytest.mark.parametrize(("rows", "dtype"), [(33, torch.bfloat16), (129, torch.float32)])
def test_tiles_of_64_and_128_rows(dtype: torch.dtype, rows: int) -> None:
    case = make_case(Shape(sequences=((5, 1), (13, rows - 2)), padding=1, dtype=dtype))
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


@pytest.mark.parametrize("rows", [7, 40])
def test_odd_shapes(rows: int) -> None:
    case = make_case(Shape(sequences=((5, 1), (13, rows - 1)), padding=0, spec=ODD))
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


def test_several_rows_of_one_slot() -> None:
    case = make_case(Shape(sequences=((40, 1), (3, 1), (3, 1), (3, 1)), padding=1))
    fill_input(case.step, "slots", [4, 4, 4, 3])
    fill_input(case.step, "positions", [14, 15, 16, 3])
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


def test_rows_of_padding_may_hold_anything() -> None:
    case = make_case(Shape(padding=3))
    case.step.hidden[case.step.positions < 0] = torch.nan
    assert_same(case, KERNELS, OUTPUTS, poisoned=POISONED)


BUDGETS = {
    (80, 1): Budget(registers=80, shared_bytes=61_440, instructions=640),
    (90, 1): Budget(registers=72, shared_bytes=71_680, instructions=720),
    (100, 1): Budget(registers=72, shared_bytes=71_700, instructions=860),
    (80, 32): Budget(registers=80, shared_bytes=61_440, instructions=800),
    (90, 32): Budget(registers=72, shared_bytes=73_728, instructions=820),
    (100, 32): Budget(registers=72, shared_bytes=73_800, instructions=960),
    (80, 128): Budget(registers=104, shared_bytes=65_536, instructions=940),
    (90, 128): Budget(registers=80, shared_bytes=81_920, instructions=940),
    (100, 128): Budget(registers=80, shared_bytes=82_000, instructions=1_060),
    (80, 2048): Budget(registers=176, shared_bytes=65_536, instructions=1_250),
    (90, 2048): Budget(registers=128, shared_bytes=98_304, instructions=1_100),
    (100, 2048): Budget(registers=128, shared_bytes=98_400, instructions=1_220),
}
"""With 2,048 rows two CTAs are to be on a multiprocessor: 128 registers for 2 x 8 warps, and half of shared memory."""


@pytest.mark.parametrize(("architecture", "rows"), BUDGETS)
def test_the_kernel_is_within_its_budget(architecture: int, rows: int) -> None:
    kernels = check(Job("qkv", architecture, rows, singles=rows <= 128), BUDGETS[architecture, rows])
    product = kernels[-1]
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", product.ptx)
    if rows == 1:
        # A thread multiplies 32 weights each time: at 4.3 TB/s, 15 instructions are all that a weight may take.
        assert product.main_loop.instructions <= 9 * 32
        assert ("cp.async.bulk.prefetch.L2" in product.ptx) == (architecture >= 90)
    if rows >= 128 and architecture == 90:
        assert product.main_loop.count("HGMMA") == 4
        assert product.main_loop.instructions <= 125
        assert "st.global.v4" in product.ptx
    if rows >= 128 and architecture == 100:
        assert product.ptx.count("tcgen05.mma")
