"""Due rows: a key for each thing that has something to do from some time on, in the order of these times.

    PREFIX/TIME/TENANT/ID    the attempts at it, a JobRecord; TIME in ms of Unix time

All that says which thing it is stands in the key, so a damaged value silences nothing.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, NamedTuple

from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put
from apis.storage.records import encode_record, scan_all
from providers.common.jobs import JobRecord

_PAGE_ROWS: Final = 256


class DueRow(NamedTuple):
    """A thing that is due, and the entry of its attempts."""

    tenant: str
    subject_id: str
    key: str
    entry: Entry


def move_due_row(prefix: str, tenant: str, subject_id: str, before: str, due_at: float | None) -> tuple[str, list[Op]]:
    """Return the key of the row for `due_at`, empty without one, and the operations that move the row there from the
    key `before`, empty for none."""
    key = "" if due_at is None else f"{prefix}{int(due_at * 1000):015d}/{tenant}/{subject_id}"
    if key == before:
        return key, []
    ops: list[Op] = [Delete(before)] if before else []
    if key:
        ops.append(Put(key, encode_record(JobRecord())))
    return key, ops


async def list_due_rows(kv: KVStore, prefix: str, now: float) -> AsyncGenerator[DueRow]:
    """Yield what is due, that which has been due the longest first."""
    end = f"{prefix}{int(now * 1000):015d}~"
    async with aclosing(scan_all(kv, prefix, before=end, page_size=_PAGE_ROWS)) as rows:
        async for key, entry in rows:
            _, tenant, subject_id = key.removeprefix(prefix).split("/", 2)
            yield DueRow(tenant, subject_id, key, entry)
