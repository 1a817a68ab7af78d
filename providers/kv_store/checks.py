"""Checks of the arguments that every store makes, and the range of encoded keys of a scan."""

from collections.abc import Sequence

from apis.errors import StoredValueTooLarge
from apis.storage.kv_store import MAX_VALUE_BYTES, KVStore, Op, Put
from apis.storage.quota import StorageQuota

MAX_KEY_BYTES = 1024
MAX_TTL_S = 1e10


def encode_key(key: str) -> bytes:
    """Return the key as UTF-8, whose byte order is the order of code points. Raises ValueError for an invalid key."""
    encoded = key.encode()
    if not 0 < len(encoded) <= MAX_KEY_BYTES or 0 in encoded:
        raise ValueError(f"A key is 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL, not {key[:80]!r}.")
    return encoded


def encode_ops(ops: Sequence[Op]) -> dict[bytes, Op]:
    """Return `ops` by encoded key, in their order. Raises ValueError for an invalid or repeated key or `ttl_s`, and
    StoredValueTooLarge."""
    encoded = {encode_key(op.key): op for op in ops}
    if len(encoded) != len(ops):
        raise ValueError("A write may name each key only once.")
    for op in ops:
        if not isinstance(op, Put):
            continue
        if op.ttl_s is not None and not 0 < op.ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s must be above 0 and at most {MAX_TTL_S:.0f} seconds, not {op.ttl_s}.")
        if len(op.value) > MAX_VALUE_BYTES:
            raise StoredValueTooLarge(
                f"{len(op.value)} bytes cannot be stored as one value: at most {MAX_VALUE_BYTES}."
            )
    return encoded


def build_quota(store: KVStore, max_tenant_bytes: int | None) -> StorageQuota | None:
    """Return the quota of a store's tenants; None where there is no bound."""
    if max_tenant_bytes is None:
        return None
    return StorageQuota(store, max_tenant_bytes)


def scan_range(prefix: str, after: str, before: str, limit: int) -> tuple[bytes, bytes]:
    """Return the range of encoded keys of a scan: the inclusive lower and the exclusive upper bound."""
    if limit < 0:
        raise ValueError(f"limit must not be negative, not {limit}.")
    # No key holds NUL, so nothing lies between `after` and `after` NUL; no UTF-8 holds 0xFF, so it ends every prefix.
    low = max(prefix.encode(), after.encode() + b"\0")
    end = prefix.encode() + b"\xff"
    return low, min(end, before.encode()) if before else end
