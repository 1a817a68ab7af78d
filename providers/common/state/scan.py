"""Scans of records that go on after a damaged one: it is skipped, logged and counted, and only its owner notices.

All code that reads many records decodes them here. A request for one record decodes it with `decode_record` and fails.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from apis.errors import StackError, StorageCorrupt
from apis.storage.keys import record_id
from apis.storage.kv_store import STORED_OVERHEAD_BYTES, Entry, KVStore
from apis.storage.pages import Page, first_page
from apis.storage.records import PAGE_BYTES, decode_record, scan_all
from apis.wire.base import ListParams
from providers.common.counters import DAMAGED_RECORDS

RecordT = TypeVar("RecordT")
ShownT = TypeVar("ShownT")

_log = logging.getLogger(__name__)
_MAX_LOOKED_AT: Final = 1000
"""Records that one page of a filtered listing looks at."""
_MAX_REPORTED: Final = 10_000
"""Damaged keys that a process remembers, so that it reports each of them once."""
_reported_keys: WeakKeyDictionary[KVStore, dict[str, None]] = WeakKeyDictionary()


class StoredRecord(NamedTuple, Generic[RecordT]):
    """A record of a scan, with its key and the version of its entry."""

    key: str
    record: RecordT
    version: int


async def scan_records(
    kv: KVStore,
    prefix: str,
    record_type: type[RecordT],
    *,
    after: str = "",
    before: str = "",
    reverse: bool = False,
    page_size: int = 1000,
) -> AsyncGenerator[StoredRecord[RecordT]]:
    """Yield the readable records of `scan_all`."""
    rows = scan_all(kv, prefix, after=after, before=before, reverse=reverse, page_size=page_size)
    async with aclosing(rows):
        async for key, entry in rows:
            record = decode_or_skip(kv, key, entry, record_type)
            if record is not None:
                yield StoredRecord(key, record, entry.version)


async def first_matches(
    rows: AsyncGenerator[StoredRecord[RecordT]], limit: int, accepts: Callable[[RecordT], bool] | None = None
) -> Page[StoredRecord[RecordT]]:
    """Return the first `limit` rows of a scan whose records `accepts` lets pass, and close the scan."""
    matches: list[StoredRecord[RecordT]] = []
    async with aclosing(rows):
        async for row in rows:
            if accepts is None or accepts(row.record):
                matches.append(row)
            if len(matches) > limit:
                break
    return first_page(matches, limit)


async def list_records(
    kv: KVStore, prefix: str, record_type: type[RecordT], *, limit: int, after: str = ""
) -> Sequence[StoredRecord[RecordT]]:
    """Return the first `limit` readable records after the key `after`, in one read of the store where none is
    damaged."""
    rows = scan_records(kv, prefix, record_type, after=after, page_size=limit + 1)
    return (await first_matches(rows, limit)).data


async def list_page(
    kv: KVStore,
    prefix: str,
    record_type: type[RecordT],
    cursor: str,
    *,
    order: Literal["asc", "desc"],
    limit: int,
    until: str = "",
) -> Page[StoredRecord[RecordT]]:
    """Return a page of the readable records that follow the key `cursor` in the order, up to the key `until`: `limit`
    of them, or as many as hold PAGE_BYTES together."""
    is_reversed = order == "desc"
    after, before = (until, cursor) if is_reversed else (cursor, until)
    records: list[StoredRecord[RecordT]] = []
    room_bytes = PAGE_BYTES
    while True:
        row_count = limit + 1 - len(records)
        rows = await kv.scan(
            prefix, after=after, before=before, limit=row_count, reverse=is_reversed, max_bytes=max(1, room_bytes)
        )
        are_last = len(rows) < row_count
        for key, entry in rows:
            record = decode_or_skip(kv, key, entry, record_type)
            if record is None:
                are_last = False  # how many bytes it has is not known
                continue
            if len(records) == limit or room_bytes <= 0:
                return Page(records, has_more=True)
            records.append(StoredRecord(key, record, entry.version))
            room_bytes -= len(entry.value) + STORED_OVERHEAD_BYTES
        if not rows or (are_last and room_bytes > 0):
            return Page(records)
        after, before = (after, rows[-1][0]) if is_reversed else (rows[-1][0], before)


async def list_matching(
    kv: KVStore,
    prefix: str,
    record_type: type[RecordT],
    cursor: str,
    *,
    order: Literal["asc", "desc"],
    limit: int,
    accepts: Callable[[RecordT], bool] | None,
) -> Page[StoredRecord[RecordT]]:
    """Return a page as `list_page` does; with `accepts`, of those records for which that returns True. Such a page may
    have fewer than there are: it looks at a bounded number of records, and its `last_id` is the id of the last one."""
    if accepts is None:
        return await list_page(kv, prefix, record_type, cursor, order=order, limit=limit)
    page = await list_page(kv, prefix, record_type, cursor, order=order, limit=_MAX_LOOKED_AT)
    rows = [row for row in page.data if accepts(row.record)]
    if len(rows) > limit:
        return Page(rows[:limit], has_more=True, last_id=rows[limit - 1].key.removeprefix(prefix))
    return Page(rows, page.has_more, page.data[-1].key.removeprefix(prefix) if page.has_more else None)


async def find_cursor(kv: KVStore, prefix: str, after: str | None, unknown_cursor: StackError) -> str:
    """Return the key of the record with the id that a client has sent as the cursor of a listing; empty where it has
    sent none. Raises `unknown_cursor` where there is no such record."""
    if after is None:
        return ""
    key = prefix + record_id(after)
    if await kv.get(key) is None:
        raise unknown_cursor
    return key


async def read_page(
    kv: KVStore,
    prefix: str,
    record_type: type[RecordT],
    params: ListParams,
    unknown_cursor: StackError,
    show: Callable[[str, RecordT], ShownT],
    accepts: Callable[[RecordT], bool] | None = None,
) -> Page[ShownT]:
    """Return what `show` makes of the ids and the records of a page, which is that of `list_matching`. Raises
    `unknown_cursor` where no record has the id of the cursor."""
    cursor = await find_cursor(kv, prefix, params.after, unknown_cursor)
    page = await list_matching(kv, prefix, record_type, cursor, order=params.order, limit=params.limit, accepts=accepts)
    return page.map(lambda row: show(row.key.removeprefix(prefix), row.record))


def decode_or_skip(kv: KVStore, key: str, entry: Entry, record_type: type[RecordT]) -> RecordT | None:
    """Return the record of one row of a scan; None if it is damaged, which is logged and counted."""
    with skipping_damaged(kv, key, record_type.__name__):
        return decode_record(entry, record_type)
    return None


@dataclass(frozen=True, slots=True)
class _SkippedBlock:
    kv: KVStore
    key: str
    record_name: str

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_damage = isinstance(exc, msgspec.MsgspecError | ValueError | StorageCorrupt)
        if is_damage:
            report_damaged(self.kv, self.key, self.record_name, exc)
        return is_damage


def skipping_damaged(kv: KVStore, key: str, record_name: str) -> _SkippedBlock:
    """Leave the `with` block where it cannot decode or validate what is stored under `key`: that is logged and counted,
    and the work goes on after the block. `record_name` is for the log: the name of the record's type."""
    return _SkippedBlock(kv, key, record_name)


def report_damaged(kv: KVStore, key: str, record_name: str, exc: Exception) -> None:
    """Log and count a damaged record, once in this process."""
    keys = _reported_keys.setdefault(kv, {})
    if key in keys:
        return
    if len(keys) >= _MAX_REPORTED:
        keys.clear()
    keys[key] = None
    DAMAGED_RECORDS.add()
    _log.error(
        "the stored record %r (%s) is damaged and is skipped: %s. Delete or restore it.",
        key,
        record_name,
        exc.__cause__ or exc,
    )
