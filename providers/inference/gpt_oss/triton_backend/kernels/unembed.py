"""The final norm and the logits of the rows that are sampled, for the sampler in torch, which needs all of them.

One small kernel norms the rows, a CTA each, into the scratch memory. A second multiplies: a CTA has BLOCK_TOKENS tokens
of the vocabulary, the left operand, and up to MAX_COLUMNS rows, the right one; all rows of a token's block are
neighbours in the grid, so that the block comes from memory once.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16. At one row it reads 1,158
MB: 269 us at 4.3 TB/s, to be done within 85 % of that speed.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    dot,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.noise import BLOCK_TOKENS
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights

MAX_COLUMNS: Final = 64
MIN_COLUMNS: Final = 16


@triton.jit
def norm_rows_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    normed, hidden, weight, samples, eps, width: tl.constexpr, block: tl.constexpr, interpreted: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    norm_row(normed, hidden, weight, samples, eps, width, block, interpreted, dependent)


@triton.jit
def norm_row(  # noqa: PLR0913, PLR0917 - a kernel's part
    normed, hidden, weight, samples, eps, width: tl.constexpr, block: tl.constexpr, interpreted: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    """Norm, store and return the CTA's row; past its width are zeros. Must be the first statement of a kernel."""
    columns = tl.arange(0, block)
    inside = columns < width
    weights = tl.load(weight + columns, inside, other=0)
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    place = tl.program_id(0)
    row = tl.maximum(tl.load(samples + place), 0).to(tl.int64)
    numbers = tl.load(hidden + row * width + columns, inside, other=0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers) / width + eps)
    normed_row = round_to_type(numbers * scale * weights, normed.dtype.element_ty, interpreted)
    tl.store(normed + place.to(tl.int64) * width + columns, normed_row, inside)
    return normed_row


@triton.jit
def logits_tile(  # noqa: PLR0913, PLR0917 - a kernel
    normed, unembedding, first_token, first_row, rows, vocabulary, mask, width: tl.constexpr, tokens: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    """Return logits [tokens, columns] float32. Past the vocabulary's or the rows' end they are those of the last one
    again.

    Of tokens outside `mask` [tokens], where that is not None, nothing is read and the logits are zero.
    """
    token = tl.minimum(first_token + tl.arange(0, tokens), vocabulary - 1).to(tl.int64)
    row = tl.minimum(first_row + tl.arange(0, columns), rows - 1)
    deep = tl.arange(0, depth)
    lhs_places = unembedding + token[:, None] * width + deep[None, :]
    rhs_places = normed + row[None, :] * width + deep[:, None]
    total = tl.zeros([tokens, columns], tl.float32)
    for start in range(0, width, depth):
        inside = start + deep < width
        read = inside[None, :] if mask is None else inside[None, :] & mask[:, None]
        lhs = tl.load(lhs_places + start, read, other=0)
        rhs = tl.load(rhs_places + start, inside[:, None], other=0)
        total = dot(lhs, rhs, total, interpreted)
    return total


@triton.jit
def unembed_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    logits, normed, unembedding, rows, vocabulary, width: tl.constexpr, tokens: tl.constexpr, columns: tl.constexpr,
    depth: tl.constexpr, interpreted: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    first_row, first_token = tl.program_id(0) * columns, tl.program_id(1) * tokens
    total = logits_tile(
        normed, unembedding, first_token, first_row, rows, vocabulary, None, width, tokens, columns, depth, interpreted
    )
    token, row = first_token + tl.arange(0, tokens), first_row + tl.arange(0, columns)
    places = logits + row[None, :].to(tl.int64) * vocabulary + token[:, None]
    tl.store(places, total, (row < rows)[None, :] & (token < vocabulary)[:, None])


def unembed(ends: EndWeights, step: StepBuffers) -> None:
    """Set `logits` of the rows in `sample_rows`, not rounded to the model's type. Rows of padding may hold anything."""
    normed = norm_sampled_rows(ends, step)
    grid, shape = choose_unembed_tiling(ends, step)
    unembed_kernel[grid](step.logits, normed, ends.unembedding, len(step.sample_rows), ends.spec.vocabulary, **shape)


def norm_sampled_rows(ends: EndWeights, step: StepBuffers) -> Tensor:
    """Norm the sampled rows into the scratch memory's beginning and return them: [S, hidden] of the model's type."""
    rows, width = len(step.sample_rows), ends.spec.hidden
    normed = step.partials[: normed_row_words(step, width)].view(step.hidden.dtype)
    shape = {
        "width": width,
        "block": triton.next_power_of_2(width),
        "interpreted": INTERPRETED,
        **launch_options(warps=4),
    }
    norm_rows_kernel[(rows,)](normed, step.hidden, ends.norm, step.sample_rows, ends.spec.norm_eps, **shape)
    return normed


def normed_row_words(step: StepBuffers, width: int) -> int:
    """Return how many numbers of `partials` the normed rows take."""
    return -(-len(step.sample_rows) * width * step.hidden.itemsize // step.partials.itemsize)


def choose_unembed_tiling(ends: EndWeights, step: StepBuffers) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of a product with the unembedding, and its constants and launch options."""
    rows = len(step.sample_rows)
    columns = min(MAX_COLUMNS, max(MIN_COLUMNS, triton.next_power_of_2(rows)))
    blocks = -(-ends.spec.vocabulary // BLOCK_TOKENS)
    warps, stages = (8, 3) if columns == MAX_COLUMNS else (4, 4)
    shape = {
        "width": ends.spec.hidden,
        "tokens": BLOCK_TOKENS,
        "columns": columns,
        "depth": 64,
        "interpreted": INTERPRETED,
    }
    return (-(-rows // columns), blocks), shape | launch_options(warps, stages)
