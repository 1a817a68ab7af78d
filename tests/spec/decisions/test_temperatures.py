"""`decisions.temperatures`: the probabilities of a model are scaled, by each of its names."""

from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from stack.config import StackConfig
from tests.support.servers.serving import MEMORY, Served, serving
from tests.support.servers.upstream_server import Answer, Received, UpstreamServer, json_answer

SHARES = (0.8, 0.2, 0.0)
ROOTS = (2 / 3, 1 / 3, 0.0)
"""The shares at a temperature of 2: their square roots, in proportion."""
CHOICE: dict[str, Any] = {"type": "choice", "instructions": "Which?", "choices": [{"value": each} for each in "abc"]}
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is it?"}


def answer(request: Received) -> Answer:
    """Answer with the same shares at every temperature, and refuse the last question by leaving it out."""
    choice = {"type": "choice", "probabilities": dict(zip("abc", SHARES, strict=True))}
    answers = {"q1": choice, "q2": {"type": "noul", "noul": 0.8}}
    return json_answer({"answers": answers, "usage": {"input_tokens": 9, "output_tokens": 2}})


async def decide(served: Served, model: str) -> Any:
    questions: Any = [CHOICE, PREDICATE, PREDICATE]
    return (await served.client.decisions.create(model=model, input="hi", questions=questions)).answers


@pytest.mark.parametrize(
    ("temperatures", "expected"),
    [
        ({}, {"m": SHARES, "alias": SHARES}),
        ({"other": 2}, {"m": SHARES, "alias": SHARES}),
        ({"m": 2}, {"m": ROOTS, "alias": ROOTS}),
        ({"alias": 2}, {"m": ROOTS, "alias": ROOTS}),
        ({"m": 2, "alias": 1}, {"m": ROOTS, "alias": SHARES}),
        ({"m": 0.001}, {"m": (1, 0, 0), "alias": (1, 0, 0)}),
        ({"m": 100}, {"m": (0.5035, 0.4965, 0), "alias": (0.5035, 0.4965, 0)}),
    ],
)
async def test_probabilities_are_scaled_by_the_temperature_of_the_model(temperatures: Any, expected: Any) -> None:
    async with UpstreamServer(models=["m"]) as upstream:
        upstream.routes["/v1/systemone"] = answer
        one = {"provider": "vllm", "base_url": upstream.base_url}
        router: Any = {"provider": "router", "providers": {"one": one}, "aliases": {"alias": "m"}}
        async with serving(router, more={"decisions": {"temperatures": temperatures}}) as served:
            for model, shares in expected.items():
                choice, predicate, refusal = await decide(served, model)
                assert [each.probability for each in choice.probabilities] == pytest.approx(shares, abs=1e-4)
                assert choice.choice == "a"
                assert predicate.probability == pytest.approx(shares[0], abs=1e-4)
                assert refusal.type == "refusal"
            async with httpx2.AsyncClient() as client:
                question = {"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys("abc")}
                body = {"model": "m", "state": "hi", "questions": {"q": question}}
                response = await client.post(f"{served.url}/v1/systemone", json=body)
    probabilities = response.json()["answers"]["q"]["probabilities"]
    assert [*probabilities.values()] == pytest.approx(expected["m"], abs=1e-4)


@pytest.mark.parametrize("temperature", [0, -1, 101, float("nan"), "hot"])
def test_a_temperature_that_is_none_is_refused_by_name(temperature: Any) -> None:
    section = {"temperatures": {"m": temperature}}
    with pytest.raises(ValidationError) as caught:
        StackConfig.model_validate({"inference": {"provider": "scripted"}, "kv_store": MEMORY, "decisions": section})
    assert caught.value.errors()[0]["loc"] == ("decisions", "temperatures", "m")
