"""A step's rows as the kernels take them, and block tables with a page to spare."""

from random import Random

import torch

from providers.inference.gpt_oss.triton_backend.batch import (
    INPUT_ALIGNMENT,
    SlotTokens,
    StepShape,
    StepShapes,
    input_ranges,
)
from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, tensor_to_list
from providers.inference.gpt_oss.triton_backend.pages import BlockTables


def test_singles_fill_a_bucket_and_short_runs_are_singles() -> None:
    batch = StepShapes(8, 256).build_batch(
        [SlotTokens(3, 9, [5], 1), SlotTokens(1, 4, [6, 7, 8], 1), SlotTokens(2, 0, [9, 9], 2)]
    )
    assert batch.shape == StepShape(8, 8, 8)
    assert (list(batch.slots), list(batch.positions)) == ([3, 1, 1, 1, 2, 2], [9, 4, 5, 6, 0, 1])
    assert (list(batch.sample_rows), list(batch.logit_rows), len(batch.tiles)) == ([0, 3, 4, 5], [], 0)


def test_spans_stand_after_the_singles_and_their_padding() -> None:
    lines = [
        SlotTokens(0, 0, range(40), 0),
        SlotTokens(1, 7, [3], 1),
        SlotTokens(2, 5, range(20), 1, needs_logits=True),
        SlotTokens(3, 1, [4], 1),
    ]
    batch = StepShapes(3, 256).build_batch([*lines, SlotTokens(4, 2, [5], 0)])
    assert batch.shape == StepShape(4 + 64, 4, 24, 16)
    assert list(batch.positions)[:5] == [7, 1, 2, -1, 0]
    assert (list(batch.sample_rows), list(batch.logit_rows)) == ([0, 1], [4 + 59])
    assert [list(batch.tiles[at : at + 4]) for at in range(0, len(batch.tiles), 4)] == [
        [4, 16, 0, 0], [20, 16, 0, 16], [36, 8, 0, 32], [44, 16, 2, 5], [60, 4, 2, 21],
    ]  # fmt: skip


def test_packed_inputs_are_where_they_are_looked_for() -> None:
    shapes = StepShapes(5, 512)
    for lines in (
        [SlotTokens(2, 3, [4], 1)],
        [SlotTokens(2, 3, [4, 5], 1, needs_logits=True), SlotTokens(3, 0, range(99), 1)],
    ):
        batch = shapes.build_batch(lines)
        packed = batch.pack_inputs()
        for (at, size), values, filler in zip(
            input_ranges(batch.shape),
            (batch.slots, batch.positions, batch.tokens, batch.sample_rows, batch.logit_rows, batch.tiles),
            (0, -1, -1, -1, -1, 0),
            strict=True,
        ):
            assert at % INPUT_ALIGNMENT == 0
            assert list(packed[at : at + size]) == [*values, *[filler] * (size - len(values))]


def test_every_batch_has_a_shape_that_was_known_before() -> None:
    random = Random(2)
    for _ in range(200):
        slots, step_tokens = random.choice([1, 3, 8, 130]), random.choice([64, 300, 3000])
        shapes, remaining = StepShapes(slots, step_tokens), step_tokens
        lines: list[SlotTokens] = []
        for slot in range(random.randint(1, slots)):
            count = min(random.choice([1, 1, 1, 2, 5, 9, 70, 2000]), remaining)
            if count:
                lines.append(SlotTokens(slot, 0, range(count), 1))
                remaining -= count
        shape, most = shapes.build_batch(lines).shape, shapes.largest
        assert shape.rows <= most.rows
        assert shape.tiles <= most.tiles
        assert shape.samples <= most.samples
        assert len(shapes.build_batch(lines).tiles) <= 4 * shape.tiles
        assert shape.singles == shape.rows or shape.rows - shape.singles in shapes.spans


def test_a_spare_page_changes_places_with_the_one_that_belongs_there() -> None:
    table = torch.full((2, 4), 99, dtype=torch.int32)
    blocks = BlockTables(table, 10)
    blocks.open(1)
    blocks.grow(1, [4])
    blocks.reserve_position(1, PAGE_TOKENS - 1)
    blocks.write_tables()
    assert tensor_to_list(table[1]) == [4, 99, 99, 99]
    blocks.reserve_position(1, PAGE_TOKENS)
    blocks.write_tables()
    spare = int(table[1, 1])
    assert spare >= 10
    blocks.grow(1, [4, 7])
    blocks.reserve_position(1, 2 * PAGE_TOKENS)
    blocks.write_tables()
    assert tensor_to_list(table[1]) == [4, spare, 7, 99], "what was page 7 is to spare now"
    blocks.open(0)
    blocks.grow(0, [7, 4, 3])
    blocks.write_tables()
    assert tensor_to_list(table[0]) == [spare, 4, 3, 99], "wherever the engine says 7, it means what it wrote there"


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
            blocks.reserve_position(slot, len(pages[slot]) * PAGE_TOKENS)
        pages[slot].append(free.pop(random.randrange(len(free))))
        blocks.grow(slot, pages[slot])
        blocks.write_tables()
        device_pages = [int(table[each, column]) for each in range(3) for column in range(len(pages[each]))]
        assert len(device_pages) == len(set(device_pages))
