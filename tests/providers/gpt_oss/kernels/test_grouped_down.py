"""Kernel 5 for rows that share experts: as its reference says, whatever the rows chose, and within its numbers."""

import pytest
import torch

from providers.inference.gpt_oss.kernels.grouped_down import grouped_down, grouped_down_reference
from providers.inference.gpt_oss.spec import ModelSpec
from providers.inference.gpt_oss.synth import resized
from tests.providers.gpt_oss.kernels.comparing import Case, Shape, assert_same, choose, make_case
from tests.providers.gpt_oss.kernels.compiling import Budget, Job, check

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = resized(hidden=96, intermediate=32, heads=12, kv_heads=4, experts=5, experts_per_token=3)
# A turn of the inner loop and a rest.
DEEP = resized(hidden=64, intermediate=320, experts=3, experts_per_token=1)
# So many experts that a tile of pairs is as narrow as it can be, though one of them may have more.
MANY = resized(intermediate=32, experts=32, experts_per_token=2)
BUDGETS = {
    (80, 32): Budget(registers=80, shared_bytes=35_840, instructions=1300),
    (80, 2048): Budget(registers=188, shared_bytes=62_208, instructions=1200),
    (90, 32): Budget(registers=128, shared_bytes=44_032, instructions=1200),
    (90, 128): Budget(registers=152, shared_bytes=70_656, instructions=1700),
    (90, 2048): Budget(registers=184, shared_bytes=78_592, instructions=900),
    (100, 32): Budget(registers=128, shared_bytes=44_048, instructions=1900),
    (100, 2048): Budget(registers=116, shared_bytes=82_704, instructions=1200),
}
PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# Instructions of integers for a weight. At 80 its 2 TB/s would allow 2.8, and Triton 3.7 takes 2.2: it orders operands
# of HMMA otherwise than words lie in memory.
INTEGER = {80: 2.3, 90: 2.1}


def same(case: Case) -> None:
    assert_same(case, (grouped_down, grouped_down_reference), ["hidden"])


@BOTH
@pytest.mark.parametrize("rows", [11, 30], ids=["16 wide", "32 wide"])
def test_it_is_its_reference(dtype: torch.dtype, rows: int) -> None:
    same(make_case(Shape(sequences=((0, 1), (15, 1), (3, rows - 4)), padding=2, dtype=dtype)))


@BOTH
@pytest.mark.parametrize("rows", [40, 70], ids=["64 wide", "128 wide"])
def test_prefill_is_its_reference(dtype: torch.dtype, rows: int) -> None:
    spec = resized(hidden=64, intermediate=32)
    same(make_case(Shape(sequences=((0, 1), (3, rows - 2)), padding=1, dtype=dtype, spec=spec)))


@BOTH
@pytest.mark.parametrize("spec", [ODD, DEEP], ids=["odd", "deep"])
def test_shapes_beside_the_tiles(dtype: torch.dtype, spec: ModelSpec) -> None:
    same(make_case(Shape(sequences=((0, 1), (3, 9)), padding=1, dtype=dtype, spec=spec)))


def test_prefill_of_shapes_beside_the_tiles() -> None:
    spec = resized(hidden=96, intermediate=96, heads=12, kv_heads=4, experts=2, experts_per_token=1)
    same(make_case(Shape(sequences=((3, 80),), padding=1, spec=spec)))


@pytest.mark.parametrize("expert", [0, 31])
def test_one_expert_may_have_all_and_others_none(expert: int) -> None:
    """16 are all that a tile holds."""
    for rows in (16, 33):
        case = make_case(Shape(sequences=((3, rows),), padding=0, spec=MANY))
        choose(case.step, torch.tensor([[expert, 5]]).repeat(rows, 1))
        same(case)


def test_rows_of_padding_may_hold_anything() -> None:
    case = make_case(Shape(sequences=((3, 1), (4, 6)), padding=4))
    padding = case.step.positions < 0
    for filled in (case.step.hidden, case.step.normed, case.step.inner, case.step.shares):
        filled[padding] = torch.nan
    same(case)


def test_nothing_but_padding_changes_nothing() -> None:
    same(make_case(Shape(sequences=(), padding=5)))


@pytest.mark.parametrize(("architecture", "rows"), BUDGETS)
def test_it_is_within_its_budget(architecture: int, rows: int) -> None:
    """16, 32 and 128 wide."""
    kernel, *_ = check(Job("grouped_down", architecture, rows=rows, singles=rows <= 128), BUDGETS[architecture, rows])
    assert sum(count for opcode, count in kernel.opcodes.items() if opcode.startswith(PRODUCTS[architecture])) >= 4
    if architecture == 100:
        return  # Its waits look like loops too.
    loop = kernel.main_loop
    if rows <= 128:
        weights = 4 * 64 * 64 // 128
        assert loop.instructions <= 4.0 * weights
        assert loop.integer <= INTEGER[architecture] * weights
    assert loop.count("WARPGROUP.DEPBAR") <= 2, "products wait for each other"
    assert loop.count("LDGSTS.E.BYPASS.128") >= 4, "words are not read 16 bytes at a time, and ahead"
    assert loop.count("LDG.") == 0, "something is waited for in every turn"
