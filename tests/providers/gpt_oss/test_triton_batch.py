"""A step's rows as the kernels take them, and block tables with a page to spare."""

from random import Random

import torch

from providers.inference.gpt_oss.triton_backend.batch import ALIGNED, Line, Shape, Shapes, places
from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, listed
from providers.inference.gpt_oss.triton_backend.pages import BlockTables


def test_singles_fill_a_bucket_and_short_runs_are_singles() -> None:
    batch = Shapes(8, 256).batch([Line(3, 9, [5], 1), Line(1, 4, [6, 7, 8], 1), Line(2, 0, [9, 9], 2)])
    assert batch.shape == Shape(8, 8, 8)
    assert (list(batch.slots), list(batch.positions)) == ([3, 1, 1, 1, 2, 2], [9, 4, 5, 6, 0, 1])
    assert (list(batch.samples), list(batch.asked), len(batch.tiles)) == ([0, 3, 4, 5], [], 0)


def test_spans_stand_behind_the_singles_and_their_padding() -> None:
    lines = [Line(0, 0, range(40), 0), Line(1, 7, [3], 1), Line(2, 5, range(20), 1, asks=True), Line(3, 1, [4], 1)]
    batch = Shapes(3, 256).batch([*lines, Line(4, 2, [5], 0)])
    assert batch.shape == Shape(4 + 64, 4, 24, 16)
    assert list(batch.positions)[:5] == [7, 1, 2, -1, 0]
    assert (list(batch.samples), list(batch.asked)) == ([0, 1], [4 + 59])
    assert [list(batch.tiles[at : at + 4]) for at in range(0, len(batch.tiles), 4)] == [
        [4, 16, 0, 0], [20, 16, 0, 16], [36, 8, 0, 32], [44, 16, 2, 5], [60, 4, 2, 21],
    ]  # fmt: skip


def test_packed_inputs_are_where_they_are_looked_for() -> None:
    shapes = Shapes(5, 512)
    for lines in ([Line(2, 3, [4], 1)], [Line(2, 3, [4, 5], 1, asks=True), Line(3, 0, range(99), 1)]):
        batch = shapes.batch(lines)
        packed = batch.packed()
        for (at, size), values, filler in zip(
            places(batch.shape),
            (batch.slots, batch.positions, batch.tokens, batch.samples, batch.asked, batch.tiles),
            (0, -1, -1, -1, -1, 0),
            strict=True,
        ):
            assert at % ALIGNED == 0
            assert list(packed[at : at + size]) == [*values, *[filler] * (size - len(values))]


def test_every_batch_has_a_shape_that_was_known_before() -> None:
    random = Random(2)
    for _ in range(200):
        slots, step_tokens = random.choice([1, 3, 8, 130]), random.choice([64, 300, 3000])
        shapes, left = Shapes(slots, step_tokens), step_tokens
        lines: list[Line] = []
        for slot in range(random.randint(1, slots)):
            count = min(random.choice([1, 1, 1, 2, 5, 9, 70, 2000]), left)
            if count:
                lines.append(Line(slot, 0, range(count), 1))
                left -= count
        shape, most = shapes.batch(lines).shape, shapes.largest
        assert shape.rows <= most.rows
        assert shape.tiles <= most.tiles
        assert shape.samples <= most.samples
        assert len(shapes.batch(lines).tiles) <= 4 * shape.tiles
        assert shape.singles == shape.rows or shape.rows - shape.singles in shapes.spans


def test_a_spare_page_changes_places_with_the_one_that_belongs_there() -> None:
    table = torch.full((2, 4), 99, dtype=torch.int32)
    blocks = BlockTables(table, 10)
    blocks.open(1)
    blocks.grow(1, [4])
    blocks.reach(1, PAGE_TOKENS - 1)
    blocks.flush()
    assert listed(table[1]) == [4, 99, 99, 99]
    blocks.reach(1, PAGE_TOKENS)
    blocks.flush()
    spare = int(table[1, 1])
    assert spare >= 10
    blocks.grow(1, [4, 7])
    blocks.reach(1, 2 * PAGE_TOKENS)
    blocks.flush()
    assert listed(table[1]) == [4, spare, 7, 99], "what was page 7 is to spare now"
    blocks.open(0)
    blocks.grow(0, [7, 4, 3])
    blocks.flush()
    assert listed(table[0]) == [spare, 4, 3, 99], "wherever the engine says 7, it means what it wrote there"


def test_no_two_pages_ever_share_a_place() -> None:
    random = Random(3)
    table = torch.zeros((3, 8), dtype=torch.int32)
    blocks = BlockTables(table, 24)
    pages: list[list[int]] = [[], [], []]
    free = list(range(24))
    for _ in range(300):
        slot = random.randrange(3)
        if random.random() < 0.2 or len(pages[slot]) == 7:
            free += pages[slot]
            pages[slot] = []
            blocks.open(slot)
        if random.random() < 0.6:
            blocks.reach(slot, len(pages[slot]) * PAGE_TOKENS)
        pages[slot].append(free.pop(random.randrange(len(free))))
        blocks.grow(slot, pages[slot])
        blocks.flush()
        held = [int(table[each, column]) for each in range(3) for column in range(len(pages[each]))]
        assert len(held) == len(set(held))
