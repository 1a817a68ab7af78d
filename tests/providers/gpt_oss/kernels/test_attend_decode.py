"""Kernel 2 of single tokens: as its reference says, and within its numbers."""

import re

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.attend_decode import attend_decode
from tests.providers.gpt_oss.kernels.comparing import Shape, assert_same, make_case
from tests.providers.gpt_oss.kernels.compiling import ARCHITECTURES, OLD, Budget, Job, check
from tests.support.models.kernel_references import attend_decode_reference, fill_input
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
KERNELS = (attend_decode, attend_decode_reference)
ODD = tiny_spec_with(layers=TINY.layers[:2], heads=12, kv_heads=4)
ALIKE = tiny_spec_with(layers=TINY.layers[:2], heads=4, kv_heads=4, head_dim=32)


def compare(shape: Shape) -> None:
    assert_same(make_case(shape), KERNELS, ["attention_output"], poisoned=["attention_output"])


@BOTH
@pytest.mark.parametrize("window", [None, 16])
def test_the_kernel_equals_its_reference(dtype: torch.dtype, window: int | None) -> None:
    cached = ((0, 1), (14, 1), (15, 1), (16, 1), (100, 1), (63, 1), (64, 1))
    compare(Shape(sequences=cached, dtype=dtype, window=window))


@pytest.mark.parametrize("cached", [0, 63, 64, 700])
def test_one_row_in_parts(cached: int) -> None:
    compare(Shape(sequences=((cached, 1),), padding=0))


@BOTH
def test_one_row_in_20_parts_of_2_blocks(dtype: torch.dtype) -> None:
    compare(Shape(sequences=((2500, 1),), padding=0, dtype=dtype))


@pytest.mark.parametrize("low", [0, 90])
def test_a_window_at_every_place_of_a_page(low: int) -> None:
    compare(Shape(sequences=[(low + place, 1) for place in range(16)], window=16))


@pytest.mark.parametrize("window", [1, 128, 300])
def test_other_windows(window: int) -> None:
    compare(Shape(sequences=((3, 1), (127, 1), (128, 1), (200, 1), (500, 1)), window=window))


@pytest.mark.parametrize("spec", [ODD, ALIKE], ids=["three heads to a key", "one"])
def test_odd_shapes(spec: ModelSpec) -> None:
    compare(Shape(sequences=((3, 1), (40, 1), (300, 1)), spec=spec))


def test_several_rows_of_one_slot() -> None:
    """Rows of drafts: each sees those before it, and none after it."""
    case = make_case(Shape(sequences=((40, 1), (3, 1), (3, 1), (3, 1)), padding=1))
    fill_input(case.step, "slots", [5, 5, 5, 3])
    fill_input(case.step, "positions", [14, 15, 16, 3])
    assert_same(case, KERNELS, ["attention_output"], poisoned=["attention_output"])


def test_rows_after_the_singles_are_not_written() -> None:
    case = make_case(Shape(sequences=((40, 1), (3, 5)), padding=1))
    assert_same(case, KERNELS, ["attention_output"])


def test_nothing_but_padding() -> None:
    case = make_case(Shape(sequences=(), padding=3))
    assert_same(case, KERNELS, ["attention_output"], poisoned=["attention_output"])


BUDGETS = {
    80: Budget(registers=128, shared_bytes=38_912, instructions=1_320),
    90: Budget(registers=120, shared_bytes=38_912, instructions=1_320),
    100: Budget(registers=120, shared_bytes=38_912, instructions=1_300),
}


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_is_within_its_budget(architecture: int, rows: int) -> None:
    """One kernel for full layers, one for sliding ones."""
    kernels = check(Job("attend_decode", architecture, rows), BUDGETS[architecture])
    assert len(kernels) == 2
    for kernel in kernels:
        assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", kernel.ptx)
        assert kernel.main_loop.count("HMMA") == 16, "that is not the loop over keys"
        assert kernel.main_loop.count("LDG.") == 0, "something is waited for in every turn"
        # 64 keys and values, 16 KB: at 33 GB/s, which is a multiprocessor's share of memory, 4 x 850 issues.
        assert kernel.main_loop.instructions * kernel.warps <= (1_560 if OLD else 1_400)
