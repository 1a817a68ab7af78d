"""BlockTables: block tables on the device, with a spare page for each slot beyond those that the engine allocated.

A step that is launched ahead, or that verifies drafts, may write after a slot's last page. Each slot has a spare page
for that; when the engine allocates the page that belongs there, the two change places, and nothing is copied: pages
have other numbers here than in the engine.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS

NO_COLUMN = -1


class BlockTables:
    """Writes `tables` [slots, columns] int32, over a memory with `pages` pages and one more for every slot."""

    def __init__(self, tables: Tensor, pages: int) -> None:
        slots, self._columns = tables.shape
        self._flat_tables = tables.view(-1)
        self._device_pages = list(range(pages))
        self._spare_pages = list(range(pages, pages + slots))
        self._listed_page_counts = [0] * slots
        self._spare_columns = [NO_COLUMN] * slots
        self._pending_writes: dict[int, int] = {}

    def open(self, slot: int) -> None:
        """Forget the pages of the slot's former sequence."""
        self._listed_page_counts[slot] = 0
        self._spare_columns[slot] = NO_COLUMN

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        """Set the slot's pages; the first of them are those it had before."""
        for column in range(self._listed_page_counts[slot], len(pages)):
            page = pages[column]
            if column == self._spare_columns[slot]:
                self._device_pages[page], self._spare_pages[slot] = self._spare_pages[slot], self._device_pages[page]
                self._spare_columns[slot] = NO_COLUMN
            else:
                self._set_page(slot, column, self._device_pages[page])
        self._listed_page_counts[slot] = max(self._listed_page_counts[slot], len(pages))

    def reserve_position(self, slot: int, position: int) -> None:
        """Give the slot room up to `position`: at most one page more than `grow` set."""
        column = position // PAGE_TOKENS
        if column >= self._listed_page_counts[slot] and column != self._spare_columns[slot]:
            self._spare_columns[slot] = column
            self._set_page(slot, column, self._spare_pages[slot])

    def write_tables(self) -> None:
        """Queue the changes of the device's tables after the work that the device has already."""
        if not self._pending_writes:
            return
        pinned = self._flat_tables.device.type == "cuda"
        changes = torch.tensor([[*self._pending_writes], [*self._pending_writes.values()]], pin_memory=pinned)
        places, pages = changes.to(self._flat_tables.device, non_blocking=True)
        self._flat_tables.index_copy_(0, places, pages.int())
        self._pending_writes.clear()

    def _set_page(self, slot: int, column: int, page: int) -> None:
        self._pending_writes[slot * self._columns + column] = page
