"""Records in a KVStore: msgspec structs as JSON, encoded and decoded, and all entries below a prefix."""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec

from apis.errors import StorageCorrupt
from apis.storage.kv_store import Delete, Entry, KVStore

RecordT = TypeVar("RecordT")
PAGE_BYTES: Final = 8 * 1024 * 1024
"""Bytes of values from which a page of entries ends."""

_log = logging.getLogger(__name__)

encode_record = msgspec.json.Encoder().encode


def decode_record(entry: Entry, record_type: type[RecordT]) -> RecordT:
    """Return the record in the entry. Raises StorageCorrupt if it is damaged."""
    try:
        return _decoder(record_type).decode(entry.value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise StorageCorrupt from exc


@contextmanager
def reading_stored(name: str) -> Generator[None]:
    """Raise StorageCorrupt where the block cannot validate or decode stored bytes, which is a ValueError, and log it.
    `name` is for the log: the id or the key of what is read."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, StorageCorrupt) as exc:
        _log.error("what is stored of %r cannot be read: %s", name, type(exc).__name__, exc_info=exc.__cause__)
        raise StorageCorrupt from exc


@functools.cache
def _decoder(record_type: type) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(record_type)


async def scan_all(
    kv: KVStore, prefix: str, *, after: str = "", before: str = "", reverse: bool = False, page_size: int = 1000
) -> AsyncGenerator[tuple[str, Entry]]:
    """Yield all entries whose key begins with `prefix`, ordered by key, read in pages. `after`, `before` and `reverse`
    are those of `KVStore.scan`."""
    has_more = True
    while has_more:
        rows = await kv.scan(prefix, after=after, before=before, limit=page_size, reverse=reverse, max_bytes=PAGE_BYTES)
        has_more = len(rows) == page_size or sum(entry.max_stored_bytes for _, entry in rows) > PAGE_BYTES
        for row in rows:
            yield row
        if has_more:
            after, before = (after, rows[-1][0]) if reverse else (rows[-1][0], before)
            await asyncio.sleep(0)  # a store within the process answers without a pause


async def scan_groups(kv: KVStore, prefix: str, *, limit: int) -> AsyncGenerator[tuple[str, list[tuple[str, Entry]]]]:
    """Yield each name that follows `prefix` in a key, up to the next slash, with up to `limit` of its entries, ordered
    by key. One read per name, however many entries it has."""
    last_key = ""
    while rows := await kv.scan(prefix, after=last_key, limit=limit):
        name = rows[0][0][len(prefix) :].partition("/")[0]
        yield name, [row for row in rows if row[0].startswith(f"{prefix}{name}/")]
        last_key = f"{prefix}{name}/\U0010ffff"


async def delete_all(kv: KVStore, prefix: str, *, page_size: int = 1000, durable: bool = False) -> int:
    """Delete all entries whose key begins with `prefix`, in batches, not in one atomic step; return their number."""
    count = 0
    while rows := await kv.scan(prefix, limit=page_size, max_bytes=PAGE_BYTES):
        await kv.write([Delete(key) for key, _ in rows], durable=durable)
        count += len(rows)
    return count
