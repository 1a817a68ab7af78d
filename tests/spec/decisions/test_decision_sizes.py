"""Decisions that repeat one part up to a limit: the event loop is free for others in between."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.spec.responses.test_adversarial_sizes import MAX_TURN_S, load_all, longest_turn
from tests.support.servers.serving import serving

EVEN = {"provider": "tests.support.models.even_decisions:Even"}
ITEMS, QUESTIONS, OPTIONS = 5_000, 400, 50


def predicates(count: int) -> list[dict[str, Any]]:
    return [{"type": "predicate", "instructions": f"Is it {number}?"} for number in range(count)]


def choices(count: int, options: int) -> list[dict[str, Any]]:
    values = [{"value": f"option {number}"} for number in range(options)]
    return [{"type": "choice", "instructions": "Which?", "choices": values} for _ in range(count)]


def items(count: int) -> list[dict[str, Any]]:
    calls = [{"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"} for at in range(count // 2)]
    return [*calls, *({"type": "function_call_output", "call_id": f"c{at}", "output": "x"} for at in range(count // 2))]


def parts(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": f"text {at}"} for at in range(count)]}]


TURNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "items": lambda share: {"input": items(ITEMS // share), "questions": predicates(1)},
    "parts": lambda share: {"input": parts(ITEMS // share), "questions": predicates(1)},
    "questions": lambda share: {"input": "hi", "questions": predicates(QUESTIONS // share)},
    "choices": lambda share: {"input": "hi", "questions": choices(QUESTIONS // share, OPTIONS)},
}


@pytest.mark.parametrize("kind", TURNS)
async def test_many_parts_of_a_decision_leave_turns_of_the_event_loop_to_others(kind: str) -> None:
    async with serving(EVEN) as served:
        await load_all(served, "/v1/decisions", model="even", **TURNS[kind](100))
        assert await longest_turn(served, "/v1/decisions", model="even", **TURNS[kind](1)) < MAX_TURN_S


async def test_a_state_with_many_values_does_so_too() -> None:
    questions = {f"q{number}": {"type": "noul", "instructions": "Is it?"} for number in range(QUESTIONS)}
    body: dict[str, Any] = {"model": "even", "questions": questions}
    async with serving(EVEN) as served:
        await load_all(served, "/v1/systemone", **body, state={"numbers": [1]})
        assert await longest_turn(served, "/v1/systemone", **body, state={"numbers": [*range(50_000)]}) < MAX_TURN_S
