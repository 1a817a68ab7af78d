"""Sampling by an int8 copy on a card: `TRITON_INTERPRET=0 python -m pytest -m gpu` and this file.

Only a card can show that tensor cores give a token's logit the same bits, for any other content of its tile, and that
they sum within `narrow`'s bound.
"""

from dataclasses import replace

import pytest
import torch

from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
    MAX_CERTIFIED_ROWS,
    TableSizes,
    make_step,
    make_tables,
)
from providers.inference.gpt_oss.triton_backend.kernels.device import INTERPRETED
from providers.inference.gpt_oss.triton_backend.kernels.sample import sample
from providers.inference.gpt_oss.triton_backend.kernels.sample_certified import sample_certified, slice_scratch
from providers.inference.gpt_oss.triton_backend.kernels.unembed import unembed
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights
from tests.bench.gpu_model import SPECS, make_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU, and TRITON_INTERPRET=0"),
]
CASES = 500
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def weights() -> Weights:
    spec = replace(SPECS["20b"], layers=SPECS["20b"].layers[:1])
    with torch.inference_mode():
        return make_weights(spec, CUDA, torch.bfloat16, "uniform", certified=True)


@pytest.mark.parametrize("rows", [1, 2, 5, MAX_CERTIFIED_ROWS])
def test_every_token_is_samples_and_every_greedy_logit_within_its_bound(weights: Weights, rows: int) -> None:
    assert count_wanted(weights, rows, CASES // rows) < 0.05


@torch.inference_mode()
def count_wanted(weights: Weights, rows: int, steps: int) -> float:
    """The share of tokens that were read in full, of `steps` steps of random rows, steep ones and flat ones."""
    ends, embedding = weights.ends, weights.ends.embedding
    tables = make_tables(ends.spec, TableSizes(rows, 64, rows * 4, embedding.dtype, embedding.device))
    step = make_step(ends.spec, tables, rows, rows)
    places = torch.arange(rows, dtype=torch.int32, device=embedding.device)
    step.slots.copy_(places)
    step.sample_rows.copy_(places)
    candidate_share = 0.0
    for number in range(steps):
        step.hidden.normal_()
        step.hidden[:, number % 7] *= 30
        step.positions.fill_(number)
        tables.temperatures.copy_(torch.tensor([0, 1, 0.3, 2])[(places.cpu() + number) % 4])
        tables.seeds.random_(-(2**62), 2**62)
        sample(ends, step)
        expected = step.sampled_tokens.clone()
        step.sampled_tokens.fill_(-7)
        sample_certified(ends, step)
        assert torch.equal(step.sampled_tokens, expected)
        assert bool((expected >= 0).all())
        room = slice_scratch(ends, step)
        bounds = room.bounds.view(-1, rows).clone()
        candidate_share += float((bounds >= room.floors).any(dim=-1).double().mean()) / steps
        unembed(ends, step)
        greedy = tables.temperatures == 0
        assert bool((step.logits <= bounds.T)[greedy].all())
    return candidate_share
