"""RecordCount: the number of a tenant's records of one kind, under a key of its own, so that a bound needs no listing.

The number changes in the write that adds or removes a record.
"""

from collections.abc import Callable

from apis.errors import StackError
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.records import encode_record, scan_all
from providers.common.state.scan import decode_or_skip


class RecordCount:
    """The number of the records whose keys begin with `prefix`, stored under `key`. One that is absent or damaged is
    counted again, and so is one that reaches the bound, before anything is refused."""

    def __init__(self, kv: KVStore, key: str, prefix: str) -> None:
        self._kv = kv
        self._key = key
        self._prefix = prefix

    async def build_add_op(self, max_count: int, build_error: Callable[[int], StackError]) -> Put:
        """Return the operation that counts one record more, on the condition that nothing was counted since. Raises
        the error that `build_error` returns for the number of records where there are `max_count`."""
        count, version = await self._load()
        if count >= max_count:
            count = await self._count()
            if count >= max_count:
                raise build_error(count)
        return Put(self._key, encode_record(count + 1), expect=version)

    async def build_remove_op(self) -> Op:
        """Return the operation that counts one record less, on the condition that nothing was counted since. The number
        of no record is not stored."""
        count, version = await self._load()
        return Put(self._key, encode_record(count - 1), expect=version) if count > 1 else Delete(self._key, version)

    async def _load(self) -> tuple[int, int]:
        entry = await self._kv.get(self._key)
        count = None if entry is None else decode_or_skip(self._kv, self._key, entry, int)
        if count is None:
            count = await self._count()
        return count, ABSENT if entry is None else entry.version

    async def _count(self) -> int:
        return len([key async for key, _ in scan_all(self._kv, self._prefix)])
