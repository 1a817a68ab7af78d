"""PagePool: the free pages of the key-value memory."""

from collections.abc import Iterable


class PagePool:
    """Allocates page numbers. An allocated page has one owner, a sequence or the prefix tree, until it is released."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free_pages = list(range(count - 1, -1, -1))
        self._is_allocated = bytearray(count)

    @property
    def free_count(self) -> int:
        return len(self._free_pages)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages, which must be free. The last released come first: a cache may still hold them."""
        assert count <= len(self._free_pages), f"{count} pages wanted, {len(self._free_pages)} free"
        if count == 0:
            return []
        pages = self._free_pages[-count:]
        del self._free_pages[-count:]
        for page in pages:
            self._is_allocated[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Free each page; all of them must be allocated."""
        for page in pages:
            assert self._is_allocated[page], f"page {page} is free already"
            self._is_allocated[page] = 0
            self._free_pages.append(page)
