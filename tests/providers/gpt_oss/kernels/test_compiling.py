"""The compile gate sees what it is there for: orders that a card would not forgive, and which loop is the product's."""

from dataclasses import replace

import pytest

from tests.providers.gpt_oss.kernels.compiling import Compiled, Loop, check_operands, check_order

COUNTING = "st.global.b32; bar.sync 0; atom.global.gpu.acq_rel.add.u32; bar.sync 0; ld.global.b32;"
GOOD = Compiled(
    name="project_kernel",
    registers=64,
    shared_bytes=0,
    spills=0,
    opcodes={"LDC": 1, "STS": 1, "ACQBULK": 1, "PREEXIT": 1, "LDG.E.128": 4, "STG.E": 1},
    early={"LDC": 1, "STS": 1, "UBLKPF.L2": 1},
    loops=[Loop({"HMMA.16816.F32.BF16": 16, "LDSM": 40, "BRA": 1}), Loop({"FFMA": 64, "BRA": 1})],
    warps=4,
    ptx=COUNTING,
)


def test_a_right_kernel_passes() -> None:
    check_order(GOOD, free=False)
    check_order(replace(GOOD, early={"LDG.E.128": 4}), free=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(GOOD, early={"LDG.E.128": 1}), "before it has waited"),
        (replace(GOOD, early={"STG.E": 1}), "before it has waited"),
        (replace(GOOD, early={"LDGSTS.E.BYPASS.128": 1}), "before it has waited"),
        (replace(GOOD, early=GOOD.opcodes), "never waits"),
        (replace(GOOD, opcodes={"ACQBULK": 1}), "lets no other begin"),
        (replace(GOOD, ptx=COUNTING.replace("st.global.b32; bar.sync 0;", "st.global.b32;")), "without a barrier"),
    ],
)
def test_a_wrong_kernel_fails(wrong: Compiled, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_order(wrong, free=False)


def test_weights_may_be_read_early_and_nothing_may_be_written() -> None:
    with pytest.raises(AssertionError, match="before it has waited"):
        check_order(replace(GOOD, early={"STG.E": 1}), free=True)


def test_the_main_loop_is_the_tensor_cores() -> None:
    """Though another has more multiplications for its length."""
    assert GOOD.main_loop is GOOD.loops[0]
    assert replace(GOOD, loops=GOOD.loops[1:]).main_loop is GOOD.loops[1]


@pytest.mark.parametrize(
    ("operand", "pending", "right"),
    [("{%r5,%r6}", 0, True), ("{%r5,%r6}", 3, False), ("%rd1", 1, True)],
    ids=["registers, waited for", "registers, under way", "shared memory, under way"],
)
def test_registers_that_a_product_reads_are_not_written_to(operand: str, pending: int, right: bool) -> None:
    product = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{%r1,%r2}}, {operand}, %rd2, p, 1, 1, 1;"
    kernel = replace(GOOD, ptx=f"{product} wgmma.wait_group.sync.aligned {pending}; wgmma.wait_group.sync.aligned 0;")
    if right:
        check_operands(kernel)
    else:
        with pytest.raises(AssertionError, match="3 products under way"):
            check_operands(kernel)
