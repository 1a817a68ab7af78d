"""Gumbel noise for sampling: a number for each (seed, position, token), from Philox, the same on every device.

The logit over the temperature plus this noise is largest for a token with the softmax's probability of that token.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); triton.language.philox computes the same.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from typing import Final

import triton
import triton.language as tl

BLOCK_TOKENS: Final = 128
"""Tokens of one run of counters: a counter's four words belong to the tokens lane, lane + 32, + 64 and + 96."""


@triton.jit
def gumbel_tile(seeds, positions, block, columns: tl.constexpr):
    """Return [BLOCK_TOKENS, columns] float32: noise of the tokens block * BLOCK_TOKENS, ... (rows), for a seed and a
    position in each column."""
    lanes = tl.arange(0, 32)[:, None] + block * 32
    counters = tl.zeros([32, columns], tl.uint32) + lanes.to(tl.uint32)
    keys = tl.zeros([32, columns], tl.int64) + seeds[None, :]
    w0, w1, w2, w3 = tl.philox(
        keys, counters, counters * 0 + positions.to(tl.uint32)[None, :], counters * 0, counters * 0
    )
    # The bits of a word's number, from the highest down, are the last two axes': the words stand one after the other.
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    words = tl.reshape(tl.permute(words, (3, 2, 0, 1)), (128, columns))
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355225)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333333333))
    return -tl.log(tl.where(uniform < 0.00390625, series, -tl.log(1.0 - uniform)))
