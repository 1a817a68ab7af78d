"""The root mean square norm that several kernels begin with, and a kernel that computes it alone.

Kernels that read few rows norm them themselves; for many rows the norm is quicker once, ahead of the product.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)


@triton.jit
def norm_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    normed,
    hidden,
    weight,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    columns = tl.arange(0, block)
    inside = columns < width
    factors = tl.load(weight + columns, inside, other=0)
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    row = tl.program_id(0).to(tl.int64) * width
    numbers = tl.load(hidden + row + columns, inside, other=0)
    wide = numbers.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(normed + row + columns, round_to_type(wide * scale * factors, numbers.dtype, interpreted), inside)


def norm_rows(output: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> None:
    """Launch the kernel: set `output` [T, hidden] to `rms_norm` of `hidden`."""
    rows, width = hidden.shape
    sizes = {"width": width, "block": triton.next_power_of_2(width)}
    norm_kernel[(rows,)](output, hidden, weight, eps, **sizes, interpreted=INTERPRETED, **launch_options(warps=4))
