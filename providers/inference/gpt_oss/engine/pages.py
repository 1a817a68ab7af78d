"""PagePool: which pages of the key-value memory are free."""

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers. A page that was taken has one owner, a sequence or the prefix tree, until given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._taken = bytearray(count)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, which must be free. Those given back last come first: caches may know them still."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._taken[page] = 1
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Each page becomes free; it must be taken."""
        for page in pages:
            assert self._taken[page], f"page {page} is free already"
            self._taken[page] = 0
            self._free.append(page)
