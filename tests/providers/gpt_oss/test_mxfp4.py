"""MXFP4: every byte under every scale, against float64 arithmetic."""

import pytest
import torch

from providers.inference.gpt_oss.checkpoint.mxfp4 import SCALE_NAN, UnpackScratch, pack, scale_values, unpack

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def by_the_book(byte: int, scale: int) -> tuple[float, float]:
    """The low nibble first; sign, then two bits of exponent and one of mantissa."""
    low, high = ((-1.0 if nibble & 8 else 1.0) * E2M1[nibble & 7] for nibble in (byte & 15, byte >> 4))
    return low * 2.0 ** (scale - 127), high * 2.0 ** (scale - 127)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_under_every_scale_is_exact(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(SCALE_NAN, 1, 1)
    scales = torch.arange(SCALE_NAN, dtype=torch.uint8).unsqueeze(-1).repeat(1, 16)
    table = [[value for byte in range(256) for value in by_the_book(byte, scale)] for scale in range(SCALE_NAN)]
    expected = torch.tensor(table, dtype=torch.float64)
    weights = unpack(blocks, scales, dtype)
    assert torch.equal(weights, expected.to(dtype))
    assert torch.equal(weights.signbit(), expected.signbit())


def test_the_last_scale_is_no_number() -> None:
    assert scale_values(torch.tensor([SCALE_NAN], dtype=torch.uint8), torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scratch_is_used_again_and_changes_nothing(dtype: torch.dtype) -> None:
    scratch = UnpackScratch(2 * 5 * 64, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for rows in (5, 3, 5):
        blocks = torch.randint(0, 256, (2, rows, 2, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 140, (2, rows, 2), dtype=torch.uint8, generator=generator)
        within = unpack(blocks, scales, dtype, scratch)
        assert torch.equal(within, unpack(blocks, scales, dtype))
        assert within.data_ptr() == scratch.gather_buffer.data_ptr()


def test_unpacked_weights_pack_into_the_same_numbers() -> None:
    blocks = torch.randint(0, 256, (7, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    weights = unpack(blocks, torch.full((7, 3), 120, dtype=torch.uint8), torch.float32)
    assert torch.equal(unpack(*pack(weights), torch.float32), weights)


def test_packing_takes_the_nearest_number() -> None:
    weights = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    blocks, scales = pack(weights)
    step = scale_values(scales, torch.float32).repeat_interleave(32, dim=-1)
    assert ((unpack(blocks, scales, torch.float32) - weights).abs() <= step).all()
    assert torch.equal(unpack(*pack(torch.zeros(1, 32)), torch.float32), torch.zeros(1, 32))
