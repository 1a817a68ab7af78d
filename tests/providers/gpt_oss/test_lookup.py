"""Prompt lookup: what is guessed, and when guessing is given up and tried again."""

from random import Random

from providers.inference.gpt_oss.checkpoint.synth import resized
from providers.inference.gpt_oss.triton_backend.prompt_lookup import COUNTS, Lookup, step_costs

CHEAP = [1.0] * 16
DEAR = [float(rows) for rows in range(16)]
LIKE_20B = resized(
    layers=("full_attention",) * 24, hidden=2880, intermediate=2880, heads=64, kv_heads=8, head_dim=64, experts=32,
    vocabulary=201088,
)  # fmt: skip


def test_what_followed_the_last_three_tokens_is_guessed() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert list(lookup.drafts(4)) == [4, 5, 6, 9]
    assert list(lookup.drafts(0)) == []
    lookup.extend(10, [4, 7, 1, 2, 3])
    assert list(lookup.drafts(2)) == [4, 7], "the last time counts"
    lookup.extend(15, [8])
    assert list(lookup.drafts(2)) == []


def test_what_repeats_itself_is_guessed_to_go_on() -> None:
    assert list(Lookup([5, 1, 2, 1, 2, 1]).drafts(5)) == [2, 1, 2, 1, 2]
    assert list(Lookup([7] * 4).drafts(7)) == [7] * 7
    assert list(Lookup([7] * 3).drafts(7)) == []
    assert list(Lookup([]).drafts(7)) == []


def test_tokens_that_are_known_are_not_looked_at_again() -> None:
    random = Random(1)
    tokens = [random.randrange(3) for _ in range(60)]
    whole, pieces = Lookup(tokens), Lookup(tokens[:10])
    for start in range(5, 60, 5):
        pieces.extend(start, tokens[start : start + 10])
    assert whole.drafts(7) == pieces.drafts(7)


def test_guesses_are_made_while_they_pay_and_tried_again_later() -> None:
    lookup = Lookup([1, 2, 3])
    assert lookup.worth(CHEAP, 1) == COUNTS[-1]
    assert lookup.worth(DEAR, 1) == 0
    for _ in range(12):
        lookup.learn(3, 0)
    assert lookup.worth(step_costs(LIKE_20B, 16), 1) == 0
    lookup.extend(3, [4] * 400)
    assert lookup.worth(step_costs(LIKE_20B, 16), 1) > 0
    for _ in range(12):
        lookup.learn(7, 7)
    assert lookup.worth(step_costs(LIKE_20B, 16), 1) == COUNTS[-1]
    assert lookup.worth(CHEAP[:3], 1) == 1, "no more rows than there are costs of"


def test_a_steps_cost_is_that_of_the_experts_it_touches() -> None:
    costs = step_costs(LIKE_20B, 8)
    shares = [costs[rows] / costs[1] for rows in (2, 3, 4, 6, 8)]
    assert [round(share, 2) for share in shares] == [1.3, 1.56, 1.79, 2.17, 2.46]
