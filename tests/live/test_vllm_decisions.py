"""Decisions of a chat model on a real vLLM: by its own route where it has one, and by the tokens of the labels."""

from typing import Any

import pytest

from tests.live.asking import PATIENCE_S
from tests.live.smollm2 import MODEL
from tests.support.servers.serving import Served

pytestmark = [pytest.mark.live, pytest.mark.timeout(2400, func_only=True)]

TICKET = "I was charged twice for my order and want one of the charges back."
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "The customer wants money back."},
    {"type": "choice", "instructions": "Topic?", "choices": [{"value": "billing"}, {"value": "bug"}]},
    {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]},
]


async def decide(served: Served, *questions: Any) -> Any:
    client: Any = served.client.with_options(timeout=PATIENCE_S)
    return await client.decisions.create(model=MODEL, input=TICKET, questions=list(questions))


async def test_each_kind_of_question_has_its_answer(served: Served) -> None:
    decision = await decide(served, *QUESTIONS)
    predicate, choice, score = decision.answers
    assert 0 < predicate.probability < 1
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
    assert 0 <= score.score <= 1
    assert decision.usage.input_tokens > 0


async def test_more_options_than_likeliest_tokens_have_probabilities_each(served: Served) -> None:
    """A text and a boolean that read alike are options of no route for decisions: the labels decide."""
    choices = [{"value": True}, {"value": "true"}, *({"value": f"n{number}"} for number in range(98))]
    (answer,) = (await decide(served, {"type": "choice", "instructions": "Which?", "choices": choices})).answers
    shares = [each.probability for each in answer.probabilities]
    assert len(shares) == 100
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(1)
