"""The noise of sampling: Philox as its authors published it and as Triton computes it, and Gumbel's distribution."""

from typing import Any

import torch
import triton
import triton.language as tl

from tests.support.models.kernel_references import exponential, gumbel, philox

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false


def words(seed: int, c0: int, c1: int) -> list[int]:
    result = philox(torch.tensor([seed]), (torch.tensor([c0]), torch.tensor([c1])))
    return [int(each) for each in result]


@triton.jit
def philox_kernel(out, seed, c1, block: tl.constexpr):
    lanes = tl.arange(0, block)
    result = tl.philox(seed, lanes, c1, 0, 0)
    for word in tl.static_range(4):
        tl.store(out + word * block + lanes, result[word].to(tl.int64))


def test_words_are_those_that_its_authors_published() -> None:
    assert words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_words_are_those_that_triton_computes() -> None:
    for seed, place in ((0, 0), (-(2**61) + 12345, 131071), (2**62 + 7, 3)):
        result = torch.empty(4, 64, dtype=torch.int64)
        launch: Any = philox_kernel[(1,)]
        launch(result, torch.tensor(seed).item(), place, block=64)
        lanes = torch.arange(64)
        expected = philox(torch.tensor([seed]), (lanes, torch.full_like(lanes, place)))
        assert torch.equal(result, torch.stack(expected))


def test_every_word_gives_a_finite_number_and_small_ones_are_precise() -> None:
    edges = torch.tensor([0, 1, 2**24 - 1, 2**24, 2**31, 2**32 - 2, 2**32 - 1])
    numbers = exponential(edges).double()
    expected = -torch.log1p(-((edges.double() + 0.5) / 2**32).clamp(max=1 - 2.0**-24))
    assert bool((numbers > 0).all())
    assert float(((numbers - expected) / expected).abs().max()) < 1e-5


def test_the_largest_of_logits_and_noise_has_the_softmaxs_probability() -> None:
    logits = torch.tensor([0.0, -1.0, 0.5, -3.0, 1.0, 0.0, -0.5, 0.25])
    draws = 20_000
    seeds = torch.arange(draws) * 0x9E3779B97F4A7C15 % 2**62
    chosen = (logits + gumbel(seeds, torch.full((draws,), 9), 8)).argmax(dim=-1)
    expected = logits.double().softmax(dim=-1) * draws
    squares = (torch.bincount(chosen, minlength=8) - expected).square() / expected
    assert float(squares.sum()) < 24.3, "one in a thousand by chance, and the seeds never change"


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([5, -6, 5]), torch.tensor([1, 1, 2], dtype=torch.int32)
    together = gumbel(seeds, positions, 300)
    for row in range(3):
        assert torch.equal(together[row : row + 1, :200], gumbel(seeds[row : row + 1], positions[row : row + 1], 200))
    assert together.unique().numel() == 900
