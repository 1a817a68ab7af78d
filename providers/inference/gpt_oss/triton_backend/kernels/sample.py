"""The final norm, the unembedding and the choice of a token in one: no row of logits is ever written.

Every CTA stores the best score of its rows of the unembedding and its token in the scratch memory; a last small kernel
chooses the best of all, and stores it where the next step reads its token. A score is the logit over the temperature,
plus Gumbel noise; of equals the lowest token wins. Temperatures below GREEDY_BELOW have the logits alone.

Must meet, against the reference: the same token wherever the two best scores are further apart than 2e-6 (float32) or
4e-3 (bfloat16) of the largest logit. At one row it reads 1,158 MB: 269 us at 4.3 TB/s, to be done within 85 % of that.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import Final

import torch
import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    launch_options,
    release_next_kernel,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.noise import gumbel_tile
from providers.inference.gpt_oss.triton_backend.kernels.unembed import (
    choose_unembed_tiling,
    logits_tile,
    norm_sampled_rows,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights

GREEDY_BELOW: Final = 1e-5


@triton.jit
def best_of_block_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    scores, best, normed, unembedding, samples, slots, positions, temperatures, seeds, rows, vocabulary,
    width: tl.constexpr, tokens: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, greedy_below: tl.constexpr,
    interpreted: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    first_row, block = tl.program_id(0) * columns, tl.program_id(1)
    logits = logits_tile(
        normed, unembedding, block * tokens, first_row, rows, vocabulary, None, width, tokens, columns, depth,
        interpreted,
    )  # fmt: skip
    exists = block * tokens + tl.arange(0, tokens) < vocabulary
    store_best(
        scores, best, logits, exists, samples, slots, positions, temperatures, seeds, first_row, block, rows, tokens,
        columns, greedy_below,
    )  # fmt: skip


@triton.jit
def store_best(  # noqa: PLR0913, PLR0917 - a kernel's part
    scores, best, logits, mask, samples, slots, positions, temperatures, seeds, first_row, block, rows,
    tokens: tl.constexpr, columns: tl.constexpr, greedy_below: tl.constexpr,
):  # fmt: skip
    """Store the best score and its token for each row, of the block's tokens in `mask` [tokens]."""
    row = first_row + tl.arange(0, columns)
    sampled = tl.load(samples + row, row < rows, other=-1)
    live = sampled >= 0
    slot = tl.load(slots + sampled, live, other=0)
    place = tl.load(positions + sampled, live, other=0) + 1
    temperature = tl.load(temperatures + slot)
    noise = gumbel_tile(tl.load(seeds + slot), place, block, columns)
    greedy = temperature < greedy_below
    warm = logits / tl.where(greedy, 1.0, temperature)[None, :] + noise
    mask = mask[:, None]
    finite = (tl.abs(logits) < float("inf")) | (mask == 0)
    score = tl.where(mask & finite, tl.where(greedy[None, :], logits, warm), -float("inf"))
    highest, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # A logit that is not finite makes its block the best, and its token -1.
    whole = tl.min(finite.to(tl.int32), axis=0) > 0
    partial = block * rows + row
    tl.store(scores + partial, tl.where(whole, highest, float("inf")), row < rows)
    tl.store(best + partial, tl.where(whole, block * tokens + at, -1), row < rows)


@triton.jit
def best_of_all_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    sampled, last, scores, best, samples, slots, rows, blocks: tl.constexpr, width: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    place = tl.program_id(0)
    block = tl.arange(0, width)
    inside = block < blocks
    score = tl.load(scores + block * rows + place, inside, other=-float("inf"))
    at = tl.argmax(score, axis=0, tie_break_left=True)
    token = tl.load(best + at * rows + place)
    row = tl.load(samples + place)
    tl.store(sampled + place, tl.where(row >= 0, token, -1))
    if row >= 0:
        tl.store(last + tl.load(slots + row), tl.maximum(token, 0))


def sample(ends: EndWeights, step: StepBuffers) -> None:
    """Set `sampled_tokens` of the rows in `sample_rows`, and `last_tokens` of their slots; -1 (`last_tokens`: 0) where
    a logit is not finite.

    The token of row t is chosen for position `positions[t] + 1`. For padding `sampled_tokens` is -1, and `last_tokens`
    is not written. If several rows belong to one slot, any of their tokens may be its `last_tokens`.
    """
    normed = norm_sampled_rows(ends, step)
    grid, shape = choose_unembed_tiling(ends, step)
    blocks = grid[1]
    rows, tables = len(step.sample_rows), step.tables
    first_score = -(-normed.nbytes // 4)
    scores, best = step.partials[first_score : first_score + 2 * rows * blocks].view(2, -1)
    best = best.view(torch.int32)
    columns = (step.sample_rows, step.slots, step.positions, tables.temperatures, tables.seeds)
    best_of_block_kernel[grid](
        scores, best, normed, ends.unembedding, *columns, rows, ends.spec.vocabulary, greedy_below=GREEDY_BELOW, **shape
    )
    outputs = (step.sampled_tokens, tables.last_tokens, scores, best, step.sample_rows, step.slots)
    best_of_all_kernel[(rows,)](
        *outputs, rows, blocks=blocks, width=triton.next_power_of_2(blocks), **launch_options(warps=4)
    )
