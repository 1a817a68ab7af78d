"""The chunks of a store's pieces that fit best: by their vectors, or by BM25 over their words."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from apis.vector_index import AttributeValue, Search
from apis.wire.tools import FileFilter
from providers.vector_index.filters import matches
from providers.vector_index.segments import Bools, Ints, Piece

_K1: Final = 1.2
_B: Final = 0.75
"""BM25's usual numbers, which SQLite has, too."""
_EPSILON: Final = float(np.finfo(np.float32).eps)
_RESCORED: Final = 4096
"""Rows at a time, in twice the bytes."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hit:
    score: float
    file: str
    number: int
    row: int
    attributes: Mapping[str, AttributeValue]


class Ranking(Protocol):
    """Looks at all pieces of a store, as often as it has `passes`; the same chunks each time."""

    passes: ClassVar[int]

    def look(self, piece: Piece, nth: int) -> None:
        """Look at one of the pieces, in the pass `nth` from 0."""
        ...

    def best(self) -> list[Hit]:
        """The best `search.limit` of all, best first."""
        ...


class ByVector:
    """By the cosine."""

    passes: ClassVar[int] = 1

    def __init__(self, search: Search, unit: npt.NDArray[np.float32]) -> None:
        """`unit` has the length 1, or is zeros."""
        self._search = search
        self._unit = unit
        self._hits: list[Hit] = []

    def look(self, piece: Piece, nth: int) -> None:
        if piece.vectors.shape[1] != len(self._unit):
            return
        left = _left(piece, self._search.filters)
        scores = (piece.vectors @ self._unit).astype(np.float64)
        # A product of matrices may round the same two vectors in different ways at different places. So it chooses
        # with what it can be wrong by, and then each is computed by itself.
        close = _best(scores, left, self._search.limit, 2 * _EPSILON * len(self._unit))
        steps = range(0, len(close), _RESCORED)
        exact = np.concatenate(
            [np.zeros(0), *(_cosines(piece, close[at : at + _RESCORED], self._unit) for at in steps)]
        )
        chosen = _best(exact, np.ones(len(exact), np.bool_), self._search.limit, 0.0)
        self._hits = _merged(self._hits, _hits(piece, close[chosen], exact[chosen]), self._search.limit)

    def best(self) -> list[Hit]:
        return self._hits


class ByWords:
    """By BM25. The first pass counts in how many chunks the words are, whatever the filters leave."""

    passes: ClassVar[int] = 2

    def __init__(self, search: Search, terms: Sequence[int]) -> None:
        self._search = search
        self._terms = np.array(terms, np.uint64)
        self._holders = np.zeros(len(terms), np.int64)
        self._rows = 0
        self._words = 0
        self._hits: list[Hit] = []

    def look(self, piece: Piece, nth: int) -> None:
        if nth == 0:
            self._rows += piece.rows
            self._words += int(piece.words[piece.alive].sum())
            for term, low, high in self._found(piece):
                self._holders[term] += np.count_nonzero(piece.alive[piece.holders[low:high]])
            return
        mean = self._words / self._rows if self._words else 1.0
        scores = np.zeros(len(piece.names))
        for term, low, high in self._found(piece):
            holders, times = piece.holders[low:high], piece.times[low:high].astype(np.float64)
            share = piece.words[holders] / mean
            rarity = math.log1p((self._rows - self._holders[term] + 0.5) / (self._holders[term] + 0.5))
            scores[holders] += rarity * times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * share))
        left = (scores > 0) & _left(piece, self._search.filters)
        chosen = _best(scores, left, self._search.limit, 0.0)
        self._hits = _merged(self._hits, _hits(piece, chosen, scores[chosen]), self._search.limit)

    def best(self) -> list[Hit]:
        return self._hits

    def _found(self, piece: Piece) -> Iterator[tuple[int, int, int]]:
        """Which of the terms are there, and where their holders begin and end."""
        if not len(piece.terms):
            return
        places = np.minimum(np.searchsorted(piece.terms, self._terms), len(piece.terms) - 1)
        for term in np.flatnonzero(piece.terms[places] == self._terms).tolist():
            yield term, int(piece.starts[places[term]]), int(piece.starts[places[term] + 1])


def _left(piece: Piece, filters: FileFilter | None) -> Bools:
    if filters is None:
        return piece.alive
    # Chunks of a file share their attributes: each is asked once.
    said = {id(given): given for given in piece.attributes}
    fits = {key: matches(filters, given) for key, given in said.items()}
    return piece.alive & np.fromiter((fits[id(given)] for given in piece.attributes), np.bool_, len(piece.attributes))


def _best(scores: Floats, left: Bools, limit: int, margin: float) -> Ints:
    """Where the `limit` highest scores are, of those that are `left`; all that are as high, or lower by the margin."""
    places = np.flatnonzero(left)
    if len(places) <= limit:
        return places
    if limit < 1:
        return places[:0]
    lowest = np.partition(scores[places], len(places) - limit)[len(places) - limit]
    return places[scores[places] >= lowest - margin]


def _cosines(piece: Piece, places: Ints, unit: npt.NDArray[np.float32]) -> Floats:
    """In float64, then as float32, in which alike is alike."""
    vectors = piece.vectors[places].astype(np.float64)
    asked = unit.astype(np.float64)
    norms = np.sqrt((vectors * vectors).sum(axis=1) * (asked * asked).sum())
    cosines = (vectors * asked).sum(axis=1) / np.where(norms > 0, norms, 1.0)
    return np.clip(cosines, -1.0, 1.0).astype(np.float32).astype(np.float64) + 0.0


def _hits(piece: Piece, places: Ints, scores: Floats) -> list[Hit]:
    return [
        Hit(score, piece.files[at], piece.numbers[at], int(piece.names[at]), piece.attributes[at])
        for at, score in zip(cast("list[int]", places.tolist()), cast("list[float]", scores.tolist()), strict=True)
    ]


def _merged(one: Sequence[Hit], other: Sequence[Hit], limit: int) -> list[Hit]:
    return sorted([*one, *other], key=lambda hit: (-hit.score, hit.file, hit.number))[:limit]
