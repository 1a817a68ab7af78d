"""Device differences that all kernels share: where they run, products that are right everywhere, and launches that
overlap.

A kernel gets `interpreted` and `dependent` as constants. Interpreted (on a CPU, by numpy) bfloat16 products are wrong
without an error, inline assembly does not exist, and nothing can wait for another kernel.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from functools import cache
from typing import Any, Final, cast

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: Final = bool(cast("Any", triton).knobs.runtime.interpret)
"""True if kernels run on a CPU. Decided by TRITON_INTERPRET when triton is first imported."""

MIN_DEPENDENT_CAPABILITY: Final = 90
"""Compute capability from which a kernel may begin while the one before it ends."""


def architecture() -> int:
    """Return the current device's compute capability: 80, 90, 100, ..."""
    return _architecture(cast("Any", triton).runtime.driver.active.get_current_device())


@cache
def _architecture(device: int) -> int:
    """Return the capability of `device`, cached: a step without a graph has hundreds of launches, and each needs it."""
    return int(cast("Any", triton).runtime.driver.active.get_current_target().arch)


def launch_options(warps: int, stages: int = 1) -> dict[str, Any]:
    """Return the options of every launch: its size, and the constant `dependent`, true if it may begin before the last
    one ended."""
    if INTERPRETED or architecture() < MIN_DEPENDENT_CAPABILITY:
        return {"num_warps": warps, "num_stages": stages, "dependent": False}
    return {"num_warps": warps, "num_stages": stages, "dependent": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(dependent: tl.constexpr):
    """Wait for the previous kernels. Required before the first read of their outputs and before the first write;
    weights may be read sooner."""
    if dependent:
        gdc_wait()


@triton.jit
def release_next_kernel(dependent: tl.constexpr):
    """Let the next kernel be launched: it waits for this one's end by itself. Best right after the wait."""
    if dependent:
        gdc_launch_dependents()


@triton.jit
def dot(lhs, rhs, total, interpreted: tl.constexpr):
    """Return `total` plus the product of `lhs` and `rhs`, summed in float32."""
    if interpreted:
        lhs = lhs.to(tl.float32)
        rhs = rhs.to(tl.float32)
    return tl.dot(lhs, rhs, total, input_precision="ieee")


@triton.jit
def is_last_arrival(arrivals, expected_arrivals):
    """Return true for the last of `expected_arrivals` CTAs that call this: it may read all that the others stored
    before.

    `arrivals` is one counter, zero before and zero again after. Every thread must call it.
    """
    # The barrier puts the stores of all threads before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == expected_arrivals - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def round_to_type(numbers, kind: tl.constexpr, interpreted: tl.constexpr):
    """Return float32 `numbers` as numbers of type `kind`, rounded to the nearest. Interpreted, `.to(tl.bfloat16)` (and
    a store of float32 to a pointer of bfloat16) cuts off instead."""
    if interpreted and kind == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + (bits >> 16 & 1)
        # NaN stays NaN, though the sum might carry over to zero.
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = tl.where(is_nan, bits | 0x400000, even) >> 16
        return rounded.to(tl.uint16).to(kind, bitcast=True)
    return numbers.to(kind)
