"""Pages of the vector stores of a tenant, and of the files of one, in the order in which they were added."""

from typing import Final, TypeVar

from apis.documents.vector_store_requests import VectorStoreFileListParams, VectorStoreListParams
from apis.storage.keys import record_id
from apis.storage.kv_store import KVStore
from apis.storage.pages import Page, first_page
from providers.common.state.scan import StoredRecord, decode_or_skip, first_matches, scan_records
from providers.vector_stores.records import (
    FileRecord,
    FileRef,
    StoreRecord,
    file_order_key,
    file_order_prefix,
    load_files,
    store_key,
)

RowT = TypeVar("RowT")
_FILTERED_ROWS: Final = 200
"""Files that one step of a listing with a filter reads."""


async def read_store_page(kv: KVStore, tenant: str, params: VectorStoreListParams) -> Page[StoredRecord[StoreRecord]]:
    """Return a page of the readable stores of a tenant: those between the stores `params.after` and `params.before`, or
    the last ones before `params.before` where only that is set. A cursor that is no store is ignored."""
    after, before = [await _find_store_key(kv, tenant, cursor) for cursor in (params.after, params.before)]
    low, high, is_reverse = _bounds(params, after, before)
    rows = scan_records(
        kv, store_key(tenant, ""), StoreRecord, after=low, before=high, reverse=is_reverse, page_size=params.limit + 1
    )
    return _in_order(params, await first_matches(rows, params.limit), before)


async def read_file_page(
    kv: KVStore, tenant: str, store_id: str, params: VectorStoreFileListParams
) -> Page[tuple[str, FileRecord]]:
    """Return a page of the readable files of a store, with their ids: those between the files `params.after` and
    `params.before`, or the last ones before `params.before` where only that is set. A cursor that is no file of the
    store is ignored."""
    after = await _find_order_key(kv, tenant, store_id, params.after)
    before = await _find_order_key(kv, tenant, store_id, params.before)
    low, high, is_reverse = _bounds(params, after, before)
    row_count = params.limit + 1 if params.filter is None else _FILTERED_ROWS
    files: list[tuple[str, FileRecord]] = []
    prefix = file_order_prefix(tenant, store_id)
    while len(files) <= params.limit:
        rows = await kv.scan(prefix, after=low, before=high, limit=row_count, reverse=is_reverse)
        if not rows:
            break
        low, high = (low, rows[-1][0]) if is_reverse else (rows[-1][0], high)
        ids_by_key = {key: key.rpartition("/")[2] for key, _ in rows}
        records_by_id = dict(await load_files(kv, tenant, store_id, list(dict.fromkeys(ids_by_key.values()))))
        for key, file_id in ids_by_key.items():
            record = records_by_id.get(file_id)
            # a file whose record was damaged when it was removed, or added again, has left its earlier key
            if record is None or key != file_order_key(FileRef(tenant, store_id, file_id), record):
                continue
            if params.filter in (None, record.status):
                files.append((file_id, record))
    return _in_order(params, first_page(files, params.limit), before)


def _bounds(params: VectorStoreListParams, after: str, before: str) -> tuple[str, str, bool]:
    """Return the keys between which a page is, the lower one first, and whether it is read from the higher one on."""
    is_descending = params.order == "desc"
    low, high = (before, after) if is_descending else (after, before)
    return low, high, is_descending != _ends_at(params, before)


def _in_order(params: VectorStoreListParams, page: Page[RowT], before: str) -> Page[RowT]:
    return Page(page.data[::-1], page.has_more) if _ends_at(params, before) else page


def _ends_at(params: VectorStoreListParams, before: str) -> bool:
    """Return true for a page of the last rows before a key."""
    return bool(before) and params.after is None


async def _find_store_key(kv: KVStore, tenant: str, store_id: str | None) -> str:
    key = store_key(tenant, record_id(store_id or ""))
    return "" if store_id is None or await kv.get(key) is None else key


async def _find_order_key(kv: KVStore, tenant: str, store_id: str, file_id: str | None) -> str:
    if file_id is None:
        return ""
    file_ref = FileRef(tenant, store_id, record_id(file_id))
    entry = await kv.get(file_ref.record_key)
    record = None if entry is None else decode_or_skip(kv, file_ref.record_key, entry, FileRecord)
    return "" if record is None else file_order_key(file_ref, record)
