"""The product inside qkv and project_out: rows of a weight with the step's tokens, in tiles.

The weight is the left operand, so that a single token wastes no more than the 16 columns of a tensor core's tile. While
there are few tokens tiles have the 64 rows that a warp group multiplies at once, and many loads are under way: on an
H200 that read faster than more CTAs of 16 or 32 rows. With many tokens, tiles are of the size that computes at full
rate.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import MAX_DECODE_ROWS
from providers.inference.gpt_oss.triton_backend.kernels.device import dot


@dataclass(frozen=True, slots=True)
class Tiling:
    """A CTA computes `outputs` rows of the weight for `tokens` tokens, `depth` inputs at a time."""

    outputs: int
    tokens: int
    depth: int
    warps: int
    stages: int

    def grid(self, outputs: int, rows: int) -> tuple[int, int]:
        """Return the grid. CTAs of the same tokens stand together: they are in flight at once, and read the same
        rows."""
        return triton.cdiv(outputs, self.outputs), triton.cdiv(rows, self.tokens)


def choose_tiling(rows: int, max_tokens: int) -> Tiling:
    """Return the tiling for `rows` tokens; in a decoding step a CTA takes at most `max_tokens` of them, 32 or 64."""
    if rows > MAX_DECODE_ROWS:
        return Tiling(128, 128, 64, warps=8, stages=3)
    tokens = min(max_tokens, 16 if rows <= 16 else 32 if rows <= 32 else 64)
    return Tiling(64, tokens, 64, warps=4, stages={16: 7, 32: 6, 64: 5}[tokens])


_PREFETCH_ASM: Final = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


@triton.jit
def prefetch_weights(weight, tile, size: tl.constexpr, dependent: tl.constexpr):
    """Prefetch the weight's numbers tile * size, ... + size into the cache that all CTAs share.

    To be called before `wait_for_inputs`: while the kernel before this one ends, memory would be idle.
    """
    numbers_each: tl.constexpr = size // 128
    bytes_each: tl.constexpr = numbers_each * weight.dtype.element_ty.primitive_bitwidth // 8
    if dependent and bytes_each % 16 == 0 and size % 128 == 0 and tl.program_id(1) == 0:
        at = (weight + tile * size + tl.arange(0, 128) * numbers_each).to(tl.int64)
        tl.inline_asm_elementwise(_PREFETCH_ASM, "=r,l,n", [at, bytes_each], tl.int32, False, 1)


@triton.jit
def dense_product(  # noqa: PLR0913, PLR0917 - a kernel's part
    weight,
    outputs,
    inputs,
    tokens,
    mask,
    width: tl.constexpr,
    depth: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Return [outputs, tokens], the weight's rows `outputs` with the rows `tokens` of `inputs`, both `width` wide; zero
    for tokens outside `mask`, whose numbers are not read."""
    total = tl.zeros([outputs.shape[0], tokens.shape[0]], tl.float32)
    weight_rows = weight + outputs[:, None] * width
    input_rows = inputs + tokens[None, :] * width
    for low in range(0, width, depth):
        k = low + tl.arange(0, depth)
        # Where the width is a multiple of the depth this is true for certain, and no mask remains of it.
        inside = (k < width) | (width % depth == 0)
        numbers = tl.load(input_rows + k[:, None], inside[:, None] & mask[None, :], other=0)
        total = dot(tl.load(weight_rows + k[None, :], inside[None, :], other=0), numbers, total, interpreted)
    return total
