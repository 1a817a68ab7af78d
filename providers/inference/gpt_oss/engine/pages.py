"""PagePool: which pages of the key-value memory are free."""

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers. A page that was taken has one owner, a sequence or the prefix tree, until given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free_pages = list(range(count - 1, -1, -1))
        self._is_allocated = bytearray(count)

    @property
    def free_count(self) -> int:
        return len(self._free_pages)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, which must be free. Those given back last come first: caches may know them still."""
        assert count <= len(self._free_pages), f"{count} pages wanted, {len(self._free_pages)} free"
        if count == 0:
            return []
        pages = self._free_pages[-count:]
        del self._free_pages[-count:]
        for page in pages:
            self._is_allocated[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Each page becomes free; it must be taken."""
        for page in pages:
            assert self._is_allocated[page], f"page {page} is free already"
            self._is_allocated[page] = 0
            self._free_pages.append(page)
