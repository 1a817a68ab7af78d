"""TenantRecords: records that tenants create, read, change and delete by their ids.

    TENANT/KIND/ID       a record
    TENANT/KIND_count    the number of them, so that a bound needs no listing; no key where there is none

The number changes in the write that adds or removes a record. One that is absent or damaged is counted again, and so is
one that reaches the bound, before anything is refused.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from apis.errors import StackError
from apis.storage.keys import record_id
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, encode_record, scan_all
from apis.wire.base import ListParams
from providers.common.state.change import change_existing, write_prepared
from providers.common.state.scan import decode_or_skip, read_page

RecordT = TypeVar("RecordT")
ShownT = TypeVar("ShownT")


class TenantRecords(Generic[RecordT]):
    """The records of one kind. `not_found` returns the error of an id that no record of the tenant has."""

    def __init__(
        self, kv: KVStore, kind: str, record_type: type[RecordT], not_found: Callable[[str], StackError]
    ) -> None:
        self._kv = kv
        self._kind = kind
        self._record_type = record_type
        self._not_found = not_found

    def key(self, tenant: str, name: str) -> str:
        """Return the key of the record with the id `name`; with an empty one, the prefix of all."""
        return f"{tenant}/{self._kind}/{name and record_id(name)}"

    async def create(
        self,
        tenant: str,
        name: str,
        record: RecordT,
        max_count: int,
        build_error: Callable[[int], StackError],
        also: Sequence[Op] = (),
    ) -> None:
        """Store a new record, and `also` in the same write. Raises the error that `build_error` returns for the number
        of records where there are `max_count`."""
        put = Put(self.key(tenant, name), encode_record(record), None, ABSENT)

        async def prepare() -> Sequence[Op]:
            return [put, await self.count_new(tenant, max_count, build_error), *also]

        await write_prepared(self._kv, prepare)

    async def get(self, tenant: str, name: str) -> Entry:
        """Return the entry of a record, which may be damaged. Raises the error of `not_found`."""
        entry = await self._kv.get(self.key(tenant, name))
        if entry is None:
            raise self._not_found(name)
        return entry

    async def load(self, tenant: str, name: str) -> RecordT:
        """Return a record. Raises the error of `not_found`, and StorageCorrupt."""
        return decode_record(await self.get(tenant, name), self._record_type)

    async def list(
        self,
        tenant: str,
        params: ListParams,
        show: Callable[[str, RecordT], ShownT],
        accepts: Callable[[RecordT], bool] | None = None,
    ) -> Page[ShownT]:
        """Return what `show` makes of the ids and the records of a page, as `read_page` does. Raises the error of
        `not_found` for an unknown cursor."""
        unknown_cursor = self._not_found(params.after or "")
        unknown_cursor.param = "after"
        prefix = self.key(tenant, "")
        return await read_page(self._kv, prefix, self._record_type, params, unknown_cursor, show, accepts)

    async def change(
        self,
        tenant: str,
        name: str,
        edit: Callable[[RecordT], RecordT],
        *,
        also: Callable[[RecordT], Sequence[Op]] = lambda _: (),
    ) -> RecordT:
        """Store the record that `edit` makes of the stored one, as `change_existing` does, and return it."""
        key, error = self.key(tenant, name), self._not_found(name)
        return await change_existing(self._kv, key, self._record_type, edit, error, also=also)

    async def delete(
        self, tenant: str, name: str, also: Callable[[RecordT | None], Sequence[Op]] = lambda _: ()
    ) -> None:
        """Delete a record, which may be damaged and then is None for `also`, whose operations are in the same write.
        Raises the error of `not_found`."""

        async def prepare() -> Sequence[Op]:
            entry = await self.get(tenant, name)
            record = decode_or_skip(self._kv, self.key(tenant, name), entry, self._record_type)
            return [*await self.build_delete_ops(tenant, name, entry), *also(record)]

        await write_prepared(self._kv, prepare)

    async def build_delete_ops(self, tenant: str, name: str, entry: Entry) -> Sequence[Op]:
        """Return the operations that delete a record on the condition of its version, and count one record less."""
        count, version = await self._load_count(tenant)
        key = self._count_key(tenant)
        counted = Put(key, encode_record(count - 1), expect=version) if count > 1 else Delete(key, version)
        return Delete(self.key(tenant, name), entry.version), counted

    async def count_new(self, tenant: str, max_count: int, build_error: Callable[[int], StackError]) -> Put:
        """Return the operation that counts one record more, on the condition that nothing was counted since. Raises
        the error that `build_error` returns for the number of records where there are `max_count`."""
        count, version = await self._load_count(tenant)
        if count >= max_count:
            count = await self._count_stored(tenant)
            if count >= max_count:
                raise build_error(count)
        return Put(self._count_key(tenant), encode_record(count + 1), expect=version)

    async def _load_count(self, tenant: str) -> tuple[int, int]:
        """Return the number of records, and the version of its entry."""
        key = self._count_key(tenant)
        entry = await self._kv.get(key)
        count = None if entry is None else decode_or_skip(self._kv, key, entry, int)
        if count is None:
            count = await self._count_stored(tenant)
        return count, ABSENT if entry is None else entry.version

    async def _count_stored(self, tenant: str) -> int:
        return len([key async for key, _ in scan_all(self._kv, self.key(tenant, ""))])

    def _count_key(self, tenant: str) -> str:
        return f"{tenant}/{self._kind}_count"
