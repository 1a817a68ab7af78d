"""The rows of a decision: their order, their labels, and what becomes of their readings."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from apis.chat import ImagePart, ImageUrl, TextPart
from apis.decisions import DecisionOption, DecisionQuestion, DecisionRequest
from apis.deltas import Usage
from apis.errors import ContextLengthExceeded, Unsupported, UpstreamError
from providers.inference.decisions.labels import find_labels, list_spellings, require_labels
from providers.inference.decisions.prompts import refuse_images
from providers.inference.decisions.rows import DecisionRow, LabelScores, decide_by_labels

LABELS = ("A", "B", "C")


def ask_for(*questions: Sequence[str], **fields: Any) -> DecisionRequest:
    all_questions = [
        DecisionQuestion(
            kind="choice",
            instructions=[TextPart(text=f"Question {at}?")],
            options=[DecisionOption(text=text) for text in options],
            param=f"questions[{at}]",
        )
        for at, options in enumerate(questions)
    ]
    return DecisionRequest(model="m", input=[TextPart(text="Input.")], questions=all_questions, **fields)


class Reader:
    """Reads each row as a model that likes the first label best."""

    def __init__(self, weights: Sequence[float] = (6, 3, 1)) -> None:
        self.weights = weights
        self.texts: list[str] = []
        self.running = self.most_running = 0

    async def read(self, row: DecisionRow) -> LabelScores:
        self.texts.append(str(row.messages[-1].content))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return LabelScores(self.weights[: row.label_count], 0.5 if row.is_first else 0.25, Usage(10, 1, 4))


async def test_each_question_is_a_row_and_its_weights_become_probabilities() -> None:
    reader = Reader()
    decisions = await decide_by_labels(ask_for("xyz", "pq"), LABELS, reader.read)
    assert decisions.probabilities == [pytest.approx([0.6, 0.3, 0.1]), pytest.approx([2 / 3, 1 / 3])]
    assert (decisions.usage, decisions.option_mass) == (Usage(20, 2, 8), 0.25)
    assert ["A: x\nB: y\nC: z" in reader.texts[0], "A: p\nB: q" in reader.texts[1]] == [True, True]


async def test_with_two_orders_a_model_of_one_place_has_no_preference() -> None:
    reader = Reader()
    decisions = await decide_by_labels(ask_for("xyz", orders=2), LABELS, reader.read)
    assert decisions.probabilities == [pytest.approx([0.35, 0.3, 0.35])]
    assert "A: x\nB: y\nC: z" in reader.texts[0]
    assert "A: z\nB: y\nC: x" in reader.texts[1]


async def test_the_first_row_is_read_alone_and_the_others_together() -> None:
    reader = Reader()
    began: list[tuple[bool, int]] = []

    async def read(row: DecisionRow) -> LabelScores:
        began.append((row.is_first, reader.running))
        return await reader.read(row)

    await decide_by_labels(ask_for(*["xy"] * 20), LABELS, read, parallel=4)
    assert began[:2] == [(True, 0), (False, 0)]
    assert reader.most_running == 4
    assert len(reader.texts) == 20


async def test_a_failure_ends_the_other_rows_and_is_raised_unchanged() -> None:
    ended: list[bool] = []

    async def read(row: DecisionRow) -> LabelScores:
        if row.is_first:
            return LabelScores([1, 1], None, Usage())
        if len(ended) == 0:
            ended.append(False)
            raise ContextLengthExceeded("Too long.")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        raise AssertionError

    with pytest.raises(ContextLengthExceeded, match="Too long") as caught:
        await decide_by_labels(ask_for(*["xy"] * 20), LABELS, read, parallel=4)
    assert caught.value.param == "input"
    assert ended == [False, True, True, True]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
async def test_a_reading_without_probabilities_is_an_error(weights: list[float]) -> None:
    with pytest.raises(UpstreamError):
        await decide_by_labels(ask_for("xy"), LABELS, Reader(weights).read)


def test_labels_are_texts_of_one_token() -> None:
    ids = {text: number for number, text in enumerate(list_spellings()) if text not in ("B", " C", "AB")}
    labels = {label.text: label.token_ids for label in find_labels(ids)}
    assert labels["A"] == (0, 1)
    assert labels["C"] == (4,)
    assert not {"B", "AB"} & labels.keys()
    assert len(labels) == 26 + 26**2 - 2


def test_a_question_with_too_many_options_is_named() -> None:
    request = ask_for("xyz", "pqrs")
    require_labels(4, request.questions, "so")
    with pytest.raises(Unsupported, match="3 options at most, and here are 4: so") as caught:
        require_labels(3, request.questions, "so")
    assert caught.value.param == "questions[1]"


def test_an_image_is_refused_by_its_place() -> None:
    image = ImagePart(image_url=ImageUrl(url="data:image/png;base64,AA"))
    request = ask_for("xy")
    refuse_images(request)
    with pytest.raises(Unsupported) as caught:
        refuse_images(request.model_copy(update={"input": [image]}))
    assert caught.value.param == "input"
    question = request.questions[0].model_copy(update={"instructions": [image]})
    with pytest.raises(Unsupported) as caught:
        refuse_images(request.model_copy(update={"questions": [question]}))
    assert caught.value.param == "questions[0].instructions"
