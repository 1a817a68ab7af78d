"""Block tables on the device, and a page for each slot beyond those that the engine gave it.

A step that is launched ahead, or that verifies guesses, may write behind a slot's last page. Each slot has a spare page
for that; when the engine gives it the page that belongs there, the two change places, and nothing is copied: pages have
other numbers here than for the engine.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS

NONE = -1


class BlockTables:
    """Over `tables` [slots, columns] int32, of a memory with `pages` and a page more for every slot."""

    def __init__(self, tables: Tensor, pages: int) -> None:
        slots, self._columns = tables.shape
        self._flat = tables.view(-1)
        self._place_of = list(range(pages))
        self._spares = list(range(pages, pages + slots))
        self._listed = [0] * slots
        self._borrowed = [NONE] * slots
        self._written: dict[int, int] = {}

    def open(self, slot: int) -> None:
        """The slot has another sequence, of which no page is known."""
        self._listed[slot] = 0
        self._borrowed[slot] = NONE

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        """These are the slot's pages; the first of them it had before."""
        for column in range(self._listed[slot], len(pages)):
            page = pages[column]
            if column == self._borrowed[slot]:
                self._place_of[page], self._spares[slot] = self._spares[slot], self._place_of[page]
                self._borrowed[slot] = NONE
            else:
                self._write(slot, column, self._place_of[page])
        self._listed[slot] = max(self._listed[slot], len(pages))

    def reach(self, slot: int, position: int) -> None:
        """The slot is to have room up to `position`: at most a page more than it was given."""
        column = position // PAGE_TOKENS
        if column >= self._listed[slot] and column != self._borrowed[slot]:
            self._borrowed[slot] = column
            self._write(slot, column, self._spares[slot])

    def flush(self) -> None:
        """Bring the device's tables up to date, behind what it does already."""
        if not self._written:
            return
        pinned = self._flat.device.type == "cuda"
        changes = torch.tensor([[*self._written], [*self._written.values()]], pin_memory=pinned)
        places, pages = changes.to(self._flat.device, non_blocking=True)
        self._flat.index_copy_(0, places, pages.int())
        self._written.clear()

    def _write(self, slot: int, column: int, page: int) -> None:
        self._written[slot * self._columns + column] = page
