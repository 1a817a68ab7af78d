"""Prompt lookup: what is guessed, and when guessing is given up and tried again."""

from random import Random

from providers.inference.gpt_oss.triton_backend.prompt_lookup import DRAFT_COUNTS, PromptLookup, step_costs
from tests.support.models.random_checkpoints import tiny_spec_with

CHEAP = [1.0] * 16
DEAR = [float(rows) for rows in range(16)]
LIKE_20B = tiny_spec_with(
    layers=("full_attention",) * 24, hidden=2880, intermediate=2880, heads=64, kv_heads=8, head_dim=64, experts=32,
    vocabulary=201088,
)  # fmt: skip


def test_the_tokens_after_the_last_three_are_drafted() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert list(lookup.propose_drafts(4)) == [4, 5, 6, 9]
    assert list(lookup.propose_drafts(0)) == []
    lookup.extend(10, [4, 7, 1, 2, 3])
    assert list(lookup.propose_drafts(2)) == [4, 7], "the last time counts"
    lookup.extend(15, [8])
    assert list(lookup.propose_drafts(2)) == []


def test_a_repetition_is_drafted_to_go_on() -> None:
    assert list(PromptLookup([5, 1, 2, 1, 2, 1]).propose_drafts(5)) == [2, 1, 2, 1, 2]
    assert list(PromptLookup([7] * 4).propose_drafts(7)) == [7] * 7
    assert list(PromptLookup([7] * 3).propose_drafts(7)) == []
    assert list(PromptLookup([]).propose_drafts(7)) == []


def test_tokens_that_are_known_are_not_looked_at_again() -> None:
    random = Random(1)
    tokens = [random.randrange(3) for _ in range(60)]
    whole, pieces = PromptLookup(tokens), PromptLookup(tokens[:10])
    for start in range(5, 60, 5):
        pieces.extend(start, tokens[start : start + 10])
    assert whole.propose_drafts(7) == pieces.propose_drafts(7)


def test_guesses_are_made_while_they_pay_and_tried_again_later() -> None:
    lookup = PromptLookup([1, 2, 3])
    assert lookup.best_draft_count(CHEAP, 1) == DRAFT_COUNTS[-1]
    assert lookup.best_draft_count(DEAR, 1) == 0
    for _ in range(12):
        lookup.record_drafts(3, 0)
    assert lookup.best_draft_count(step_costs(LIKE_20B, 16), 1) == 0
    lookup.extend(3, [4] * 400)
    assert lookup.best_draft_count(step_costs(LIKE_20B, 16), 1) > 0
    for _ in range(12):
        lookup.record_drafts(7, 7)
    assert lookup.best_draft_count(step_costs(LIKE_20B, 16), 1) == DRAFT_COUNTS[-1]
    assert lookup.best_draft_count(CHEAP[:3], 1) == 1, "no more rows than there are costs of"


def test_a_steps_cost_is_that_of_the_experts_it_touches() -> None:
    costs = step_costs(LIKE_20B, 8)
    shares = [costs[rows] / costs[1] for rows in (2, 3, 4, 6, 8)]
    assert [round(share, 2) for share in shares] == [1.3, 1.56, 1.79, 2.17, 2.46]
