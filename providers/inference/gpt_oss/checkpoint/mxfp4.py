"""MXFP4 weights: two E2M1 values in a byte, one E8M0 scale for 32 of them (OCP Microscaling Formats, 5.3 and 6.3)."""

from functools import cache
from typing import Final

import torch
from torch import Tensor

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS: Final = 127
SCALE_NAN: Final = 255

_GATHER_DTYPES: Final = {torch.bfloat16: torch.int64, torch.float32: torch.complex128, torch.float64: torch.complex128}
"""For each type an element as wide as all the values of one look-up: a gather of elements is far quicker than one of
short rows."""


@cache
def _lookup_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return for every look-up (two bytes, or one in float64) its values in `dtype`, as one wide element."""
    values = torch.tensor(E2M1_VALUES, dtype=dtype)
    byte_values = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    if _weights_per_lookup(dtype) == 4:
        pairs = torch.arange(65536)
        byte_values = torch.cat((byte_values[pairs & 255], byte_values[pairs >> 8]), dim=-1)
    return byte_values.contiguous().view(_GATHER_DTYPES[dtype]).flatten().to(device)


class UnpackScratch:
    """Memory to unpack into, reused for every product: fresh memory of this size costs more to get than to fill."""

    def __init__(self, weights: int, dtype: torch.dtype, device: torch.device) -> None:
        per_lookup = _weights_per_lookup(dtype)
        self.index = torch.empty(weights // per_lookup, dtype=torch.int32, device=device)
        self.gather_buffer = torch.empty(weights // per_lookup, dtype=_GATHER_DTYPES[dtype], device=device)


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype, scratch: UnpackScratch | None = None) -> Tensor:
    """Return the weights of `blocks` [..., G, 16] uint8 and `scales` [..., G] uint8, as [..., G * 32] of `dtype`.

    Exact in bfloat16, float32 and float64, but for numbers beyond the first two's range: infinity, as in any cast. The
    low half of a byte is the earlier weight. With `scratch` the result lies in it, until the next use of it.
    """
    lookups = blocks.reshape(-1)
    if dtype != torch.float64:
        lookups = lookups.view(torch.uint16)
    scratch = scratch or UnpackScratch(2 * blocks.numel(), dtype, blocks.device)
    index, wide = scratch.index[: lookups.numel()], scratch.gather_buffer[: lookups.numel()]
    torch.index_select(_lookup_table(dtype, blocks.device), 0, index.copy_(lookups), out=wide)
    values = wide.view(dtype).view(*scales.shape, -1)
    return values.mul_(scale_values(scales, dtype).unsqueeze(-1)).flatten(-2)


def _weights_per_lookup(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 4


def scale_values(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the powers of two that the scale bytes stand for; 255 is NaN."""
    return _scale_table(dtype, scales.device).index_select(0, scales.reshape(-1).int()).view(scales.shape)


@cache
def _scale_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - SCALE_BIAS)
    powers[SCALE_NAN] = torch.nan
    return powers.to(dtype).to(device)


def pack(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest MXFP4 form of `weights` [..., K] (K a multiple of 32): blocks [..., K/32, 16] and scales [...,
    K/32].

    The scale is the power of two that brings a group's largest weight into E2M1's range without clipping it.
    """
    groups = weights.double().view(*weights.shape[:-1], -1, 32)
    largest = groups.abs().amax(dim=-1)
    exponents = torch.where(largest > 0, torch.ceil(torch.log2(largest / 6)), torch.zeros_like(largest))
    scales = (exponents + SCALE_BIAS).clamp(0, SCALE_NAN - 1)
    scaled = torch.ldexp(groups, (SCALE_BIAS - scales).unsqueeze(-1))
    steps = torch.tensor(E2M1_VALUES[:8], dtype=torch.float64, device=weights.device)
    middles = (steps[1:] + steps[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.to(torch.uint8)
