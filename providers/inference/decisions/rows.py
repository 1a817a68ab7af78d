"""The rows of a decision: one short prompt for each question and each order of its options."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from apis.chat import Message
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Usage
from apis.errors import ContextLengthExceeded, UpstreamError
from providers.inference.decisions.labels import Label
from providers.inference.decisions.prompts import build_messages

GOOD_MASS: Final = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LabelScores:
    """The scores that were read for one row: for each label a number in proportion to its probability; `mass` is the
    share of all probability that the labels had, None where it was not read."""

    weights: Sequence[float]
    mass: float | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One prompt, and the number of labels to score: the first of the model's. The first row of a decision reads the
    input, and the others find it in the cache of prefixes."""

    messages: Sequence[Message]
    label_count: int
    is_first: bool


ReadRow = Callable[[DecisionRow], Awaitable[LabelScores]]


def logprobs_to_scores(labels: Sequence[Label], logprobs: Sequence[float], usage: Usage) -> LabelScores:
    """Return the scores of labels from the log probabilities of all their tokens, in order. Raises UpstreamError where
    none of the tokens has a probability."""
    most = max(logprobs, default=-math.inf)
    if most == -math.inf:
        raise UpstreamError("The model gave no option of a question a probability.")
    each = iter(logprobs)
    weights = [math.fsum(math.exp(next(each) - most) for _ in label.token_ids) for label in labels]
    return LabelScores(weights, min(math.fsum(weights) * math.exp(most), 1.0), usage)


@dataclass(slots=True)
class _Sums:
    """The readings so far."""

    probabilities: list[list[float]]
    usage: Usage = Usage()  # noqa: RUF009 - frozen
    mass: float | None = None

    def add(self, at: int, order: Sequence[int], scores: LabelScores) -> None:
        total = math.fsum(scores.weights)
        if not (math.isfinite(total) and total > 0):
            raise UpstreamError("The model gave no option of a question a probability.")
        sums = self.probabilities[at]
        for option, label in enumerate(order):
            sums[option] += scores.weights[label] / total
        if scores.mass is not None:
            self.mass = scores.mass if self.mass is None else min(self.mass, scores.mass)
        self.usage = self.usage.plus(scores.usage)


async def decide_by_labels(
    request: DecisionRequest, labels: Sequence[str], read: ReadRow, *, parallel: int = 1, is_joined: bool = True
) -> Decisions:
    """Return the decisions of a model whose labels these are, at least as many as a question has options. After the
    first row, which reads the shared input, `parallel` rows are read at once. Raises the errors of `read`."""
    sums = _Sums([[0.0] * len(question.options) for question in request.questions])
    rows = _list_rows(request)

    async def read_next(*, is_first: bool = False) -> bool:
        """Read the next row; return false where there is none."""
        if (row := next(rows, None)) is None:
            return False
        at, order = row
        messages = build_messages(
            request, request.questions[at], [labels[label] for label in order], is_joined=is_joined
        )
        try:
            scores = await read(DecisionRow(messages, len(order), is_first))
        except ContextLengthExceeded as exc:
            raise ContextLengthExceeded(exc.message, param=request.input_param) from exc
        sums.add(at, order, scores)
        return True

    async def read_all() -> None:
        while await read_next():
            pass

    await read_next(is_first=True)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(read_all())
    except BaseExceptionGroup as exc:
        raise exc.exceptions[0] from exc
    _log_mass(request, sums.mass)
    averages = [[each / request.orders for each in question] for question in sums.probabilities]
    return Decisions(averages, sums.usage, sums.mass)


def _list_rows(request: DecisionRequest) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the index of each question with the label of each option, once for each order."""
    for at, question in enumerate(request.questions):
        count = len(question.options)
        yield at, range(count)
        if request.orders > 1:
            yield at, range(count - 1, -1, -1)


def _log_mass(request: DecisionRequest, mass: float | None) -> None:
    if mass is None:
        return
    level = logging.INFO if mass < GOOD_MASS else logging.DEBUG
    _log.log(
        level,
        "a decision of %s between %d questions had an option mass of %.3f%s",
        request.model,
        len(request.questions),
        mass,
        ": the model would rather write something else" if mass < GOOD_MASS else "",
    )
