"""Gumbel noise for sampling: a number for each (seed, position, token), from Philox, the same on every device.

The logit over the temperature plus this noise is largest for a token with the softmax's probability of that token.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); triton.language.philox computes the same.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS: Final = 128
"""Tokens of one run of counters: a counter's four words belong to the tokens lane, lane + 32, + 64 and + 96."""

SERIES_BELOW: Final = 2.0**-8
MAX_UNIFORM: Final = 1 - 2.0**-24

_WORD_MASK: Final = 2**32 - 1
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEYS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return noise [R, vocabulary] float32 for rows with `seeds` [R] int64 and `positions` [R], those of the token to
    be chosen."""
    blocks = -(-vocabulary // BLOCK_TOKENS)
    counters = torch.arange(blocks * 32, device=seeds.device).expand(len(seeds), -1)
    places = positions.to(torch.int64).unsqueeze(-1).expand_as(counters)
    words = torch.stack(philox(seeds.unsqueeze(-1), (counters, places)), dim=-1)
    words = words.view(len(seeds), blocks, 32, 4).transpose(2, 3).flatten(1, 3)[:, :vocabulary]
    return -torch.log(exponential(words))


def exponential(words: Tensor) -> Tensor:
    """Return exponentially distributed float32 from words in [0, 2 ** 32); precise where they are small, as the largest
    Gumbel numbers come from the smallest of these."""
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=MAX_UNIFORM)
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3)))
    return torch.where(uniform < SERIES_BELOW, series, -torch.log(1 - uniform))


def philox(seed: Tensor, counters: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox-4x32-10 of a 64-bit `seed` and the counter (c0, c1, 0, 0), as four words in int64."""
    c0, c1 = (counter & _WORD_MASK for counter in counters)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _WORD_MASK, seed >> 32 & _WORD_MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_words(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_words(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEYS[0] & _WORD_MASK, k1 + _KEYS[1] & _WORD_MASK
    return c0, c1, c2, c3


def _multiply_words(multiplier: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of words, by halves: 64 bits with a sign do not hold it."""
    low, high = multiplier * (words & 0xFFFF), multiplier * (words >> 16)
    middle = high + (low >> 16)
    return middle >> 16 & _WORD_MASK, (middle & 0xFFFF) << 16 | low & 0xFFFF


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
