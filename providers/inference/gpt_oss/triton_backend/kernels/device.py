"""What kernels share: where they run, products that are right everywhere, and launches that overlap.

A kernel gets `interpreted` and `dependent` as constants. Interpreted (on a CPU, by numpy) bfloat16 products are wrong
without a word, inline assembly does not exist, and nothing can wait for another kernel.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from functools import cache
from typing import Any, Final, cast

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: Final = bool(cast("Any", triton).knobs.runtime.interpret)
"""Whether kernels run on a CPU. Decided by TRITON_INTERPRET when triton is first imported."""

MIN_DEPENDENT_CAPABILITY: Final = 90
"""Compute capability from which a kernel may begin while the one before it ends."""


def architecture() -> int:
    """The current device's compute capability: 80, 90, 100, ..."""
    return _architecture(cast("Any", triton).runtime.driver.active.get_current_device())


@cache
def _architecture(device: int) -> int:
    """Asked once: launches that are no graph's are hundreds a step, and each would ask."""
    return int(cast("Any", triton).runtime.driver.active.get_current_target().arch)


def launch_options(warps: int, stages: int = 1) -> dict[str, Any]:
    """What every launch passes on: its size, and the constant `dependent`, that it may begin before the last ended."""
    if INTERPRETED or architecture() < MIN_DEPENDENT_CAPABILITY:
        return {"num_warps": warps, "num_stages": stages, "dependent": False}
    return {"num_warps": warps, "num_stages": stages, "dependent": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(dependent: tl.constexpr):
    """Before the first read of what a kernel before this one wrote, and the first write. Weights may be read sooner."""
    if dependent:
        gdc_wait()


@triton.jit
def release_next_kernel(dependent: tl.constexpr):
    """The next kernel may be launched: it waits for this one's end by itself. Best right behind the wait."""
    if dependent:
        gdc_launch_dependents()


@triton.jit
def dot(left, right, total, interpreted: tl.constexpr):
    """`total` and the product of `left` and `right`, summed in float32."""
    if interpreted:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def is_last_arrival(arrivals, expected_arrivals):
    """Whether this is the last of `wanted` CTAs to come here: it may read what the others stored before they came.

    `arrivals` is one counter, zero before and again behind it. Every thread must come.
    """
    # The barrier puts the stores of all threads before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == expected_arrivals - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def round_to_type(numbers, kind: tl.constexpr, interpreted: tl.constexpr):
    """Float32 `numbers` as numbers of type `kind`, to the nearest. Interpreted, `.to(tl.bfloat16)` (and a store of
    float32 to a pointer of bfloat16) cuts off instead."""
    if interpreted and kind == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + (bits >> 16 & 1)
        # What is no number stays none, though the sum might carry over to zero.
        none = (bits & 0x7FFFFFFF) > 0x7F800000
        kept = tl.where(none, bits | 0x400000, even) >> 16
        return kept.to(tl.uint16).to(kind, bitcast=True)
    return numbers.to(kind)
