"""The sampler: distributions by chi-square against plain arithmetic, and independence of the batch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.torch_backend.sampler import Sampler, draw, draw_filtered, uniform

LOGITS = [1.5, -0.3, 0.7, 2.1, -2.0, 0.7, 1.0, -0.5, 0.0, 1.2]
PROMPT = [0, 3, 3]
GENERATED = [3, 6, 6, 8]
DRAWS = 2000
CPU = torch.device("cpu")
UNPENALISED = RowSampling()


def expected(sampling: RowSampling, allowed: Sequence[int] | None = None) -> list[float]:
    """Return the probabilities that the docstring of RowSampling defines, in plain arithmetic."""
    scores = dict(enumerate(LOGITS))
    for token in set(PROMPT + GENERATED):
        repetition = sampling.repetition_penalty
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token, count in Counter(GENERATED).items():
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if allowed is not None:
        scores = {token: scores[token] for token in allowed}
    weights = {token: math.exp(score / sampling.temperature) for token, score in scores.items()}
    ranked = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k or None]
    mass = sum(weights[token] for token in ranked)
    survivors: list[int] = []
    for token in ranked:
        if survivors and sum(weights[each] for each in survivors) >= sampling.top_p * mass:
            break
        survivors.append(token)
    survivors = [token for token in survivors if weights[token] >= sampling.min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in survivors)
    return [weights[token] / total if token in survivors else 0.0 for token in range(len(LOGITS))]


def bitmask(allowed: Sequence[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(4, "little")


def sampled(
    samplings: Sequence[RowSampling], positions: Sequence[int], allowed: Sequence[int] | None
) -> list[SampledToken]:
    sampler = Sampler(len(LOGITS), CPU)
    for slot, sampling in enumerate(samplings):
        sampler.open(slot, sampling, PROMPT, GENERATED)
    masks = {} if allowed is None else dict.fromkeys(range(len(samplings)), bitmask(allowed))
    logits = torch.tensor(LOGITS).repeat(len(samplings), 1)
    tokens = sampler.sample(logits, list(enumerate(positions)), masks)
    return [tokens[slot] for slot in range(len(samplings))]


def assert_fits(counts: Mapping[int, int], probabilities: Sequence[float]) -> None:
    """Pearson's chi-square, five standard deviations wide: the seeds are fixed, so this is no gamble."""
    total = sum(counts.values())
    assert [token for token in counts if probabilities[token] == 0] == []
    possible = [token for token, probability in enumerate(probabilities) if probability > 0]
    off = [
        (counts.get(token, 0) - total * probabilities[token]) ** 2 / (total * probabilities[token])
        for token in possible
    ]
    freedom = len(possible) - 1
    assert sum(off) <= freedom + 5 * math.sqrt(2 * freedom)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.8},
    "top-k": {"top_k": 4},
    "top-k 1": {"top_k": 1},
    "top-p": {"top_p": 0.7},
    "top-p 0": {"top_p": 0.0},
    "min-p": {"min_p": 0.3},
    "min-p 1": {"min_p": 1.0},
    "all three": {"top_k": 7, "top_p": 0.9, "min_p": 0.25, "temperature": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "all penalties": {"presence_penalty": -0.4, "frequency_penalty": 0.6, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {4: 4.0, 3: -100.0, 999: 5.0}},
    "bias and filter": {"logit_bias": {4: 3.0}, "top_p": 0.8, "frequency_penalty": 1.0},
}


def applied(sampling: RowSampling) -> RowSampling:
    return replace(sampling, logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token < 10})


@pytest.mark.parametrize("allowed", [None, (1, 3, 4, 6, 8)], ids=["free", "masked"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_come_as_often_as_they_should(way: str, allowed: Sequence[int] | None) -> None:
    samplings = [RowSampling(seed=seed, **WAYS[way]) for seed in range(DRAWS)]
    tokens = [each.token for each in sampled(samplings, [12] * DRAWS, allowed)]
    assert_fits(Counter(tokens), expected(applied(samplings[0]), allowed))


def test_the_positions_of_one_seed_are_as_good_as_many_seeds() -> None:
    tokens = [each.token for each in sampled([RowSampling(seed=7)] * DRAWS, range(DRAWS), None)]
    assert_fits(Counter(tokens), expected(UNPENALISED))


def test_uniform_numbers_are_uniform_and_do_not_follow_each_other() -> None:
    for seeds, positions in (
        (range(20000), [5] * 20000),
        ([3] * 20000, range(20000)),
        (range(-10000, 10000), range(20000)),
    ):
        numbers = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
        assert_fits(Counter(int(number * 64) for number in numbers), [1 / 64] * 64)
        pairs = pairwise(numbers)
        assert_fits(Counter(int(one * 8) * 8 + int(two * 8) for one, two in pairs), [1 / 64] * 64)
    assert 0 <= min(numbers) < max(numbers) < 1


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_seed_will_do(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1
    assert uniform(seed, 0) != uniform(seed, 1)


def test_a_row_is_sampled_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(WAYS) + 1, 5000, generator=generator) * 2
    ways = [RowSampling(seed=slot, **way) for slot, way in enumerate(WAYS.values())]
    ways.append(RowSampling(temperature=0.0))
    sampler = Sampler(5000, CPU)
    for slot, sampling in enumerate(ways):
        sampler.open(slot, replace(sampling, logprobs=slot % 3 or None), PROMPT, GENERATED)
    mask = {2: b"\x55" * 625, 5: b"\xf0" * 625}
    rows = [(slot, 40 + slot) for slot in range(len(ways))]
    alone = {row[0]: sampler.sample(logits[row[0]].clone().unsqueeze(0), [row], mask)[row[0]] for row in rows}
    assert sampler.sample(logits.clone(), rows, mask) == alone
    backwards = sampler.sample(logits.flip(0), rows[::-1], mask)
    assert backwards == alone
    assert alone[len(ways) - 1].token == int(logits[-1].argmax())


def test_few_candidates_choose_as_all_would() -> None:
    scores = torch.randn(40, 3000, generator=torch.Generator().manual_seed(5)) * 3
    limits = (
        torch.tensor([[3000, 0.95, 0.0], [40, 1.0, 0.0], [3000, 1.0, 0.02], [3000, 0.5, 0.1]]).double().repeat(10, 1)
    )
    uniforms = torch.tensor([uniform(1, row) for row in range(40)]).double()
    everything = draw_filtered(scores, limits, uniforms, 3000)
    for candidates in (1, 16, 512):
        assert torch.equal(draw_filtered(scores, limits, uniforms, candidates), everything)


def test_a_number_just_below_one_still_finds_a_token_with_weight() -> None:
    scores = torch.full((2, 300), -torch.inf)
    scores[0, 7], scores[1, 130] = 0.0, 3.0
    edge = torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64)
    limits = torch.tensor([[300, 0.9, 0.0]]).double().repeat(2, 1)
    assert torch.equal(draw_filtered(scores, limits, edge), torch.tensor([7, 130]))
    assert torch.equal(draw(scores, edge), torch.tensor([7, 130]))


def test_log_probabilities_are_the_models_own() -> None:
    exact = [math.log(probability) for probability in expected(UNPENALISED)]
    way = RowSampling(temperature=0.3, top_k=2, presence_penalty=1.0, logit_bias={1: 9.0}, logprobs=4)
    (one, none), (bare,) = sampled([way, RowSampling()], [9, 9], None), sampled([replace(way, logprobs=0)], [9], None)
    assert one.logprob == pytest.approx(exact[one.token], abs=1e-5)
    assert [token for token, _ in one.top_logprobs] == [3, 0, 9, 6]
    assert [logprob for _, logprob in one.top_logprobs] == pytest.approx(
        [exact[token] for token, _ in one.top_logprobs], abs=1e-5
    )
    assert (none.logprob, none.top_logprobs) == (None, ())
    assert (bare.token, bare.logprob, list(bare.top_logprobs)) == (one.token, one.logprob, [])


def test_tokens_that_a_row_names_are_scored_also_if_another_is_chosen() -> None:
    exact = [math.log(probability) for probability in expected(UNPENALISED)]
    way = RowSampling(temperature=0.0, logit_bias={1: 9.0}, logprobs=0, score_ids=[9, 0, len(exact), -1])
    others = [replace(way, score_ids=[3]), replace(way, score_ids=()), RowSampling(score_ids=[3])]
    scored, one, none, silent = sampled([way, *others], [9, 9, 9, 9], None)
    assert scored.scores == pytest.approx([exact[9], exact[0], -math.inf, -math.inf], abs=1e-5)
    assert one.scores == pytest.approx([exact[3]], abs=1e-5)
    assert (list(none.scores), list(silent.scores)) == ([], [])


def test_a_token_that_is_computed_again_is_not_counted_again() -> None:
    sampler = Sampler(len(LOGITS), CPU)
    sampler.open(0, RowSampling(temperature=0, frequency_penalty=1.0), [3, 3, 3], [])
    tokens = [3, 3, 3]
    for position in range(3, 9):
        tokens.append(sampler.sample(torch.tensor([LOGITS]), [(0, position)], {})[0].token)
        sampler.count(0, position - 2, tokens[position - 2 :])
        sampler.count(0, position, tokens[position:])
    assert tokens[3:] == [3, 0, 9, 3, 6, 2]


def test_a_slot_keeps_nothing_of_its_last_sequence() -> None:
    sampler = Sampler(len(LOGITS), CPU)
    sampler.open(0, RowSampling(temperature=0, presence_penalty=2.0, logit_bias={1: 50.0}), [], [3])
    assert sampler.sample(torch.tensor([LOGITS]), [(0, 1)], {})[0].token == 1
    sampler.close(0)
    sampler.close(0)
    sampler.open(0, RowSampling(temperature=0), [], [])
    assert sampler.sample(torch.tensor([LOGITS]), [(0, 1)], {})[0].token == 3


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {}, {"top_p": 0.5}])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(way: dict[str, Any], wrong: float) -> None:
    sampler = Sampler(len(LOGITS), CPU)
    sampler.open(0, RowSampling(**way), [], [])
    with pytest.raises(FloatingPointError):
        sampler.sample(torch.tensor([[*LOGITS[:-1], wrong]]), [(0, 1)], {})


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest() -> None:
    sampler = Sampler(40, CPU)
    sampler.open(0, RowSampling(temperature=0), [], [])
    assert sampler.sample(torch.arange(40.0).unsqueeze(0), [(0, 1)], {0: b"\xff\x07"})[0].token == 10
