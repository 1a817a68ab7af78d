"""Kernel 2 of several tokens: as its reference says, and within its numbers."""

import re

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.attend_prefill import attend_prefill
from tests.providers.gpt_oss.kernels.comparing import Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import ARCHITECTURES, Budget, Job, check
from tests.support.models.kernel_references import attend_prefill_reference
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = tiny_spec_with(layers=TINY.layers[:2], heads=12, kv_heads=4)
ALIKE = tiny_spec_with(layers=TINY.layers[:2], heads=4, kv_heads=4, head_dim=32)


def compare(shape: Shape) -> None:
    """Rows that no tile names are left alone."""
    assert_same(make_case(shape), (attend_prefill, attend_prefill_reference), ["attention_output"])


@BOTH
@pytest.mark.parametrize("window", [None, 16])
def test_the_kernel_equals_its_reference(dtype: torch.dtype, window: int | None) -> None:
    compare(Shape(sequences=((5, 1), (0, 2), (0, 16), (15, 17), (300, 5)), dtype=dtype, window=window))


def test_at_the_edges_of_blocks() -> None:
    compare(Shape(sequences=[(cached, 3) for cached in (47, 48, 61, 62, 63, 64, 127, 128)], padding=0))


def test_a_window_at_every_place_of_a_page() -> None:
    compare(Shape(sequences=[(50 + place, 2) for place in range(16)], window=16))


@pytest.mark.parametrize("window", [1, 128, 300])
def test_other_windows(window: int) -> None:
    compare(Shape(sequences=((3, 2), (120, 18), (500, 16)), window=window))


@pytest.mark.parametrize("spec", [ODD, ALIKE], ids=["three heads to a key", "one"])
def test_odd_shapes(spec: ModelSpec) -> None:
    compare(Shape(sequences=((3, 4), (70, 19)), spec=spec))


def test_tiles_of_padding_are_passed_over() -> None:
    case = make_case(Shape(sequences=((3, 4), (5, 3))))
    case.step.tiles[0, 1] = 0
    assert_same(case, (attend_prefill, attend_prefill_reference), ["attention_output"])


BUDGETS = {
    80: Budget(registers=200, shared_bytes=50_200, instructions=1_660),
    90: Budget(registers=128, shared_bytes=66_600, instructions=1_600),
    100: Budget(registers=160, shared_bytes=67_600, instructions=2_850),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_is_within_its_budget(architecture: int) -> None:
    """One kernel for full layers, one for sliding ones; on 90 two CTAs of each are on a multiprocessor."""
    kernels = check(Job("attend_prefill", architecture, 2048, singles=False), BUDGETS[architecture])
    assert len(kernels) == 2
    for kernel in kernels:
        assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", kernel.ptx)
        assert "st.global.v4" in kernel.ptx
    if architecture == 90:
        assert kernels[0].main_loop.count("HGMMA") == 8
        assert kernels[0].main_loop.instructions <= 380
    if architecture == 100:
        assert kernels[0].ptx.count("tcgen05.mma")
