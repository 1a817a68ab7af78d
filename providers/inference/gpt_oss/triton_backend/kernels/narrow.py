"""An int8 copy of the unembedding, and the error bound of each of its rows, for `sample_certified`.

A row w of K numbers is stored as s * q, of integers q from -127 to 127 and one float32 scale s; of the remainder,
e = w - s * q, only the length is stored. So the copy has half the bytes, and 12 more for each row.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_CODE: Final = 127
MIN_SCALED: Final = 2.0**-100
"""Rows whose numbers are all below it are stored as zero: their scales would have no precision left."""

SUM_ERROR: Final = 2.0**-22
"""A product of two rows as tensor cores sum it is off by at most so much for each of its K terms, of the lengths'
product: they cut sums off at 2 ** -23 of the largest number so far, terms and carried sum, at their worst."""

FLUSH_BOUND: Final = 2.0**-120
"""More than the length of any row of K < 4096 numbers too small to be normal, which some hardware reads as zero."""

_ROWS: Final = 8192
_ROUND_UP: Final = 1 + 2.0**-20


@dataclass(frozen=True, slots=True)
class Int8Unembedding:
    """`codes` [vocabulary, hidden] int8 are q; the other tensors are of each row, [vocabulary] float32.

    scales: s. lengths: of w and of s * q, the longer one; infinite where w is not finite. spreads: the length of e, and
    the error bound of float32 sums of w's products. Both are at least what they say, never less.
    """

    codes: Tensor
    scales: Tensor
    spreads: Tensor
    lengths: Tensor


def quantize_unembedding(weight: Tensor) -> Int8Unembedding:
    """Return the copy of `weight` [vocabulary, hidden], on the same device; all bounds are computed in float64."""
    vocabulary, hidden = weight.shape
    assert hidden < 4096, "FLUSH_BOUND and the kernels' own sums are good for no more"
    codes = torch.empty(vocabulary, hidden, dtype=torch.int8, device=weight.device)
    numbers = torch.empty(3, vocabulary, dtype=torch.float32, device=weight.device)
    for low in range(0, vocabulary, _ROWS):
        part = slice(low, low + _ROWS)
        exact = weight[part].double()
        finite = exact.isfinite().all(dim=-1)
        highest = exact.abs().amax(dim=-1)
        scale = (highest / MAX_CODE).float().where(finite & (highest >= MIN_SCALED), 0)
        divisor = scale.double().where(scale > 0, torch.inf).unsqueeze(-1)
        integers = (exact.nan_to_num(0, 0, 0) / divisor).round().clamp(-MAX_CODE, MAX_CODE)
        restored = integers * scale.double().unsqueeze(-1)
        length = torch.maximum(_row_lengths(exact), _row_lengths(restored))
        spread = _row_lengths(exact - restored) + hidden * SUM_ERROR * length
        codes[part] = integers.to(torch.int8)
        bounds = torch.stack((spread, length)) * _ROUND_UP + FLUSH_BOUND
        numbers[0, part] = scale
        numbers[1:, part] = bounds.where(finite, torch.inf).float()
    return Int8Unembedding(codes, *numbers)


def _row_lengths(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=-1).sqrt()
