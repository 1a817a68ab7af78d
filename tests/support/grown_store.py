"""Copies of what a server has stored, written in bulk by its own store: each record as the server writes it, with an id
of its own. So a store grows to any size in a time that has nothing to do with models."""

from collections.abc import Sequence
from typing import Final

from apis.storage.keys import new_id_key
from apis.storage.kv_store import KVStore, Op, Put
from apis.storage.records import decode_record, encode_record, scan_all
from providers.files.records import TenantUsage, usage_key
from providers.vector_stores.records import StoreRecord, store_key

_OPS_PER_WRITE: Final = 2000


async def load_records(kv: KVStore, tenant: str, id_key: str) -> dict[str, bytes]:
    """Return the records of a tenant whose keys or values name an object, which has `id_key` after its prefix."""
    return {
        key: entry.value
        async for key, entry in scan_all(kv, f"{tenant}/")
        if id_key in key and not key.startswith(f"{tenant}/idempotency")
    }


async def grow(kv: KVStore, records: dict[str, bytes], id_key: str, count: int, life_s: float | None) -> list[str]:
    """Write the records `count` times, each time with another id in the place of `id_key`; return these ids, oldest
    first. They expire after `life_s`."""
    old, id_keys = id_key.encode(), list[str]()
    ops: list[Op] = []
    for _ in range(count):
        id_keys.append(new := new_id_key())
        ops += [
            Put(key.replace(id_key, new), value.replace(old, new.encode()), life_s) for key, value in records.items()
        ]
        if len(ops) >= _OPS_PER_WRITE:
            await kv.write(ops, durable=False)
            ops.clear()
    if ops:
        await kv.write(ops, durable=False)
    return id_keys


async def count_grown_files(kv: KVStore, tenant: str, store_id: str, added: int) -> None:
    """Count files that were added by `grow` as the server counts those of a tenant and of a vector store."""
    usage_entry, store_entry = await kv.get_many([usage_key(tenant), store_key(tenant, store_id)])
    assert usage_entry is not None
    assert store_entry is not None
    usage, store = decode_record(usage_entry, TenantUsage), decode_record(store_entry, StoreRecord)
    each = usage.size // max(1, usage.files)
    store.file_counts["completed"] += added
    ops: Sequence[Op] = (
        Put(usage_key(tenant), encode_record(TenantUsage(usage.files + added, usage.size + each * added))),
        Put(store_key(tenant, store_id), encode_record(store)),
    )
    await kv.write(ops, durable=False)
