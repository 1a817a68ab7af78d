"""SealedRecords: records of other parts of the server that are encrypted, and which key all that is encrypted is under.

A record is encrypted as a whole, so that it can be encrypted again by what knows nothing of its contents.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from apis.errors import StorageCorrupt
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.records import scan_all
from providers.common.state.change import write_prepared
from providers.common.state.scan import skipping_damaged
from providers.vaults.records import SEALED_PREFIX, CredentialRef, SealedSecrets, note_key, parse_credential_key
from providers.vaults.sealing import SecretSealer, UnsealFailed

_log = logging.getLogger(__name__)
_MARK: Final = b"\0"
"""First byte of an encrypted record; no JSON begins with it."""


class SealedRecords:
    """The encrypted records of one store. For each, a note has the id of its key."""

    def __init__(self, kv: KVStore, sealer: SecretSealer) -> None:
        self._kv = kv
        self._sealer = sealer

    def build_put(self, data: bytes, key: str, expect: int | None) -> Sequence[Op]:
        """Return the operations that store data under the first key."""
        sealed = _MARK + msgspec.msgpack.encode(self._sealer.seal_bytes(data, ["record", key]))
        return [Put(key, sealed, None, expect), Put(note_key(key), self._sealer.primary_key_id.encode())]

    def unseal(self, sealed: bytes, key: str) -> bytes:
        """Return the data of a record. Raises StorageCorrupt, and logs the reason."""
        try:
            secret = msgspec.msgpack.decode(sealed.removeprefix(_MARK), type=SealedSecrets)
            return self._sealer.unseal_bytes(secret, ["record", key])
        except (msgspec.MsgspecError, UnsealFailed) as exc:
            _log.error("the record %s cannot be decrypted: %s", key, exc)
            raise StorageCorrupt from exc

    async def reseal(self, reseal_credential: Callable[[CredentialRef], Awaitable[bool]]) -> None:
        """Encrypt all that is encrypted under another than the first key under the first one."""
        count = 0
        async with aclosing(self._list_key_ids()) as notes:
            async for key, key_id in notes:
                if key_id != self._sealer.primary_key_id:
                    ref = parse_credential_key(key)
                    count += await (self._reseal(key) if ref is None else reseal_credential(ref))
        if count:
            _log.info("%d credentials and records are now encrypted under the first key", count)

    async def _reseal(self, key: str) -> bool:
        async def prepare() -> Sequence[Op] | None:
            entry, note = await self._kv.get_many([key, note_key(key)])
            if note is None or note.value.decode(errors="replace") == self._sealer.primary_key_id:
                return None
            if entry is None or not entry.value.startswith(_MARK):  # it was deleted, or is not encrypted any more
                return [Delete(note_key(key), note.version)]
            return self.build_put(self.unseal(entry.value, key), key, entry.version)

        with skipping_damaged(self._kv, key, "an encrypted record"):
            return await write_prepared(self._kv, prepare)
        return False

    async def count_by_key(self) -> dict[str, int]:
        """Return how many credentials and records are encrypted under which key."""
        counts: dict[str, int] = {}
        async with aclosing(self._list_key_ids()) as notes:
            async for _, key_id in notes:
                counts[key_id] = counts.get(key_id, 0) + 1
        return counts

    async def _list_key_ids(self) -> AsyncGenerator[tuple[str, str]]:
        """Yield the key of each credential and record that is encrypted, with the id of the key that it is under."""
        async with aclosing(scan_all(self._kv, SEALED_PREFIX)) as rows:
            async for key, entry in rows:
                key_id = ""
                with skipping_damaged(self._kv, key, "the id of a key"):
                    key_id = entry.value.decode(errors="replace")
                yield key.removeprefix(SEALED_PREFIX), key_id
