"""Decisions: typed questions about one input, each answered by a probability of every option.

`apis/wire/decisions.py` has the requests of OpenAI's Decisions API and of the System One API of other servers. Both
become a `DecisionRequest`, which a provider answers with `Decisions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from apis.chat import ImagePart, TextPart
from apis.deltas import Usage
from apis.wire.base import Wire


class DecisionOption(Wire):
    """One option of a question."""

    text: str
    description: str = ""


class DecisionQuestion(Wire):
    """A question as models read it. The options of a predicate are yes and no, those of a score its levels, the
    lowest first. `param` is its place in the request."""

    kind: Literal["predicate", "choice", "score"]
    instructions: list[TextPart | ImagePart]
    options: list[DecisionOption]
    param: str


PREDICATE_OPTIONS: Final = ("yes", "no")


def predicate_options() -> list[DecisionOption]:
    """Return the options of a predicate: that it is true, and that it is not."""
    return [DecisionOption(text=text) for text in PREDICATE_OPTIONS]


class DecisionRequest(Wire):
    """Questions about one input. `instructions` are those of the developer. With two `orders` each question is read
    with its options in their order and in the reverse one, and the probabilities are averaged. `input_param` is the
    field that the input comes from."""

    model: str = Field(min_length=1, max_length=256)
    instructions: str = ""
    input: list[TextPart | ImagePart]
    input_param: str = "input"
    questions: list[DecisionQuestion] = Field(min_length=1)
    orders: int = 1
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Decisions:
    """For each question, in order, the probabilities of its options, which sum to 1; None for a question that the model
    refused. `option_mass` is the least share of all probability that the options of a question had before the others
    were left out, None where it is not known: below 0.5 the model would rather have written something else."""

    probabilities: Sequence[Sequence[float] | None]
    usage: Usage
    option_mass: float | None = None
