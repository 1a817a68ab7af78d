"""What the experts' kernels share: whose pairs a CTA computes, weights from packed words, and products of them.

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
from providers.inference.gpt_oss.triton_backend.kernels.buffers import Step
from providers.inference.gpt_oss.triton_backend.kernels.device import INTERPRETED, architecture, dot, options
from providers.inference.gpt_oss.triton_backend.kernels.layout import TILE_ROWS

_CODES: Final = tl.constexpr("""
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

_FACTORS: Final = tl.constexpr("""
{
.reg .b32 t;
shl.b32 t, $2, 7;
and.b32 $0, t, 0x7F807F80;
shr.u32 t, $2, 1;
and.b32 $1, t, 0x7F807F80;
}
""")


@dataclass(frozen=True)
class Cut:
    """What one CTA computes: `high` tiles of outputs of `wide` pairs, `together` tiles of inputs at a time; or, when
    `alone`, of one pair, in one column of `wide`. When it is to `finish`, whoever comes last to a row sums its experts.
    From sm_90 on a thread has at most so many `registers`: one CTA more runs on a multiprocessor then.
    """

    wide: int
    high: int
    together: int
    warps: int
    stages: int
    alone: bool = False
    finish: bool = True
    registers: int | None = None

    def groups(self, outputs: int) -> int:
        """CTAs for so many outputs."""
        return -(-outputs // (TILE_ROWS * self.high))

    def tiles(self, step: Step, spec: ModelSpec) -> int:
        """Tiles of a step's pairs, at most, however they fall on the experts."""
        pairs = step.chosen.numel()
        if self.alone:
            return pairs
        busy = min(pairs, spec.experts)
        return busy + (pairs - busy) // self.wide

    def constants(self) -> dict[str, Any]:
        """What a kernel is told of it."""
        shape = {"alone": self.alone, "wide": self.wide, "high": self.high, "together": self.together}
        limited = not INTERPRETED and architecture() >= 90
        limits = {"maxnreg": self.registers if limited else None}
        return shape | limits | {"interpreted": INTERPRETED} | options(self.warps, self.stages)


ALONE: Final = Cut(wide=8, high=1, together=4, warps=4, stages=3, alone=True)

_GROUPED: Final = (
    Cut(wide=16, high=1, together=4, warps=4, stages=3),
    Cut(wide=32, high=1, together=4, warps=4, stages=3, registers=160),
    Cut(wide=64, high=2, together=1, warps=8, stages=5, finish=False, registers=128),
    Cut(wide=128, high=2, together=1, warps=8, stages=4, finish=False),
)
"""By width. Scales are not read ahead where a turn has just 2 bytes of them for each thread: take another cut then."""


def cut_for(step: Step, spec: ModelSpec) -> Cut:
    """Wide enough that the experts of a step read their weights once, if none has twice its part of the pairs."""
    wanted = 2 * step.chosen.numel() // spec.experts
    return next((cut for cut in _GROUPED if wanted <= cut.wide), _GROUPED[-1])


@triton.jit
def pairs_of(  # noqa: PLR0913, PLR0917 - a kernel
    chosen, order, starts, tile, experts: tl.constexpr, wide: tl.constexpr, alone: tl.constexpr
):
    """The expert of a tile of pairs (-1: there is no such tile), its pairs [wide] and which of those are its own; the
    others name one of its own too."""
    columns = tl.arange(0, wide)
    if alone:
        expert = tl.load(chosen + tile)
        pairs = tile + columns * 0
        wanted = columns < 1
    else:
        block: tl.constexpr = triton.next_power_of_2(experts)
        numbers = tl.arange(0, block)
        there = numbers < experts
        begins = tl.load(starts + numbers, there, other=0)
        ends = tl.load(starts + numbers + 1, there, other=0)
        tiles = (ends - begins + wide - 1) // wide
        expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(numbers < expert, tiles, 0), 0)
        mine = numbers == expert
        first = tl.sum(tl.where(mine, begins, 0), 0) + (tile - before) * wide
        behind = tl.sum(tl.where(mine, ends, 0), 0)
        expert = tl.where(expert < experts, expert, -1)
        wanted = first + columns < behind
        pairs = tl.load(order + tl.maximum(tl.minimum(first + columns, behind - 1), 0))
    return expert, pairs, wanted


@triton.jit
def codes(words, interpreted: tl.constexpr):
    """The four codes of each word, as numbers that are 2 ** -126 times too small.

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
        _CODES, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def factors(scales, interpreted: tl.constexpr):
    """What to multiply by, 2 ** 126 times too large: of a row's first 32 inputs, and of the other ones."""
    if interpreted:
        scales = scales.to(tl.uint16, bitcast=True).to(tl.uint32)
        low = ((scales << 7 & 0x7F80) << 16).to(tl.float32, bitcast=True)
        return low, ((scales >> 1 & 0x7F80) << 16).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(_FACTORS, "=r,=r,r", [scales], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def unpacked(words, scales, high: tl.constexpr, together: tl.constexpr, interpreted: tl.constexpr):
    """Weights [64 * high, 64 * together] of words [high, 1024 * together] and scales [high, 64 * together].

    In each 16 rows those of even number come first."""
    rows: tl.constexpr = 64 * high
    # From high, together, w, g, c21, c3, h, c0 (see `layout`) to rows high, w, h, g and columns together, c3, c21, c0.
    words = words.reshape(high, together, 4, 8, 4, 2, 2, 2).permute(0, 2, 6, 3, 1, 5, 4, 7)
    code0, code1, code2, code3 = codes(words.reshape(rows, 16 * together), interpreted)
    scales = scales.reshape(high, together, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(rows, together)
    low, top = factors(scales, interpreted)
    low = low[:, :, None].broadcast_to(rows, together, 16).reshape(rows, 16 * together)
    top = top[:, :, None].broadcast_to(rows, together, 16).reshape(rows, 16 * together)
    # The last two dimensions are the bits of k, low one first.
    weights = tl.join(tl.join(code0 * low, code2 * top), tl.join(code1 * low, code3 * top))
    weights = weights.reshape(rows, together, 16, 2, 2).permute(0, 1, 3, 4, 2)
    return weights.reshape(rows, 64 * together)


@triton.jit
def product(  # noqa: PLR0913, PLR0917 - a kernel
    values,
    scales,
    tiles,
    inputs,
    wanted,
    part,
    parts: tl.constexpr,
    depth: tl.constexpr,
    wide: tl.constexpr,
    high: tl.constexpr,
    together: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Sums [64 * high, wide] of weights times inputs, in float32.

    `tiles` [high] are rows of tiles, counted over all experts; `inputs` [wide] point to the `depth` numbers of each
    column, of which those not `wanted` give anything that is finite. Of `parts` this is the sum over one part.
    """
    rows: tl.constexpr = (depth + 63) // 64
    loops: tl.constexpr = depth // (64 * together)
    each: tl.constexpr = (loops + parts - 1) // parts
    rest: tl.constexpr = triton.next_power_of_2(rows - loops * together)
    values += tiles.to(tl.int64)[:, None] * (rows * 1024)
    scales += tiles.to(tl.int64)[:, None] * (rows * 64)
    total = tl.zeros([64 * high, wide], tl.float32)
    if loops * 64 * together < depth:
        # Read before the loop and used behind it, that nobody waits for it.
        mine = (part + 1) // parts * (rows - loops * together)
        word, scale, number = tl.arange(0, rest * 1024), tl.arange(0, rest * 64), tl.arange(0, rest * 64)
        last_words = tl.load(values + loops * together * 1024 + word[None, :], (word < mine * 1024)[None, :], other=0)
        last_scales = tl.load(scales + loops * together * 64 + scale[None, :], (scale < mine * 64)[None, :], other=0)
        number += loops * together * 64
        last_inputs = tl.load(inputs[None, :] + number[:, None], (number < depth)[:, None] & wanted[None, :], other=0)
    word, scale, number = tl.arange(0, together * 1024), tl.arange(0, together * 64), tl.arange(0, together * 64)
    for step in range(each):
        # Every part has as many steps, or the products would wait for each other: the last of the last may be empty.
        at = part * each + step
        read = inputs[None, :] + (at * (together * 64) + number)[:, None]
        if parts == 1:
            words = tl.load(values + (at * (together * 1024) + word)[None, :])
            marks = tl.load(scales + (at * (together * 64) + scale)[None, :])
            right = tl.load(read, wanted[None, :], other=0) if wide < 64 else tl.load(read)
        else:
            there = (loops - at) * (together * 1024)
            words = tl.load(values + (at * (together * 1024) + word)[None, :], (word < there)[None, :], other=0)
            marks = tl.load(scales + (at * (together * 64) + scale)[None, :], (scale < there)[None, :], other=0)
            right = tl.load(read, (number < there)[:, None] & wanted[None, :], other=0)
        left = unpacked(words, marks, high, together, interpreted)
        total = dot(left.to(right.dtype), right, total, interpreted)
    if loops * 64 * together < depth:
        left = unpacked(last_words, last_scales, high, rest, interpreted)
        total = dot(left.to(last_inputs.dtype), last_inputs, total, interpreted)
    return total.reshape(4 * high, 2, 8, wide).permute(0, 2, 1, 3).reshape(64 * high, wide)
