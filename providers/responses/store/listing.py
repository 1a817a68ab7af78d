"""Listings of stored records by the time of creation, with which their ids begin."""

from collections.abc import Callable
from typing import Final, TypeVar

from apis.storage.kv_store import Entry, KVStore
from apis.storage.pages import Page
from apis.wire.base import ListParams
from providers.common.state.scan import skipping_damaged

T = TypeVar("T")

_MAX_READ_ROWS: Final = 2000
"""Rows that one page reads at most: where few match the filters, it ends before it is full."""
_BATCH_ROWS: Final = 200
"""Rows of one read of the store; the first one reads a page."""
_BATCH_BYTES: Final = 4 * 1024 * 1024


async def read_listing(
    kv: KVStore,
    prefix: str,
    params: ListParams,
    accept: Callable[[str, Entry], T | None],
    record_name: str,
) -> Page[T]:
    """Return a page of the records that `accept` returns for ids and entries; their keys are `prefix` and an id. One
    that `accept` cannot decode is skipped, and logged with its `record_name`. The page's `last_id` is the last record
    that was read.
    """
    page: list[T] = []
    last_id, read_rows = None, 0
    key, row_count = "" if params.after is None else f"{prefix}{params.after}", params.limit + 1
    is_reversed = params.order == "desc"
    while True:
        bounds = ("", key) if is_reversed else (key, "")
        rows = await kv.scan(
            prefix, after=bounds[0], before=bounds[1], limit=row_count, reverse=is_reversed, max_bytes=_BATCH_BYTES
        )
        if not rows:
            return Page(page, last_id=last_id)
        for key, entry in rows:
            if len(page) == params.limit or read_rows == _MAX_READ_ROWS:
                return Page(page, has_more=True, last_id=last_id)
            read_rows += 1
            last_id = key.removeprefix(prefix)
            with skipping_damaged(kv, key, record_name):
                record = accept(last_id, entry)
                if record is not None:
                    page.append(record)
        row_count = _BATCH_ROWS
