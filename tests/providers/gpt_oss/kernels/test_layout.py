"""The private layout of experts: exactly undone, at its edges too, and its codes are what its masks say."""

import pytest
import torch

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.checkpoint import PackedExperts
from providers.inference.gpt_oss.checkpoint.mxfp4 import unpack
from providers.inference.gpt_oss.triton_backend.kernels.layout import TILE_DEPTH, TILE_ROWS, VERSION, tile_experts
from tests.support.models.kernel_references import untile_experts

MASK = 0x81C0


def packed(experts: int, rows: int, depth: int) -> PackedExperts:
    generator = torch.Generator().manual_seed(experts + rows + depth)
    blocks = torch.randint(0, 256, (experts, rows, depth // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 129, (experts, rows, depth // 32), dtype=torch.uint8, generator=generator)
    return PackedExperts(blocks, scales, torch.randn(experts, rows))


@pytest.mark.parametrize("shape", [(1, 64, 64), (9, 192, 96), (3, 34, 32), (1, 5760, 2880)])
def test_repacking_is_undone_exactly(shape: tuple[int, int, int]) -> None:
    assert VERSION == 1, "a layout that changed has a new number, and this test its new name"
    before = packed(*shape)
    after = untile_experts(tile_experts(before))
    assert torch.equal(after.blocks, before.blocks)
    assert torch.equal(after.scales, before.scales)
    assert after.bias is before.bias


def test_masks_and_one_multiplication_give_the_weights() -> None:
    """Unpacks in a kernel's way: a tile of words, in the order of a warp's registers, to four left operands."""
    experts = packed(1, 128, 128)
    weights = unpack(experts.blocks[0], experts.scales[0], torch.bfloat16)
    tiled = tile_experts(experts)
    for row in range(2):
        for depth in range(2):
            order = tiled.values[0, row, depth].view(4, 8, 4, 2, 2, 2).permute(0, 1, 4, 3, 2, 5)  # w g h c3 c21 c0
            words = order.reshape(TILE_ROWS, 16).int()
            codes = (
                words & MASK,
                words << 3 & MASK,
                words << 6 & MASK,
                words << 1 & 0x8000 | words >> 3 & 0x0180 | words >> 7 & 0x0040,
            )
            factors = (tiled.scales[0, row, depth].view(TILE_ROWS, 2).int() << 7).to(torch.int16).view(torch.bfloat16)
            unpacked = [
                code.to(torch.int16).view(torch.bfloat16) * factors[:, k // 2, None] for k, code in enumerate(codes)
            ]
            rows = slice(row * TILE_ROWS, (row + 1) * TILE_ROWS)
            inputs = slice(depth * TILE_DEPTH, (depth + 1) * TILE_DEPTH)
            assert torch.equal(torch.cat(unpacked, dim=1), weights[rows, inputs])


def test_padding_of_tiles_is_zero() -> None:
    tiled = tile_experts(packed(1, 34, 32))
    assert int((tiled.values != 0).sum()) <= 34 * 16
    assert not tiled.scales.view(64, 2)[34:].sub(126).any()


def test_a_scale_that_does_not_fit_is_an_error() -> None:
    experts = packed(1, 64, 64)
    experts.scales[0, 3, 1] = 129
    with pytest.raises(ConfigError, match="torch"):
        tile_experts(experts)
