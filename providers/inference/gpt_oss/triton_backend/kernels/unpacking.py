"""The experts' kernels' shared parts: the pairs of a CTA, weights from packed words, and products of them.

Weights are the left operand of a product: words lie in memory in the order of its registers (see `layout`), so that
unpacking moves nothing between threads. The right operand has a column for each pair of a row and an expert.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import INTERPRETED, architecture, dot, launch_options
from providers.inference.gpt_oss.triton_backend.kernels.layout import TILE_ROWS

_CODES_ASM: Final = tl.constexpr("""
{
.reg .b32 t, u;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t, $4, 3;
and.b32 $1, t, 0x81C081C0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x81C081C0;
shl.b32 t, $4, 1;
and.b32 u, t, 0x80008000;
shr.u32 t, $4, 3;
lop3.b32 u, t, 0x01800180, u, 0xEA;
shr.u32 t, $4, 7;
lop3.b32 $3, t, 0x00400040, u, 0xEA;
}
""")

_FACTORS_ASM: Final = tl.constexpr("""
{
.reg .b32 t;
shl.b32 t, $2, 7;
and.b32 $0, t, 0x7F807F80;
shr.u32 t, $2, 1;
and.b32 $1, t, 0x7F807F80;
}
""")


@dataclass(frozen=True)
class ExpertTiling:
    """The work of one CTA: `output_tiles` tiles of outputs for `pair_columns` pairs, `input_tiles` tiles of inputs at a
    time; or, with `single_pair`, for one pair, in one column of `pair_columns`. With `sums_experts`, the last CTA to
    arrive at a row sums its experts. From sm_90 on a thread has at most `max_registers` registers: one CTA more runs on
    a multiprocessor then."""

    pair_columns: int
    output_tiles: int
    input_tiles: int
    warps: int
    stages: int
    single_pair: bool = False
    sums_experts: bool = True
    max_registers: int | None = None

    def output_group_count(self, outputs: int) -> int:
        """Return the CTAs for `outputs` outputs."""
        return -(-outputs // (TILE_ROWS * self.output_tiles))

    def pair_tile_count(self, step: StepBuffers, spec: ModelSpec) -> int:
        """Return the most tiles that a step's pairs can take, for any distribution over the experts."""
        pairs = step.chosen_experts.numel()
        if self.single_pair:
            return pairs
        busy = min(pairs, spec.experts)
        return busy + (pairs - busy) // self.pair_columns

    def kernel_constants(self) -> dict[str, Any]:
        """Return the constants and launch options of a kernel with this tiling."""
        shape = {
            "single_pair": self.single_pair,
            "pair_columns": self.pair_columns,
            "output_tiles": self.output_tiles,
            "input_tiles": self.input_tiles,
        }
        limited = not INTERPRETED and architecture() >= 90
        limits = {"maxnreg": self.max_registers if limited else None}
        return shape | limits | {"interpreted": INTERPRETED} | launch_options(self.warps, self.stages)


SINGLE_PAIR_TILING: Final = ExpertTiling(
    pair_columns=8, output_tiles=1, input_tiles=4, warps=4, stages=3, single_pair=True
)

_DECODE_TILINGS: Final = (
    ExpertTiling(pair_columns=16, output_tiles=1, input_tiles=4, warps=4, stages=3),
    ExpertTiling(pair_columns=32, output_tiles=1, input_tiles=4, warps=4, stages=3, max_registers=160),
)
_PREFILL_TILINGS: Final = (
    ExpertTiling(
        pair_columns=64, output_tiles=2, input_tiles=1, warps=8, stages=5, sums_experts=False, max_registers=128
    ),
    ExpertTiling(pair_columns=128, output_tiles=2, input_tiles=1, warps=8, stages=4, sums_experts=False),
)
"""Sorted by `pair_columns`. Scales are not read ahead where an iteration has just 2 bytes of them for each thread:
choose another tiling then."""


def choose_expert_tiling(step: StepBuffers, spec: ModelSpec, max_columns: int = 128) -> ExpertTiling:
    """Return a tiling of at most `max_columns` columns. In a decoding step it is so wide that the experts read their
    weights once, if none has twice its part of the pairs; in prefill as wide as an expert's part can fill."""
    pairs = step.chosen_experts.numel() / spec.experts
    for tiling in _DECODE_TILINGS:
        if 2 * pairs <= tiling.pair_columns:
            return tiling
    narrow, wide = _PREFILL_TILINGS
    return wide if pairs > narrow.pair_columns and max_columns >= wide.pair_columns else narrow


@triton.jit
def load_tile_pairs(
    chosen_experts, order, starts, tile, experts: tl.constexpr, pair_columns: tl.constexpr, single_pair: tl.constexpr
):
    """Return the expert of a tile of pairs (-1: there is no such tile), its pairs [pair_columns] and a mask of those
    that are its own; the others name one of its own too."""
    columns = tl.arange(0, pair_columns)
    if single_pair:
        expert = tl.load(chosen_experts + tile)
        pairs = tile + columns * 0
        is_own = columns < 1
    else:
        block: tl.constexpr = triton.next_power_of_2(experts)
        numbers = tl.arange(0, block)
        exists = numbers < experts
        begins = tl.load(starts + numbers, exists, other=0)
        ends = tl.load(starts + numbers + 1, exists, other=0)
        tiles = (ends - begins + pair_columns - 1) // pair_columns
        expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(numbers < expert, tiles, 0), 0)
        mine = numbers == expert
        first = tl.sum(tl.where(mine, begins, 0), 0) + (tile - before) * pair_columns
        end = tl.sum(tl.where(mine, ends, 0), 0)
        expert = tl.where(expert < experts, expert, -1)
        is_own = first + columns < end
        pairs = tl.load(order + tl.maximum(tl.minimum(first + columns, end - 1), 0))
    return expert, pairs, is_own


@triton.jit
def unpack_codes(words, interpreted: tl.constexpr):
    """Return the four codes of each word, as numbers that are 2 ** -126 times too small.

    Interpreted they are float32, of the same bits: a conversion there makes zeros of the smallest.
    """
    if interpreted:
        words = words.to(tl.uint16, bitcast=True).to(tl.uint32)
        code0 = ((words & 0x81C0) << 16).to(tl.float32, bitcast=True)
        code1 = ((words << 3 & 0x81C0) << 16).to(tl.float32, bitcast=True)
        code2 = ((words << 6 & 0x81C0) << 16).to(tl.float32, bitcast=True)
        bits = (words << 1 & 0x8000) | (words >> 3 & 0x0180) | (words >> 7 & 0x0040)
        return code0, code1, code2, (bits << 16).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        _CODES_ASM, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def unpack_factors(scales, interpreted: tl.constexpr):
    """Return the factors, 2 ** 126 times too large: of a row's first 32 inputs, and of the other ones."""
    if interpreted:
        scales = scales.to(tl.uint16, bitcast=True).to(tl.uint32)
        low = ((scales << 7 & 0x7F80) << 16).to(tl.float32, bitcast=True)
        return low, ((scales >> 1 & 0x7F80) << 16).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        _FACTORS_ASM, "=r,=r,r", [scales], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def unpack_weights(words, scales, output_tiles: tl.constexpr, input_tiles: tl.constexpr, interpreted: tl.constexpr):
    """Return weights [64 * output_tiles, 64 * input_tiles] of words [output_tiles, 1024 * input_tiles] and scales
    [output_tiles, 64 * input_tiles].

    In each 16 rows those of even number come first.
    """
    rows: tl.constexpr = 64 * output_tiles
    # From output_tiles, input_tiles, w, g, c21, c3, h, c0 (see `layout`)
    # to rows output_tiles, w, h, g and columns input_tiles, c3, c21, c0.
    words = words.reshape(output_tiles, input_tiles, 4, 8, 4, 2, 2, 2).permute(0, 2, 6, 3, 1, 5, 4, 7)
    code0, code1, code2, code3 = unpack_codes(words.reshape(rows, 16 * input_tiles), interpreted)
    scales = scales.reshape(output_tiles, input_tiles, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(rows, input_tiles)
    low, top = unpack_factors(scales, interpreted)
    low = low[:, :, None].broadcast_to(rows, input_tiles, 16).reshape(rows, 16 * input_tiles)
    top = top[:, :, None].broadcast_to(rows, input_tiles, 16).reshape(rows, 16 * input_tiles)
    # The last two dimensions are the bits of k, low one first.
    weights = tl.join(tl.join(code0 * low, code2 * top), tl.join(code1 * low, code3 * top))
    weights = weights.reshape(rows, input_tiles, 16, 2, 2).permute(0, 1, 3, 4, 2)
    return weights.reshape(rows, 64 * input_tiles)


@triton.jit
def finish_product(total, interpreted: tl.constexpr):
    """Return `total`, a product's result, which is complete then: the loop's next operands may take its registers.

    The tensor cores of capability 9.0 read a left operand from registers while the loop goes on, and neither Triton nor
    ptxas keeps the next iteration from writing to them. A result that is read has been waited for.
    """
    if interpreted:
        return total
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], tl.float32, is_pure=True, pack=1)


@triton.jit
def expert_product(  # noqa: PLR0913, PLR0917 - a kernel
    values,
    scales,
    tiles,
    inputs,
    mask,
    part,
    parts: tl.constexpr,
    depth: tl.constexpr,
    pair_columns: tl.constexpr,
    output_tiles: tl.constexpr,
    input_tiles: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Return sums [64 * output_tiles, pair_columns] of weights times inputs, in float32.

    `tiles` [output_tiles] are rows of tiles, counted over all experts; `inputs` [pair_columns] point to the `depth`
    numbers of each column, of which those outside `mask` give anything that is finite. With several `parts` this is the
    sum over one part.
    """
    rows: tl.constexpr = (depth + 63) // 64
    loops: tl.constexpr = depth // (64 * input_tiles)
    steps: tl.constexpr = (loops + parts - 1) // parts
    rest: tl.constexpr = triton.next_power_of_2(rows - loops * input_tiles)
    values += tiles.to(tl.int64)[:, None] * (rows * 1024)
    scales += tiles.to(tl.int64)[:, None] * (rows * 64)
    total = tl.zeros([64 * output_tiles, pair_columns], tl.float32)
    if loops * 64 * input_tiles < depth:
        # Read before the loop and used after it, so that no product waits for it.
        mine = (part + 1) // parts * (rows - loops * input_tiles)
        word, scale, number = tl.arange(0, rest * 1024), tl.arange(0, rest * 64), tl.arange(0, rest * 64)
        last_words = tl.load(
            values + loops * input_tiles * 1024 + word[None, :], (word < mine * 1024)[None, :], other=0
        )
        last_scales = tl.load(scales + loops * input_tiles * 64 + scale[None, :], (scale < mine * 64)[None, :], other=0)
        number += loops * input_tiles * 64
        last_inputs = tl.load(inputs[None, :] + number[:, None], (number < depth)[:, None] & mask[None, :], other=0)
    word, scale, number = (
        tl.arange(0, input_tiles * 1024),
        tl.arange(0, input_tiles * 64),
        tl.arange(0, input_tiles * 64),
    )
    for step in range(steps):
        # Every part has as many steps, or the products would wait for each other: the last of the last may be empty.
        at = part * steps + step
        read = inputs[None, :] + (at * (input_tiles * 64) + number)[:, None]
        if parts == 1:
            words = tl.load(values + (at * (input_tiles * 1024) + word)[None, :])
            marks = tl.load(scales + (at * (input_tiles * 64) + scale)[None, :])
            rhs = tl.load(read, mask[None, :], other=0) if pair_columns < 64 else tl.load(read)
        else:
            there = (loops - at) * (input_tiles * 1024)
            words = tl.load(values + (at * (input_tiles * 1024) + word)[None, :], (word < there)[None, :], other=0)
            marks = tl.load(scales + (at * (input_tiles * 64) + scale)[None, :], (scale < there)[None, :], other=0)
            rhs = tl.load(read, (number < there)[:, None] & mask[None, :], other=0)
        weights = unpack_weights(words, marks, output_tiles, input_tiles, interpreted)
        total = finish_product(dot(weights.to(rhs.dtype), rhs, total, interpreted), interpreted)
    if loops * 64 * input_tiles < depth:
        weights = unpack_weights(last_words, last_scales, output_tiles, rest, interpreted)
        total = dot(weights.to(last_inputs.dtype), last_inputs, total, interpreted)
    return (
        total.reshape(4 * output_tiles, 2, 8, pair_columns).permute(0, 2, 1, 3).reshape(64 * output_tiles, pair_columns)
    )
