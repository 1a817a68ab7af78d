"""Copies of stores in memory: as they were at a tick, brought up to date by what changed since."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from apis.vector_index import AttributeValue
from providers.vector_index.segments import Piece, Row, bytes_to_row, rows_to_pieces, tidied


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a store's changes, in their order."""

    stamp: bytes
    tick: int
    """The store's own when the page was read, both."""
    rows: Sequence[int]
    seen: int
    """The last tick of what there is in the page, and of what is gone."""
    new: Sequence[bytes]
    """Those of the rows that were not known before."""
    attributes: Sequence[bytes]
    gone: Sequence[int]
    gone_seen: int

    @classmethod
    def from_answer(cls, answer: Sequence[Any]) -> "Page":
        stamp, tick, rows, seen, new, attributes, gone, gone_seen = answer
        given = bytes(attributes).split(b"\n") if rows else []
        return cls(stamp, int(tick), _names(rows), int(seen), new, given, _names(gone), int(gone_seen))


@dataclass(frozen=True, slots=True)
class Copy:
    """A store's rows as of a stamp and its tick; nothing for a store that is not there."""

    generation: bytes | None = None
    stamp: bytes | None = None
    tick: int = 0
    pieces: Sequence[Piece] = ()

    @property
    def size_bytes(self) -> int:
        return 1000 + sum(piece.size_bytes for piece in self.pieces)

    def changed(self, pages: Iterable[Page]) -> "Copy":
        """The copy as of the last page. Heavy: for a thread."""
        rows: dict[int, Row] = {}
        given: dict[int, Mapping[str, AttributeValue]] = {}
        gone: set[int] = set()
        stamp, tick = self.stamp, self.tick
        for page in pages:
            attributes = _decoded(page.attributes)
            named = dict(zip(page.rows, attributes, strict=True))
            given |= named
            new = [name for name in page.rows if name > self.tick]
            rows |= {name: bytes_to_row(stored, named[name]) for name, stored in zip(new, page.new, strict=True)}
            gone.update(page.gone)
            stamp, tick = page.stamp, page.tick
        left = {name: row for name, row in rows.items() if name not in gone}
        pieces = [piece.changed(given, gone) for piece in self.pieces] if given or gone else list(self.pieces)
        return Copy(self.generation, stamp, tick, tidied([*pieces, *rows_to_pieces(left)]))


def page_to_pieces(page: Page) -> list[Piece]:
    """A page by itself, of which nothing was known before."""
    each = zip(page.rows, page.new, _decoded(page.attributes), strict=True)
    return rows_to_pieces({name: bytes_to_row(stored, attributes) for name, stored, attributes in each})


class Copies:
    """The copies last searched, of `most_bytes` together."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._held: OrderedDict[str, tuple[Copy, int]] = OrderedDict()
        self._size_bytes = 0

    def get(self, store: str) -> Copy:
        """The store's copy; an empty one where there is none."""
        if store not in self._held:
            return Copy()
        self._held.move_to_end(store)
        return self._held[store][0]

    def put(self, store: str, copy: Copy) -> None:
        """Keep it, or nothing of the store where the copy is of none."""
        _, old_bytes = self._held.pop(store, (None, 0))
        self._size_bytes -= old_bytes
        if copy.generation is not None:
            self._held[store] = copy, copy.size_bytes
            self._size_bytes += copy.size_bytes
        while self._size_bytes > self.most_bytes:
            _, (_, size_bytes) = self._held.popitem(last=False)
            self._size_bytes -= size_bytes

    def clear(self) -> None:
        self._held.clear()
        self._size_bytes = 0


def _names(text: bytes) -> list[int]:
    return [int(name) for name in text.split(b",")] if text else []


def _decoded(given: Sequence[bytes]) -> list[Mapping[str, AttributeValue]]:
    """Equal ones are one and the same."""
    distinct = {each: orjson.loads(each) for each in set(given)}
    return [distinct[each] for each in given]
