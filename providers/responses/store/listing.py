"""Listings of stored records by the time of creation, with which their ids begin."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from apis.storage.kv_store import Entry, KVStore
from apis.storage.pages import Page
from providers.common.state.scan import skipping_damaged

T = TypeVar("T")

_MAX_READ_ROWS: Final = 2000
"""Rows that one page reads at most: where few match the filters, it ends before it is full."""
_BATCH_ROWS: Final = 200
"""Rows of one read of the store; the first one reads a page."""
_BATCH_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Listing:
    """The records of a store whose keys are `prefix` and an id; `record_name` is for the log."""

    kv: KVStore
    prefix: str
    record_name: str

    async def read_page(
        self,
        accept: Callable[[str, Entry], T | None],
        *,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
    ) -> Page[T]:
        """Return up to `limit` of the records that `accept` returns for ids and entries, after the id `after`. One that
        `accept` cannot decode is skipped.

        Its `last_id` is the last record that was read.
        """
        page: list[T] = []
        last_id, read_rows = None, 0
        async for record_id, entry in self._read(after, limit + 1, reverse=order == "desc"):
            if len(page) == limit or read_rows == _MAX_READ_ROWS:
                return Page(page, has_more=True, last_id=last_id)
            read_rows += 1
            last_id = record_id
            with skipping_damaged(self.kv, f"{self.prefix}{record_id}", self.record_name):
                record = accept(record_id, entry)
                if record is not None:
                    page.append(record)
        return Page(page, last_id=last_id)

    async def _read(self, cursor: str | None, row_count: int, *, reverse: bool) -> AsyncGenerator[tuple[str, Entry]]:
        key = "" if cursor is None else f"{self.prefix}{cursor}"
        after, before = ("", key) if reverse else (key, "")
        while rows := await self.kv.scan(
            self.prefix, after=after, before=before, limit=row_count, reverse=reverse, max_bytes=_BATCH_BYTES
        ):
            for key, entry in rows:
                yield key.removeprefix(self.prefix), entry
            after, before = (after, rows[-1][0]) if reverse else (rows[-1][0], before)
            row_count = _BATCH_ROWS
