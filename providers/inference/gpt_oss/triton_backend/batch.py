"""StepShapes: lays out a step's rows for the kernels as singles, spans and padding, in a few shapes that are known in
advance.

Singles are rows that attend by themselves: a sequence's one token, its drafts, a few forced tokens. Longer runs of
tokens are spans. A step of singles has a bucket's size, the singles of a mixed step too, and spans together a size of
SPAN_ROWS: so nothing is compiled while requests wait.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from providers.inference.gpt_oss.triton_backend.kernels.buffers import query_tiles

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SPAN_ROWS: Final = (64, 128, 256, 512, 1024, 2048)
MAX_SINGLE_TOKENS: Final = 8
"""Up to this many tokens of a sequence are singles, where a bucket has room for them."""

TILE_COUNT_MULTIPLE: Final = 16
INPUT_ALIGNMENT: Final = 4
"""In int32 numbers: each input begins at a multiple of 16 bytes, as kernels are compiled for such addresses."""


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """Tokens of one slot to compute at positions `start`, `start + 1`, ...; -1 stands for the token that was sampled
    last. The last `sample_count` of them are each followed by a sampled token. `needs_logits` requests their logits
    instead, for the sampler in torch."""

    slot: int
    start: int
    tokens: Sequence[int]
    sample_count: int
    needs_logits: bool = False


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that a step's launches depend on. The first `singles` of `rows` tokens are singles; `samples` may be
    sampled."""

    rows: int
    singles: int
    samples: int
    tiles: int = 0


@dataclass(slots=True)
class TritonBatch:
    """Inputs to write before a step. `sample_rows` and `logit_rows` are rows, in the order of the slots' tokens."""

    shape: StepShape
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    positions: "array[int]" = field(default_factory=lambda: array("i"))
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    sample_rows: "array[int]" = field(default_factory=lambda: array("i"))
    logit_rows: "array[int]" = field(default_factory=lambda: array("i"))
    tiles: "array[int]" = field(default_factory=lambda: array("i"))

    def pack_inputs(self) -> "array[int]":
        """Return all inputs in one array, each padded to its size in `input_ranges`."""
        rows, samples, tiles = self.shape.rows, self.shape.samples, 4 * self.shape.tiles
        packed = array("i")
        for values, size, filler in (
            (self.slots, rows, 0),
            (self.positions, rows, -1),
            (self.tokens, rows, -1),
            (self.sample_rows, samples, -1),
            (self.logit_rows, samples, -1),
            (self.tiles, tiles, 0),
        ):
            packed.extend(values)
            packed.extend([filler] * (_align(size) - len(values)))
        return packed


def input_ranges(shape: StepShape) -> list[tuple[int, int]]:
    """Return the start and the size of each input of a packed batch, in the order of `pack_inputs`."""
    ranges: list[tuple[int, int]] = []
    at = 0
    for size in (shape.rows, shape.rows, shape.rows, shape.samples, shape.samples, 4 * shape.tiles):
        ranges.append((at, size))
        at += _align(size)
    return ranges


class StepShapes:
    """Shapes of the steps of `slots` sequences with at most `step_tokens` tokens in spans."""

    def __init__(self, slots: int, step_tokens: int) -> None:
        max_singles = max(slots, min(slots, 4) * MAX_SINGLE_TOKENS)
        self.buckets = BUCKETS[: bisect_left(BUCKETS, max_singles) + 1]
        last = bisect_left(SPAN_ROWS, step_tokens)
        self.spans = SPAN_ROWS[: last + 1] if last < len(SPAN_ROWS) else (*SPAN_ROWS, _round_up(step_tokens, 128))
        self._slots = slots

    @property
    def largest(self) -> StepShape:
        """The shape that is the largest in every size."""
        return self._mixed_shape(self.buckets[-1], self.spans[-1])

    def all_shapes(self) -> list[StepShape]:
        """Return every bucket, and of the mixed steps' shapes the ends: those between them compile to the same code."""
        mixed = [self._mixed_shape(singles, spans) for spans in self.spans for singles in (0, 1, self.buckets[-1])]
        return [StepShape(size, size, size) for size in self.buckets] + mixed

    def build_batch(self, slot_tokens: Sequence[SlotTokens]) -> TritonBatch:
        """Return the rows of `slot_tokens`. Sampled tokens are in the same order."""
        longest = MAX_SINGLE_TOKENS
        if sum(len(line.tokens) for line in slot_tokens if len(line.tokens) <= MAX_SINGLE_TOKENS) > self.buckets[-1]:
            longest = 1
        counts = [len(line.tokens) for line in slot_tokens]
        singles = sum(count for count in counts if count <= longest)
        spans = sum(counts) - singles
        padded_singles = self.buckets[bisect_left(self.buckets, singles)] if singles else 0
        if spans:
            batch = TritonBatch(self._mixed_shape(padded_singles, self.spans[bisect_left(self.spans, spans)]))
        else:
            batch = TritonBatch(StepShape(padded_singles, padded_singles, padded_singles))
        ends = [0] * len(slot_tokens)
        for index, line in enumerate(slot_tokens):
            if counts[index] <= longest:
                ends[index] = _append_tokens(batch, line)
        if spans:
            _append_padding(batch, padded_singles - singles)
        for index, line in enumerate(slot_tokens):
            if counts[index] > longest:
                ends[index] = end = _append_tokens(batch, line)
                for tile in query_tiles(end - counts[index], counts[index], line.slot, line.start):
                    batch.tiles.extend(tile)
        for line, end in zip(slot_tokens, ends, strict=True):
            (batch.logit_rows if line.needs_logits else batch.sample_rows).extend(range(end - line.sample_count, end))
        return batch

    def _mixed_shape(self, singles: int, spans: int) -> StepShape:
        # Every slot has at most one span, and a tile more than its tokens fill.
        tiles = _round_up(spans // 16 + self._slots, TILE_COUNT_MULTIPLE)
        return StepShape(singles + spans, singles, self.buckets[-1], tiles)


def _append_tokens(batch: TritonBatch, slot_tokens: SlotTokens) -> int:
    """Append the tokens of a slot and return the row after the last of them."""
    count = len(slot_tokens.tokens)
    batch.slots.extend([slot_tokens.slot] * count)
    batch.positions.extend(range(slot_tokens.start, slot_tokens.start + count))
    batch.tokens.extend(iter(slot_tokens.tokens))  # an array extends no array of another width
    return len(batch.slots)


def _append_padding(batch: TritonBatch, rows: int) -> None:
    batch.slots.extend([0] * rows)
    batch.positions.extend([-1] * rows)
    batch.tokens.extend([-1] * rows)


def _align(size: int) -> int:
    return _round_up(size, INPUT_ALIGNMENT)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
