"""Embedding: the first values of the residual stream, for tokens from the host or from the last step.

Must meet: equal to the bit. 2 x 5.8 KB a token, so its launch is its cost: one CTA a token, under 3 us in a graph.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    launch_options,
    release_next_kernel,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights


@triton.jit
def embed_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    hidden, embedding, tokens, last_tokens, slots, positions, width, block: tl.constexpr, dependent: tl.constexpr
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    row = tl.program_id(0)
    if tl.load(positions + row) >= 0:
        token = tl.load(tokens + row)
        if token < 0:
            token = tl.load(last_tokens + tl.load(slots + row))
        columns = tl.arange(0, block)
        inside = columns < width
        numbers = tl.load(embedding + token.to(tl.int64) * width + columns, inside)
        tl.store(hidden + row.to(tl.int64) * width + columns, numbers, inside)


def embed(ends: EndWeights, step: StepBuffers) -> None:
    """Set `hidden` from `tokens`, or from `last_tokens` of the row's slot where the token is -1. Rows of padding are
    not written."""
    rows, width = step.hidden.shape
    inputs = (step.tokens, step.tables.last_tokens, step.slots, step.positions)
    block = triton.next_power_of_2(width)
    embed_kernel[(rows,)](step.hidden, ends.embedding, *inputs, width, block=block, **launch_options(warps=4))
