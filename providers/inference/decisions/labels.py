"""Labels of options: texts that are one token each in the vocabulary of a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase
from typing import Final

from apis.decisions import DecisionQuestion
from apis.errors import Unsupported

FEW_LABELS: Final = "a label is one token, and its vocabulary has no more of them"
"""Why a model has no label for a further option."""
LABELS: Final = (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2)))
"""Texts that may be labels: A to Z, AA to ZZ."""


def spell_label(label: str) -> tuple[str, str]:
    """Return the texts that a model may write for a label: templates differ in the space before an answer."""
    return label, f" {label}"


@dataclass(frozen=True, slots=True)
class Label:
    """A label, and the ids of the tokens that spell it."""

    text: str
    token_ids: tuple[int, ...]


def find_labels(ids_by_text: Mapping[str, int]) -> tuple[Label, ...]:
    """Return the labels that are one token each, by the ids of the tokens that have their texts."""
    labels: list[Label] = []
    for text in LABELS:
        ids = tuple(ids_by_text[spelling] for spelling in spell_label(text) if spelling in ids_by_text)
        if text in ids_by_text:
            labels.append(Label(text, ids))
    return tuple(labels)


def list_spellings() -> Iterable[str]:
    """Yield the spellings of all labels."""
    for label in LABELS:
        yield from spell_label(label)


def require_labels(available: int, questions: Sequence[DecisionQuestion], reason: str) -> None:
    """Raise Unsupported, naming the first question that has more options than there are labels."""
    for question in questions:
        if (count := len(question.options)) > available:
            raise Unsupported(
                f"This model decides between {available} options at most, and here are {count}: {reason}.",
                param=question.param,
                code="array_above_max_length",
            )
