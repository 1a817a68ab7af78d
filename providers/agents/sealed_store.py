"""SealedStore: what agents' records hold that is confidential, in records of its own."""

import logging
from collections.abc import Sequence
from typing import Any

import orjson

from apis.errors import StorageCorrupt
from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put
from apis.storage.records import reading_stored
from apis.vaults.vaults import Vaults

Json = dict[str, Any]
_log = logging.getLogger(__name__)


class SealedStore:
    """Confidential JSON in the KVStore: encrypted where the server has `vaults`, else as it is."""

    def __init__(self, kv: KVStore, vaults: Vaults | None) -> None:
        self._kv = kv
        self._vaults = vaults

    def build_put(self, key: str, value: Json, expect: int | None = None) -> Sequence[Op]:
        """Return the operations that store a value."""
        data = orjson.dumps(value)
        return [Put(key, data, None, expect)] if self._vaults is None else self._vaults.build_put(data, key, expect)

    def build_delete(self, key: str) -> Sequence[Op]:
        """Return the operations that delete a value, if there is one."""
        return [Delete(key)] if self._vaults is None else self._vaults.build_delete(key)

    async def load(self, key: str) -> Json:
        """Return a value. Raises StorageCorrupt, also where there is none, or it cannot be decrypted."""
        entry = await self._kv.get(key)
        if entry is None:
            _log.error("the confidential record %s is missing", key)
            raise StorageCorrupt
        return self.read(key, entry)

    def read(self, key: str, entry: Entry) -> Json:
        """Return a stored value. Raises StorageCorrupt, also where it cannot be decrypted."""
        data = entry.value
        if not data.startswith(b"{"):
            if self._vaults is None:
                _log.error("the record %s is encrypted: put its key back into `vaults.keys`", key)
                raise StorageCorrupt
            data = self._vaults.unseal(data, key)
        with reading_stored(key):
            return orjson.loads(data)
