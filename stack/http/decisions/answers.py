"""The answers of the Decisions API, in the shape of the openai SDK's `Decision`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, assert_never

from apis.decisions import Decisions
from apis.deltas import Usage
from apis.wire.decisions import ChoiceQuestion, CreateDecision, PredicateQuestion, Question, ScoreQuestion

JsonObject = dict[str, Any]


def build_decision(request: CreateDecision, decisions: Decisions) -> JsonObject:
    """Return the object that answers the request."""
    answers = [
        _build_answer(question, probabilities)
        for question, probabilities in zip(request.questions, decisions.probabilities, strict=True)
    ]
    return {"model": request.model, "answers": answers, "usage": build_usage(decisions.usage)}


def apply_temperature(decisions: Decisions, temperature: float) -> Decisions:
    """Return the decisions with the probabilities that logits divided by this temperature have. Options keep their
    order."""
    if temperature == 1:
        return decisions
    probabilities = [None if each is None else _temper(each, 1 / temperature) for each in decisions.probabilities]
    return replace(decisions, probabilities=probabilities)


def _temper(probabilities: Sequence[float], exponent: float) -> Sequence[float]:
    most = max(probabilities)
    weights = [(each / most) ** exponent for each in probabilities]
    total = math.fsum(weights)
    return [each / total for each in weights]


def find_confidence(probabilities: Sequence[float]) -> float:
    """Return 1 where one option has all the probability, and 0 where all options have the same: one minus the entropy,
    divided by that of equal probabilities."""
    entropy = -math.fsum(each * math.log(each) for each in probabilities if each > 0)
    return min(max(1 - entropy / math.log(len(probabilities)), 0.0), 1.0)


def find_likeliest(probabilities: Sequence[float]) -> int:
    """Return the index of the likeliest option, the first of those that are equal."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def find_score(probabilities: Sequence[float]) -> float:
    """Return the expected level, counted from 0."""
    return math.fsum(level * each for level, each in enumerate(probabilities))


def build_usage(usage: Usage) -> JsonObject:
    """Return the tokens of all prompts. Nothing says what a cache has written."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _build_answer(question: Question, probabilities: Sequence[float] | None) -> JsonObject:
    if probabilities is None:
        return {"type": "refusal", "name": question.name}
    match question:
        case PredicateQuestion():
            return {"type": "predicate", "name": question.name, "probability": probabilities[0]}
        case ChoiceQuestion():
            return {
                "type": "choice",
                "name": question.name,
                "choice": question.choices[find_likeliest(probabilities)].value,
                "confidence": find_confidence(probabilities),
                "probabilities": [
                    {"value": choice.value, "probability": each}
                    for choice, each in zip(question.choices, probabilities, strict=True)
                ],
            }
        case ScoreQuestion():
            return {
                "type": "score",
                "name": question.name,
                "score": find_score(probabilities),
                "confidence": find_confidence(probabilities),
                "probabilities": [
                    {"value": at, "label": level.label, "probability": each}
                    for at, (level, each) in enumerate(zip(question.levels, probabilities, strict=True))
                ],
            }
        case _:
            assert_never(question)
