"""The private layout of MXFP4 experts: tiles in the order in which tensor cores take a matrix, and the exact way back.

Version 1. A matrix of an expert is cut into tiles of TILE_ROWS rows by TILE_DEPTH inputs, zero past its edges; tiles
lie row of tiles by row of tiles, so that a CTA that computes TILE_ROWS outputs reads one unbroken run of memory.

Values. A tile is 1024 words of 16 bits, one for each row and each of 16 columns. Word (row, column) holds the codes of
the inputs 16 * k + column for k = 0..3, so that with all words of a tile as [64, 16] the k-th codes are the left
operand of a product with the inputs 16 * k .. 16 * k + 15. Bits of a word, code k being s, e1, e0, m of E2M1:

    bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    code  s.0 s.3 m.3 s.1 e1.3 e0.3 s.2 e1.0 e0.0 m.0 e1.1 e0.1 m.1 e1.2 e0.2 m.2

so that (two words at once) `w & 0x81C081C0`, `(w << 3) & ...`, `(w << 6) & ...` and
`(w << 1) & 0x80008000 | (w >> 3) & 0x01800180 | (w >> 7) & 0x00400040` are codes 0, 1, 2, 3 as bfloat16 numbers that
are 2 ** -126 times too small: one multiplication by the scale, which has that factor in it, makes them weights.

Order. The index of a word in its tile has, from its lowest bit up: column 0, row 0, column 3, column 1, column 2, row
1, row 2, row 3, row 4, row 5 (bits of each). Eight words are 16 bytes and, with the 16 rows of a warp counted in the
order 0, 2, .. 14, 1, 3, .. 15, what one thread holds of an m16k16 (or m64k16) left operand. Its two rows are then
neighbours: gate and linear, or two outputs that are stored as one word.

Scales. A tile is 128 bytes, [64 rows, 2 groups of 32 inputs], each the bfloat16 exponent of 2 ** 126 times the scale:
`byte << 7` are the bits of the number to multiply by. Kernels read a row's two as one word of 16 bits: of two rows at
once `w << 7 & 0x7F807F80` and `w >> 1 & 0x7F807F80` are the numbers of either group. Scales above 2 (no trained model
has such) do not fit.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.checkpoint import PackedExperts

VERSION: Final = 1
TILE_ROWS: Final = 64
TILE_DEPTH: Final = 64
TILE_WORDS: Final = 1024
TILE_SCALES: Final = 128
SCALE_SHIFT: Final = 126
LARGEST_SCALE: Final = 128

_EXPERTS_PER_PASS: Final = 8
"""Experts that are repacked at once: the codes of all would take twice the model's memory."""

BIT_POSITIONS: Final = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
"""For each code the bits of its sign, its exponent's two bits and its mantissa."""


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """One matrix of every expert: `values` [E, R, D, 1024] int16 and `scales` [E, R, D, 128] uint8 in R by D tiles,
    `bias` [E, rows]. `rows` are outputs and `depth` inputs, without the tiles' padding."""

    values: Tensor
    scales: Tensor
    bias: Tensor
    rows: int
    depth: int


def tile_experts(experts: PackedExperts) -> TiledExperts:
    """Repack, on the device where `experts` lie. Raises ConfigError for a scale above 2."""
    count, rows, groups, _ = experts.blocks.shape
    depth = groups * 32
    if int(experts.scales.max()) > LARGEST_SCALE:
        raise ConfigError("an MXFP4 scale is above 2, which the kernels' layout cannot hold. Run it on torch.")
    row_tiles, depth_tiles = -(-rows // TILE_ROWS), -(-depth // TILE_DEPTH)
    device = experts.blocks.device
    values = torch.empty(count, row_tiles, depth_tiles, TILE_WORDS, dtype=torch.int16, device=device)
    scales = torch.empty(count, row_tiles, depth_tiles, TILE_SCALES, dtype=torch.uint8, device=device)
    for low in range(0, count, _EXPERTS_PER_PASS):
        part = slice(low, low + _EXPERTS_PER_PASS)
        values[part] = _pack_words(experts.blocks[part], row_tiles, depth_tiles)
        scales[part] = _scale_tiles(experts.scales[part], row_tiles, depth_tiles)
    return TiledExperts(values, scales, experts.bias, rows, depth)


def _pack_words(blocks: Tensor, row_tiles: int, depth_tiles: int) -> Tensor:
    count, rows, groups, _ = blocks.shape
    codes = blocks.new_zeros(count, row_tiles * TILE_ROWS, depth_tiles * TILE_DEPTH)
    flat = blocks.reshape(count, rows, groups * 16)
    codes[:, :rows, 0 : groups * 32 : 2] = flat & 15
    codes[:, :rows, 1 : groups * 32 : 2] = flat >> 4
    # Rows are w g h, inputs are k c3 c21 c0 (see Order): the result is w g c21 c3 h c0, with k together in a word.
    split = codes.view(count, row_tiles, 4, 8, 2, depth_tiles, 4, 2, 4, 2)
    placed = split.permute(0, 1, 5, 2, 3, 8, 7, 4, 9, 6).reshape(count, row_tiles, depth_tiles, TILE_WORDS, 4).int()
    word = torch.zeros_like(placed[..., 0])
    for k, places in enumerate(BIT_POSITIONS):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            word |= (placed[..., k] >> bit & 1) << place
    return word.to(torch.int16)


def _scale_tiles(scales: Tensor, row_tiles: int, depth_tiles: int) -> Tensor:
    count, rows, groups = scales.shape
    padded = scales.new_zeros(count, row_tiles * TILE_ROWS, depth_tiles * 2)
    padded[:, :rows, :groups] = scales
    padded = padded.view(count, row_tiles, TILE_ROWS, depth_tiles, 2).transpose(2, 3) + SCALE_SHIFT
    return padded.reshape(count, row_tiles, depth_tiles, TILE_SCALES)
