"""`sample` for few rows, reading an int8 copy of the unembedding first: it returns `sample`'s own token, to the bit.

For most tokens half the bytes prove that they cannot win; those that could are computed by `sample`'s own tile, from
the true unembedding. Four kernels, none of which knows in advance how many tokens those are:

1. `norm_digits` norms the rows as `sample` does (the same code and bits), and cuts them into integers.
2. `bounds_of_block` gives every token a score that it cannot exceed, and its block of tokens one that one of them
   certainly reaches. The last CTA to end stores the highest of the latter, the `floor`.
3. `best_of_candidates` is `sample`'s kernel, on tokens whose bound is not below the floor. Other tokens are not read; a
   block that has none ends at once. With no certain score (flat logits, NaN) it is all of `sample`.
4. `best_of_all` is `sample`'s own.

Why it is right. w is a row of the unembedding, w = s q + e (see `narrow`). x is a normed row; u a power of two such
that |x| / u < 2 ** 14, n the integers nearest x / u, and r = x - u n, which float32 holds exactly. Then
    w x = s u (q n) + s q r + e x,  so  |w x - s u (q n)| <= |s q| |r| + |e| |x|          (Cauchy-Schwarz)
with |.| the length of a row. n = 256 c + f, of int8 c and f, so q n = 256 (q c) + q f, of int32 sums without rounding.
The logit of `sample` is w x summed in float32, which is off by at most K SUM_ERROR |w| |x|; `spreads` has that added to
|e|. The remaining error is rounding elsewhere: |x| and |r| are increased by 2 ** -10, more than sums of K < 4096
squares and the few operations after them lose; joining c and f, and turning a logit into a score, by a temperature and
noise, here and there, each get 2 ** -20 of the magnitudes (noise has an error of its own where it is near zero: its
magnitude counts as 1 more), several times float32's loss. Where numbers come near float32's end, or are NaN, the bound
is infinite: the token is computed, and `sampled_tokens` is -1 where `sample` sets it so.

So the floor is below or at the best score; every token that has the best score is computed, and the lowest wins.
How many are computed: of SmolLM2-135M's 49,152, over 310 states of chats, prose and code, greedy and at temperature 1,
a median of 3 to 8 and at most 166, that is 1 MB. (Int8 by itself would have chosen another token in 1 to 5 % of them.)

It pays while rows are few: it saves 579 MB, 135 us at 4.3 TB/s, of a step of 0.87 ms (one row) to 2.2 ms (eight rows of
20b). Digits of eight rows fill the 16 columns that a tensor core's tile has anyway, so eight cost no more than one. For
more rows the gain is below 5 %, and it is likelier that for one of them all must be read again.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.kernels.buffers import MAX_CERTIFIED_ROWS, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    is_last_arrival,
    launch_options,
    release_next_kernel,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.noise import BLOCK_TOKENS, gumbel_tile
from providers.inference.gpt_oss.triton_backend.kernels.sample import (
    GREEDY_BELOW,
    best_of_all_kernel,
    sample,
    store_best,
)
from providers.inference.gpt_oss.triton_backend.kernels.unembed import (
    choose_unembed_tiling,
    logits_tile,
    norm_row,
    normed_row_words,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights

DEPTH: Final = 128
MAX_MAGNITUDE: Final = tl.constexpr(2.0**126)
ROUNDING_ERROR: Final = tl.constexpr(2.0**-20)
LENGTH_MARGIN: Final = tl.constexpr(1 + 2.0**-10)
MIN_RADIUS: Final = tl.constexpr(2.0**-100)


@triton.jit
def norm_digits_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    normed, digits, units, hidden, weight, samples, eps, rows, width: tl.constexpr, block: tl.constexpr,
    interpreted: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """Norm the rows and store `digits` [rows, 2, width] int8: c and f, and `units` [3, rows]: u, |x| (infinite where x
    is not finite) and |r|."""
    place = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < width
    numbers = norm_row(normed, hidden, weight, samples, eps, width, block, interpreted, dependent).to(tl.float32)
    finite = tl.min((tl.abs(numbers) < float("inf")).to(tl.int32), 0) > 0
    numbers = tl.where(finite, numbers, 0.0)
    # The highest number's power of two, less 13; floats of an exponent and nothing else.
    exponent = tl.max(tl.abs(numbers), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent - 13, 27)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = numbers * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    nearest = tl.floor(scaled + 0.5)
    rest = scaled - nearest
    whole = nearest.to(tl.int32)
    coarse = (whole + 128) >> 8
    at = digits + place * (2 * width) + columns
    tl.store(at, coarse.to(tl.int8), inside)
    tl.store(at + width, (whole - (coarse << 8)).to(tl.int8), inside)
    # Squares too small for float32 count as 2 ** -40 of a unit's.
    long = unit * tl.sqrt(tl.sum(scaled * scaled) + 9.094947017729282e-13) * LENGTH_MARGIN
    short = unit * tl.sqrt(tl.sum(rest * rest) + 9.094947017729282e-13) * LENGTH_MARGIN
    tl.store(units + place, unit)
    tl.store(units + rows + place, tl.where(finite, long, float("inf")))
    tl.store(units + 2 * rows + place, short)


@triton.jit
def bounds_of_block_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    bounds, reached_scores, floors, arrivals, digits, units, codes, scales, spreads, lengths, samples, slots, positions,
    temperatures, seeds, rows, vocabulary, blocks: tl.constexpr, padded: tl.constexpr, width: tl.constexpr,
    tokens: tl.constexpr, padded_rows: tl.constexpr, depth: tl.constexpr, greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    block = tl.program_id(0)
    coarse, fine = integers_tile(digits, codes, block, rows, vocabulary, width, tokens, padded_rows, depth)
    token = block * tokens + tl.arange(0, tokens)
    exists = token < vocabulary
    scale = tl.load(scales + token, exists, other=0)[:, None]
    spread = tl.load(spreads + token, exists, other=1)[:, None]
    length = tl.load(lengths + token, exists, other=1)[:, None]
    row = tl.arange(0, padded_rows)
    row_exists = row < rows
    unit = tl.load(units + row, row_exists, other=0)[None, :]
    long = tl.load(units + rows + row, row_exists, other=1)[None, :]
    short = tl.load(units + 2 * rows + row, row_exists, other=0)[None, :]
    high = 256.0 * coarse.to(tl.float32)
    low = fine.to(tl.float32)
    middle = (high + low) * scale * unit
    joined = (tl.abs(high) + tl.abs(low)) * scale * unit
    radius = spread * long + length * short + joined * ROUNDING_ERROR + MIN_RADIUS
    sampled = tl.load(samples + row, row_exists, other=-1)
    live = sampled >= 0
    slot = tl.load(slots + sampled, live, other=0)
    place = tl.load(positions + sampled, live, other=0) + 1
    temperature = tl.load(temperatures + slot)
    greedy = temperature < greedy_below
    divisor = tl.where(greedy, 1.0, temperature)[None, :]
    noise = tl.where(greedy[None, :], 0.0, gumbel_tile(tl.load(seeds + slot), place, block, padded_rows))
    middle /= divisor
    radius /= divisor
    magnitude = tl.abs(middle) + radius + tl.where(greedy[None, :], 0.0, 1.0 + tl.abs(noise))
    certain = (length * long < MAX_MAGNITUDE) & (magnitude < MAX_MAGNITUDE)
    radius += magnitude * ROUNDING_ERROR
    middle += noise
    highest = tl.where(certain, middle + radius, float("inf"))
    tl.store(bounds + token[:, None] * rows + row[None, :], highest, exists[:, None] & row_exists[None, :])
    least = tl.where(certain & exists[:, None], middle - radius, -float("inf"))
    tl.store(reached_scores + block * rows + row, tl.max(least, axis=0), row_exists)
    if is_last_arrival(arrivals, blocks):
        all_blocks = tl.arange(0, padded)
        row_scores = reached_scores + all_blocks[:, None] * rows + row[None, :]
        reached = tl.load(row_scores, (all_blocks < blocks)[:, None] & row_exists[None, :], other=-float("inf"))
        tl.store(floors + row, tl.max(reached, axis=0), row_exists)


@triton.jit
def integers_tile(  # noqa: PLR0913, PLR0917 - a kernel's part
    digits, codes, block, rows, vocabulary, width: tl.constexpr, tokens: tl.constexpr, padded_rows: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """Return q c and q f, [tokens, padded_rows] int32 each; zero past the rows. A row's two digits are neighbouring
    columns."""
    token = tl.minimum(block * tokens + tl.arange(0, tokens), vocabulary - 1).to(tl.int64)
    column = tl.arange(0, 2 * padded_rows)
    deep = tl.arange(0, depth)
    lhs_places = codes + token[:, None] * width + deep[None, :]
    rhs_places = digits + column[None, :] * width + deep[:, None]
    total = tl.zeros([tokens, 2 * padded_rows], tl.int32)
    for start in range(0, width, depth):
        inside = start + deep < width
        lhs = tl.load(lhs_places + start, inside[None, :], other=0)
        rhs = tl.load(rhs_places + start, inside[:, None] & (column < 2 * rows)[None, :], other=0)
        total = tl.dot(lhs, rhs, total, out_dtype=tl.int32)
    return tl.split(tl.reshape(total, (tokens, padded_rows, 2)))


@triton.jit
def best_of_candidates_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    scores, best, bounds, floors, normed, unembedding, samples, slots, positions, temperatures, seeds, rows, vocabulary,
    width: tl.constexpr, tokens: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, greedy_below: tl.constexpr,
    interpreted: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    block = tl.program_id(1)
    token, row = block * tokens + tl.arange(0, tokens), tl.arange(0, columns)
    exists = token < vocabulary
    row_exists = row < rows
    live = tl.load(samples + row, row_exists, other=-1) >= 0
    floor = tl.load(floors + row, row_exists, other=0)
    bound = tl.load(bounds + token[:, None] * rows + row[None, :], exists[:, None] & row_exists[None, :], other=0)
    candidate = tl.max((exists[:, None] & live[None, :] & (bound >= floor[None, :])).to(tl.int32), axis=1) > 0
    if tl.max(candidate.to(tl.int32), axis=0) > 0:
        logits = logits_tile(
            normed,
            unembedding,
            block * tokens,
            0,
            rows,
            vocabulary,
            candidate,
            width,
            tokens,
            columns,
            depth,
            interpreted,
        )
        store_best(
            scores, best, logits, candidate, samples, slots, positions, temperatures, seeds, 0, block, rows, tokens,
            columns, greedy_below,
        )  # fmt: skip
    else:
        tl.store(scores + block * rows + row, tl.full([columns], -float("inf"), tl.float32), row < rows)


def sample_certified(ends: EndWeights, step: StepBuffers) -> None:
    """Do the work of `sample`, with equal results to the bit, overwriting `partials`. Without an int8 copy, and for
    more rows, it calls `sample`."""
    rows, spec, tables = len(step.sample_rows), ends.spec, step.tables
    narrow = ends.int8_unembedding
    if narrow is None or rows > MAX_CERTIFIED_ROWS:
        sample(ends, step)
        return
    grid, shape = choose_unembed_tiling(ends, step)
    blocks = grid[1]
    scratch = slice_scratch(ends, step)
    row = {"width": spec.hidden, "block": triton.next_power_of_2(spec.hidden), "interpreted": INTERPRETED}
    inputs = (step.hidden, ends.norm, step.sample_rows, spec.norm_eps, rows)
    norm_digits_kernel[(rows,)](
        scratch.normed_rows, scratch.digits, scratch.units, *inputs, **row, **launch_options(warps=4)
    )
    columns = (step.sample_rows, step.slots, step.positions, tables.temperatures, tables.seeds, rows, spec.vocabulary)
    copy = (narrow.codes, narrow.scales, narrow.spreads, narrow.lengths)
    tile = {"width": spec.hidden, "tokens": BLOCK_TOKENS, "padded_rows": MAX_CERTIFIED_ROWS, "depth": DEPTH}
    padded = triton.next_power_of_2(blocks)
    bounds_of_block_kernel[(blocks,)](
        scratch.bounds, scratch.reached_scores, scratch.floors, step.arrivals, scratch.digits, scratch.units, *copy,
        *columns,
        blocks=blocks, padded=padded, greedy_below=GREEDY_BELOW, **tile, **launch_options(warps=4, stages=5),
    )  # fmt: skip
    best_of_candidates_kernel[grid](
        scratch.scores, scratch.best_tokens, scratch.bounds, scratch.floors, scratch.normed_rows, ends.unembedding,
        *columns, greedy_below=GREEDY_BELOW, **shape,
    )  # fmt: skip
    outputs = (
        step.sampled_tokens,
        tables.last_tokens,
        scratch.scores,
        scratch.best_tokens,
        step.sample_rows,
        step.slots,
    )
    best_of_all_kernel[(rows,)](*outputs, rows, blocks=blocks, width=padded, **launch_options(warps=4))


@dataclass(frozen=True, slots=True)
class CertifiedScratch:
    """Intermediate results of the kernels, in `partials`, for S rows and V tokens in B blocks.

    normed_rows [S * hidden] of the model's type; digits [S, 2, hidden] int8; units [3, S]; floors [S]; bounds [V, S],
    of scores; reached_scores, scores [B, S]; best_tokens [B, S] int32.
    """

    normed_rows: Tensor
    digits: Tensor
    units: Tensor
    floors: Tensor
    bounds: Tensor
    reached_scores: Tensor
    scores: Tensor
    best_tokens: Tensor


def slice_scratch(ends: EndWeights, step: StepBuffers) -> CertifiedScratch:
    """Return the views of `partials`, in the order of the fields. Each begins at a multiple of 16 bytes."""
    rows, width, tokens = len(step.sample_rows), ends.spec.hidden, ends.spec.vocabulary
    blocks = choose_unembed_tiling(ends, step)[0][1]
    sizes = (normed_row_words(step, width), rows * width // 2, 3 * rows, rows, rows * tokens, *[rows * blocks] * 3)
    views: list[Tensor] = []
    at = 0
    for size in sizes:
        views.append(step.partials[at : at + size])
        at += -(-size // 4) * 4
    normed, digits, *rest, best = views
    return CertifiedScratch(normed.view(step.hidden.dtype), digits.view(torch.int8), *rest, best.view(torch.int32))
