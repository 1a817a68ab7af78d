"""Kernels 4 and 5 for rows that share experts: equal to their references for every choice of the rows, and within their
budgets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.grouped_down import grouped_down
from providers.inference.gpt_oss.triton_backend.kernels.grouped_up import grouped_up
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import choose_expert_tiling
from tests.providers.gpt_oss.kernels.comparing import Case, Shape, assert_same, choose, make_case
from tests.providers.gpt_oss.kernels.compiling import OLD, Budget, Job, check, multiplying
from tests.support.models.kernel_references import grouped_down_reference, grouped_up_reference
from tests.support.models.random_checkpoints import tiny_spec_with


@dataclass(frozen=True)
class Grouped:
    """A kernel, its reference, what they make, of which `poisoned` is not also read, and a shape with which it has a
    turn of the inner loop and a rest."""

    pair: tuple[Callable[[Any, StepBuffers], None], Callable[[Any, StepBuffers], None]]
    outputs: Sequence[str]
    poisoned: Sequence[str]
    deep: ModelSpec

    def same(self, case: Case) -> None:
        assert_same(case, self.pair, self.outputs, poisoned=self.poisoned)


UP = Grouped(
    (grouped_up, grouped_up_reference),
    outputs=["inner"],
    poisoned=["inner"],
    deep=tiny_spec_with(hidden=320, intermediate=32, experts=3, experts_per_token=1),
)
DOWN = Grouped(
    (grouped_down, grouped_down_reference),
    outputs=["hidden"],
    poisoned=[],
    deep=tiny_spec_with(hidden=64, intermediate=320, experts=3, experts_per_token=1),
)
EACH = pytest.mark.parametrize("grouped", [UP, DOWN], ids=["up", "down"])
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = tiny_spec_with(hidden=96, intermediate=32, heads=12, kv_heads=4, experts=5, experts_per_token=3)
# So many experts that a tile of pairs is as narrow as it can be, though one of them may have more.
MANY = tiny_spec_with(intermediate=32, experts=32, experts_per_token=2)
BUDGETS = {
    ("grouped_up", 80, 32): Budget(registers=80, shared_bytes=35_840, instructions=1000),
    ("grouped_up", 80, 2048): Budget(registers=168, shared_bytes=62_208, instructions=1600),
    ("grouped_up", 90, 32): Budget(registers=120, shared_bytes=44_032, instructions=1000),
    ("grouped_up", 90, 128): Budget(registers=152, shared_bytes=70_656, instructions=1200),
    ("grouped_up", 90, 2048): Budget(registers=128, shared_bytes=78_592, instructions=1200),
    ("grouped_up", 100, 32): Budget(registers=128, shared_bytes=44_048, instructions=1600),
    ("grouped_up", 100, 2048): Budget(registers=116, shared_bytes=82_704, instructions=1500),
    ("grouped_down", 80, 32): Budget(registers=80, shared_bytes=35_840, instructions=1300),
    ("grouped_down", 80, 2048): Budget(registers=136, shared_bytes=50_176, instructions=740),
    ("grouped_down", 90, 32): Budget(registers=128, shared_bytes=44_032, instructions=1200),
    ("grouped_down", 90, 128): Budget(registers=152, shared_bytes=70_656, instructions=1700),
    ("grouped_down", 90, 2048): Budget(registers=112, shared_bytes=58_368, instructions=650),
    ("grouped_down", 100, 32): Budget(registers=128, shared_bytes=44_048, instructions=1900),
    ("grouped_down", 100, 2048): Budget(registers=96, shared_bytes=54_272, instructions=800),
}
# Instructions of integers for a weight. At 80 its 2 TB/s would allow 2.8, and Triton 3.7 takes 2.2: it orders operands
# of HMMA otherwise than words lie in memory.
INTEGER = {80: 2.3, 90: 2.1}


@EACH
@BOTH
@pytest.mark.parametrize("rows", [11, 30], ids=["16 wide", "32 wide"])
def test_the_kernel_equals_its_reference(grouped: Grouped, dtype: torch.dtype, rows: int) -> None:
    grouped.same(make_case(Shape(sequences=((0, 1), (15, 1), (3, rows - 4)), padding=2, dtype=dtype)))


@EACH
@BOTH
@pytest.mark.parametrize(("rows", "wide"), [(40, 64), (70, 128)])
def test_prefill_is_its_reference(grouped: Grouped, dtype: torch.dtype, rows: int, wide: int) -> None:
    spec = tiny_spec_with(hidden=64, intermediate=32, experts=2, experts_per_token=2)
    case = make_case(Shape(sequences=((0, 1), (3, rows - 2)), padding=1, dtype=dtype, spec=spec))
    assert choose_expert_tiling(case.step, spec).pair_columns == wide
    grouped.same(case)


@EACH
@BOTH
@pytest.mark.parametrize("odd", [True, False], ids=["odd", "deep"])
def test_shapes_between_the_tiles(grouped: Grouped, dtype: torch.dtype, odd: bool) -> None:
    spec = ODD if odd else grouped.deep
    grouped.same(make_case(Shape(sequences=((0, 1), (3, 9)), padding=1, dtype=dtype, spec=spec)))


@EACH
def test_prefill_of_shapes_between_the_tiles(grouped: Grouped) -> None:
    spec = tiny_spec_with(hidden=96, intermediate=96, heads=12, kv_heads=4, experts=2, experts_per_token=1)
    grouped.same(make_case(Shape(sequences=((3, 80),), padding=1, spec=spec)))


@EACH
@pytest.mark.parametrize(("expert", "rows"), [(0, 16), (31, 33)])
def test_one_expert_may_have_all_and_others_none(grouped: Grouped, expert: int, rows: int) -> None:
    """16 are all that a tile holds."""
    case = make_case(Shape(sequences=((3, rows),), padding=0, spec=MANY))
    choose(case.step, torch.tensor([[expert, 5]]).repeat(rows, 1))
    grouped.same(case)


@EACH
def test_rows_of_padding_may_hold_anything(grouped: Grouped) -> None:
    case = make_case(Shape(sequences=((3, 1), (4, 6)), padding=4))
    padding = case.step.positions < 0
    for filled in (case.step.hidden, case.step.normed_hidden, case.step.inner, case.step.shares):
        filled[padding] = torch.nan
    grouped.same(case)


@EACH
def test_nothing_but_padding_changes_nothing(grouped: Grouped) -> None:
    grouped.same(make_case(Shape(sequences=(), padding=5)))


@pytest.mark.parametrize(("kernel", "architecture", "rows"), BUDGETS)
def test_the_kernel_is_within_its_budget(kernel: str, architecture: int, rows: int) -> None:
    """16, 32 and, but for `grouped_down`, 128 wide: it is 64 wide in prefill."""
    job = Job(kernel, architecture, rows=rows, singles=rows <= 128)
    compiled, *_ = check(job, BUDGETS[kernel, architecture, rows])
    product = multiplying(architecture, 16)
    assert sum(count for opcode, count in compiled.opcodes.items() if opcode.startswith(product)) >= 4
    if architecture == 100:
        return  # Its waits look like loops too.
    loop = compiled.main_loop
    if rows <= 128:
        weights = 4 * 64 * 64 // 128
        assert loop.instructions <= 4.0 * weights
        assert loop.integer <= INTEGER[architecture] * weights
    assert OLD or loop.count("WARPGROUP.DEPBAR") <= 2, "products wait for each other"
    reads = 3 if (kernel, rows) == ("grouped_down", 2048) else 4
    assert loop.count("LDGSTS.E.BYPASS.128") >= reads, "words are not read 16 bytes at a time, and ahead"
    assert loop.count("LDG.") == 0, "something is waited for in every turn"
