"""Pieces: some chunks of a store in memory, as arrays to search in. And the bytes in which a chunk is kept for them."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from apis.vector_index import AttributeValue, Chunk
from providers.vector_index.terms import text_to_terms

_HEAD: Final = struct.Struct("<5I")
"""The lengths of the file's name, of the vector and of the terms; the chunk's number; the words in its text."""
_MOST: Final = 65535
_SMALLEST: Final = 16

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk without its text, as it is read."""

    file: str
    number: int
    words: int
    attributes: Mapping[str, AttributeValue]
    vector: memoryview
    terms: memoryview
    times: memoryview


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows, of which those that are not `alive` are no more. `vectors` have the length 1, or are zeros.

    `terms` are sorted; the rows in which the term at `i` is are `holders[starts[i] : starts[i + 1]]`, and how often,
    `times` at the same places.
    """

    names: Ints
    alive: Bools
    files: Sequence[str]
    numbers: Sequence[int]
    attributes: Sequence[Mapping[str, AttributeValue]]
    vectors: Floats
    words: Ints
    terms: npt.NDArray[np.uint64]
    starts: Ints
    holders: npt.NDArray[np.int32]
    times: npt.NDArray[np.uint16]

    @property
    def rows(self) -> int:
        return int(np.count_nonzero(self.alive))

    @property
    def size_bytes(self) -> int:
        """Of the arrays; names of files and attributes are counted as what they usually take."""
        arrays = (self.names, self.alive, self.vectors, self.words, self.terms, self.starts, self.holders, self.times)
        return sum(array.nbytes for array in arrays) + 100 * len(self.names)

    def changed(self, attributes: Mapping[int, Mapping[str, AttributeValue]], gone: Iterable[int]) -> "Piece":
        """The piece with these rows' attributes, without those that are gone. Names that are not in it do nothing."""
        piece = self
        if (lost := self._positions(gone)).size:
            alive = self.alive.copy()
            alive[lost] = False
            piece = replace(piece, alive=alive)
        if (given := self._positions(attributes)).size:
            new = list(self.attributes)
            for position in _listed(given):
                new[position] = attributes[int(self.names[position])]
            piece = replace(piece, attributes=new)
        return piece

    def _positions(self, names: Iterable[int]) -> Ints:
        return np.flatnonzero(np.isin(self.names, np.fromiter(names, np.int64), assume_unique=True))


def vector_to_unit(vector: Sequence[float]) -> Floats:
    """The vector with the length 1, or zeros where it points nowhere."""
    given = np.asarray(vector, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        # By the largest first: squares may be too large for any float, or too small.
        given = given / (np.abs(given).max(initial=0.0) or 1.0)
        given = given / (np.linalg.norm(given) or 1.0)
    return np.nan_to_num(given, nan=0.0, posinf=0.0, neginf=0.0).astype("<f4")


def chunk_to_bytes(chunk: Chunk) -> bytes:
    """What is kept of the chunk, beside its attributes and its text."""
    file = chunk.file.encode()
    unit = vector_to_unit(chunk.vector)
    counted = text_to_terms(chunk.text)
    terms = sorted(counted)  # many sorted lists are sorted together sooner
    times = [min(counted[term], _MOST) for term in terms]
    head = _HEAD.pack(len(file), len(unit), len(terms), chunk.number, sum(counted.values()))
    return b"".join((head, file, unit.tobytes(), np.array(terms, "<u8").tobytes(), np.array(times, "<u2").tobytes()))


def bytes_to_row(stored: bytes, attributes: Mapping[str, AttributeValue]) -> Row:
    """The chunk that is kept so, with these attributes."""
    name_size, dimensions, terms, number, words = _HEAD.unpack_from(stored)
    ends = list(accumulate((_HEAD.size, name_size, 4 * dimensions, 8 * terms, 2 * terms)))
    view = memoryview(stored)
    name, vector, held, times = (view[low:high] for low, high in pairwise(ends))
    return Row(str(name, "utf-8"), number, words, attributes, vector, held, times)


def rows_to_pieces(rows: Mapping[int, Row]) -> list[Piece]:
    """Pieces of all the rows: one, where their vectors have one length."""
    lengths: dict[int, list[int]] = {}
    for name, row in rows.items():
        lengths.setdefault(len(row.vector), []).append(name)
    return [_piece(names, [rows[name] for name in names]) for names in lengths.values()]


def tidied(pieces: Sequence[Piece]) -> list[Piece]:
    """The same rows in few pieces, each more than twice as large as the next, and half of it alive."""
    tidy: list[Piece] = []
    for piece in pieces:
        tidy.append(piece)
        while len(tidy) > 1 and tidy[-2].rows <= 2 * tidy[-1].rows and _length(tidy[-2]) == _length(tidy[-1]):
            tidy[-2:] = [_merged(tidy[-2:])]
        last = tidy[-1]
        if not last.rows:
            tidy.pop()
        elif 2 * last.rows < len(last.names) - _SMALLEST:
            tidy[-1] = _merged([last])
    return tidy


def _length(piece: Piece) -> int:
    return piece.vectors.shape[1]


def _piece(names: Sequence[int], rows: Sequence[Row]) -> Piece:
    postings = [len(row.times) // 2 for row in rows]
    terms, starts, holders, times = _inverted(
        np.frombuffer(b"".join(row.terms for row in rows), "<u8"),
        np.repeat(np.arange(len(rows), dtype=np.int32), postings),
        np.frombuffer(b"".join(row.times for row in rows), "<u2"),
    )
    vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f4")
    return Piece(
        names=np.array(names, np.int64),
        alive=np.ones(len(rows), np.bool_),
        files=[row.file for row in rows],
        numbers=[row.number for row in rows],
        attributes=[row.attributes for row in rows],
        vectors=cast("Floats", vectors.reshape(len(rows), -1)),
        words=np.array([row.words for row in rows], np.int64),
        terms=terms,
        starts=starts,
        holders=holders,
        times=times,
    )


def _inverted(
    terms: npt.NDArray[Any], holders: npt.NDArray[np.int32], times: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.uint64], Ints, npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
    order = np.argsort(terms, kind="stable")
    ordered = terms[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))
    return ordered[starts], np.append(starts, len(terms)).astype(np.int64), holders[order], times[order]


def _merged(pieces: Sequence[Piece]) -> Piece:
    """One piece of what is alive in all."""
    kept = [_listed(np.flatnonzero(piece.alive)) for piece in pieces]
    held = [piece.alive[piece.holders] for piece in pieces]
    befores = accumulate((len(each) for each in kept), initial=0)
    moved = [np.cumsum(piece.alive) - 1 + before for piece, before in zip(pieces, befores, strict=False)]
    terms, starts, holders, times = _inverted(
        np.concatenate([np.repeat(p.terms, np.diff(p.starts))[held[i]] for i, p in enumerate(pieces)]),
        np.concatenate([moved[i][p.holders[held[i]]] for i, p in enumerate(pieces)]).astype(np.int32),
        np.concatenate([p.times[held[i]] for i, p in enumerate(pieces)]),
    )
    return Piece(
        names=np.concatenate([piece.names[piece.alive] for piece in pieces]),
        alive=np.ones(sum(len(each) for each in kept), np.bool_),
        files=[p.files[at] for p, places in zip(pieces, kept, strict=True) for at in places],
        numbers=[p.numbers[at] for p, places in zip(pieces, kept, strict=True) for at in places],
        attributes=[p.attributes[at] for p, places in zip(pieces, kept, strict=True) for at in places],
        vectors=np.concatenate([piece.vectors[piece.alive] for piece in pieces]),
        words=np.concatenate([piece.words[piece.alive] for piece in pieces]),
        terms=terms,
        starts=starts,
        holders=holders,
        times=times,
    )


def _listed(array: npt.NDArray[Any]) -> list[int]:
    return cast("list[int]", array.tolist())
