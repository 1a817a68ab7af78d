"""Pieces of a store, and how they are searched: what must not depend on how the chunks lie in them."""

import random

import numpy as np
import pytest

from apis.vector_index import Chunk, Search
from providers.vector_index.ranking import ByVector, ByWords, Hit, Ranking
from providers.vector_index.segments import Piece, bytes_to_row, chunk_to_bytes, rows_to_pieces, tidied, vector_to_unit
from providers.vector_index.terms import query_to_terms, text_to_terms

WORDS = ["the", "ships", "of", "whales", "and", "pears", "sail", "to", "red", "harbours"]


def pieces(chunks: list[Chunk], first: int = 1) -> list[Piece]:
    rows = enumerate((bytes_to_row(chunk_to_bytes(chunk), chunk.attributes) for chunk in chunks), start=first)
    return rows_to_pieces(dict(rows))


def chunks(count: int) -> list[Chunk]:
    dice = random.Random(count)
    return [
        Chunk(f"f{n % 3}", n, " ".join(dice.choices(WORDS, k=9)), {"n": n}, [dice.gauss(0, 1) for _ in range(8)])
        for n in range(count)
    ]


def ranked(ranking: Ranking, some: list[Piece]) -> list[Hit]:
    for nth in range(ranking.passes):
        for piece in some:
            ranking.look(piece, nth)
    return ranking.best()


def answers(some: list[Piece]) -> list[list[Hit]]:
    search, unit = Search("s", 30), vector_to_unit([1, 2, 3, 4, 5, 6, 7, 8])
    return [ranked(ByVector(search, unit), some), ranked(ByWords(search, query_to_terms("red ship")), some)]


def test_how_chunks_lie_in_pieces_does_not_show() -> None:
    given = chunks(60)
    whole = pieces(given)
    parts = [piece for start in range(0, 60, 7) for piece in pieces(given[start : start + 7], start + 1)]
    assert len(tidied(parts)) < len(parts)
    assert answers(whole) == answers(parts) == answers(tidied(parts))


def test_what_is_gone_is_not_counted_and_leaves_the_pieces_in_time() -> None:
    given = chunks(60)
    gone = [row for row in range(1, 61) if row % 3]
    left = [piece.changed({}, gone) for piece in pieces(given)]
    anew = rows_to_pieces(
        {row: bytes_to_row(chunk_to_bytes(given[row - 1]), given[row - 1].attributes) for row in range(3, 61, 3)}
    )
    assert answers(left) == answers(tidied(left)) == answers(anew)
    assert [len(piece.names) for piece in tidied(left)] == [20]
    assert tidied([piece.changed({}, range(1, 61)) for piece in left]) == []


def test_attributes_are_given_to_rows_by_their_names() -> None:
    (piece,) = pieces(chunks(5))
    changed = piece.changed({2: {"n": "new"}, 77: {"n": "of another piece"}}, [])
    assert [each["n"] for each in changed.attributes] == [0, "new", 2, 3, 4]
    assert [each["n"] for each in piece.attributes] == [0, 1, 2, 3, 4]


def test_equal_vectors_score_the_same_wherever_they_lie() -> None:
    dice = random.Random(2)
    vector = [dice.gauss(0, 1) for _ in range(383)]
    same = [Chunk(f"f{n:03}", 0, "", {}, [(1 + n % 5) * each for each in vector]) for n in range(200)]
    asked = vector_to_unit([dice.gauss(0, 1) for _ in range(383)])
    for some in (pieces(same), [piece for n, each in enumerate(same) for piece in pieces([each], n + 1)]):
        hits = ranked(ByVector(Search("s", 50), asked), some)
        assert [hit.file for hit in hits] == [f"f{n:03}" for n in range(50)]
        assert len({hit.score for hit in hits}) == 1


@pytest.mark.parametrize(
    ("vector", "unit"),
    [
        ([3.0, 4.0], [0.6, 0.8]),
        ([3e300, 4e300], [0.6, 0.8]),
        ([3e-320, 4e-320], [0.6, 0.8]),
        ([0.0, -0.0], [0.0, 0.0]),
        ([], []),
    ],
)
def test_a_vectors_length_says_nothing(vector: list[float], unit: list[float]) -> None:
    assert vector_to_unit(vector).tolist() == pytest.approx(unit, abs=1e-3 if max(vector, default=1) < 1e-300 else 1e-7)


@pytest.mark.parametrize("vector", [[float("nan"), 1.0], [float("inf"), 1.0]])
def test_what_is_no_number_points_nowhere_or_somewhere(vector: list[float]) -> None:
    assert np.isfinite(vector_to_unit(vector)).all()


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("ships", "A ship."),
        ("sailed sailing", "sails"),
        ("cafe", "Das CAFÉ"),
        ("école", "e\u0301cole"),
        ("ÉCOLE", "ecole"),
        ("1999", "in 1999."),
        ("the", "the"),
        ("snake", "snake_case"),
        ("слово", "СЛОВО"),
    ],
)
def test_words_are_found_in_other_forms(query: str, text: str) -> None:
    assert set(query_to_terms(query)) <= set(text_to_terms(text))


def test_terms_are_counted_under_all_their_forms() -> None:
    (ship,) = query_to_terms("ship")
    assert text_to_terms("Ship, ships: shipped!")[ship] == 3
    assert query_to_terms("what is the ship") == [ship]
    assert text_to_terms("") == {}
