"""A step's rows as the kernels take them: singles, spans and padding, in few enough shapes that all are known before.

Singles are rows that attend by themselves: a sequence's one token, its guessed tokens, a few forced ones. Longer runs
of tokens are spans. A step of singles has a bucket's size, the singles of a mixed step too, and spans together a size
of SPAN_ROWS: so nothing is compiled while requests wait.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from providers.inference.gpt_oss.triton_backend.kernels.buffers import query_tiles

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SPAN_ROWS: Final = (64, 128, 256, 512, 1024, 2048)
SHORT: Final = 8
"""Up to so many tokens of a sequence are singles, where a bucket has room for them."""

TILE_STEP: Final = 16
ALIGNED: Final = 4
"""Each input begins at a multiple of 16 bytes: kernels are compiled for addresses that do."""


@dataclass(frozen=True, slots=True)
class Line:
    """Tokens of one slot to compute, at `start` and behind; -1 is what was sampled last. The last `sampled` of them are
    each followed by a token of its own choosing. `asks` says that their logits are wanted, for another to choose."""

    slot: int
    start: int
    tokens: Sequence[int]
    sampled: int
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """All that a step's launches depend on. Of `rows` tokens the first `singles` are such; `samples` may be sampled."""

    rows: int
    singles: int
    samples: int
    tiles: int = 0


@dataclass(slots=True)
class Batch:
    """What is written before a step. `samples` and `asked` are rows, in the order of the lines."""

    shape: Shape
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    positions: "array[int]" = field(default_factory=lambda: array("i"))
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    samples: "array[int]" = field(default_factory=lambda: array("i"))
    asked: "array[int]" = field(default_factory=lambda: array("i"))
    tiles: "array[int]" = field(default_factory=lambda: array("i"))

    def packed(self) -> "array[int]":
        """All inputs in one, each padded to its size in `places`."""
        rows, samples, tiles = self.shape.rows, self.shape.samples, 4 * self.shape.tiles
        packed = array("i")
        for values, size, filler in (
            (self.slots, rows, 0),
            (self.positions, rows, -1),
            (self.tokens, rows, -1),
            (self.samples, samples, -1),
            (self.asked, samples, -1),
            (self.tiles, tiles, 0),
        ):
            packed.extend(values)
            packed.extend([filler] * (_aligned(size) - len(values)))
        return packed


def places(shape: Shape) -> list[tuple[int, int]]:
    """Where each input of a packed batch begins and how many numbers it has: in `packed`'s order."""
    found: list[tuple[int, int]] = []
    at = 0
    for size in (shape.rows, shape.rows, shape.rows, shape.samples, shape.samples, 4 * shape.tiles):
        found.append((at, size))
        at += _aligned(size)
    return found


class Shapes:
    """The shapes of the steps of `slots` sequences with at most `step_tokens` tokens in spans."""

    def __init__(self, slots: int, step_tokens: int) -> None:
        wanted = max(slots, min(slots, 4) * SHORT)
        self.buckets = BUCKETS[: bisect_left(BUCKETS, wanted) + 1]
        last = bisect_left(SPAN_ROWS, step_tokens)
        self.spans = SPAN_ROWS[: last + 1] if last < len(SPAN_ROWS) else (*SPAN_ROWS, _multiple(step_tokens, 128))
        self._slots = slots

    @property
    def largest(self) -> Shape:
        """No shape is larger, in any way."""
        return self._shape(self.buckets[-1], self.spans[-1])

    def all(self) -> list[Shape]:
        """Every bucket, and of the mixed steps' the ends: those between them compile to the same."""
        mixed = [self._shape(singles, spans) for spans in self.spans for singles in (0, 1, self.buckets[-1])]
        return [Shape(each, each, each) for each in self.buckets] + mixed

    def batch(self, lines: Sequence[Line]) -> Batch:
        """The lines' rows. The lines' order is that of what is sampled."""
        longest = SHORT
        if sum(len(line.tokens) for line in lines if len(line.tokens) <= SHORT) > self.buckets[-1]:
            longest = 1
        counts = [len(line.tokens) for line in lines]
        singles = sum(count for count in counts if count <= longest)
        spans = sum(counts) - singles
        room = self.buckets[bisect_left(self.buckets, singles)] if singles else 0
        if spans:
            made = Batch(self._shape(room, self.spans[bisect_left(self.spans, spans)]))
        else:
            made = Batch(Shape(room, room, room))
        ends = [0] * len(lines)
        for index, line in enumerate(lines):
            if counts[index] <= longest:
                ends[index] = _add(made, line)
        if spans:
            _pad(made, room - singles)
        for index, line in enumerate(lines):
            if counts[index] > longest:
                ends[index] = end = _add(made, line)
                for tile in query_tiles(end - counts[index], counts[index], line.slot, line.start):
                    made.tiles.extend(tile)
        for line, end in zip(lines, ends, strict=True):
            (made.asked if line.asks else made.samples).extend(range(end - line.sampled, end))
        return made

    def _shape(self, singles: int, spans: int) -> Shape:
        # Every slot has at most one span, and a tile more than its tokens fill.
        tiles = _multiple(spans // 16 + self._slots, TILE_STEP)
        return Shape(singles + spans, singles, self.buckets[-1], tiles)


def _add(batch: Batch, line: Line) -> int:
    """Append the line's tokens; the row behind its last."""
    count = len(line.tokens)
    batch.slots.extend([line.slot] * count)
    batch.positions.extend(range(line.start, line.start + count))
    batch.tokens.extend(iter(line.tokens))  # an array extends no array of another width
    return len(batch.slots)


def _pad(batch: Batch, rows: int) -> None:
    batch.slots.extend([0] * rows)
    batch.positions.extend([-1] * rows)
    batch.tokens.extend([-1] * rows)


def _aligned(size: int) -> int:
    return _multiple(size, ALIGNED)


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit
