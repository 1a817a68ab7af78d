"""StoredAccounts: keys in the KVStore, shared by all workers and machines, changed while the server runs."""

import logging
import time
from typing import Final

from apis.accounts.accounts import ADMIN_TENANT, Caller, digest_key
from apis.accounts.directory import StoredKey
from apis.accounts.scopes import ADMIN_SCOPE, Grant, parse_project_scopes
from apis.errors import StorageCorrupt, StoreUnavailable
from apis.storage.keys import is_safe_id
from apis.storage.kv_store import KVStore
from apis.storage.records import decode_record, reading_stored
from providers.accounts.key_cache import KeyCache
from providers.accounts.organization import StoredProjectsConfig
from providers.accounts.project_state import project_record_keys, read_project
from providers.accounts.projects import StoredProjects
from providers.accounts.records import digest_reference_key, last_use_key, stored_key_key
from providers.common.recent import RecentEntries

_log = logging.getLogger(__name__)
_USE_INTERVAL_S: Final = 300.0
"""Seconds between two writes of a key's last use by one process."""
_USE_TTL_S: Final = 400 * 24 * 3600.0
_MAX_USES: Final = 10_000


class StoredAccounts(StoredProjects):
    """Projects and keys in the KVStore, managed by `stack keys` and OpenAI's routes below /v1/organization. A key is
    stored as a hash, may expire and be bound to scopes, and is refused everywhere within a second once revoked."""

    Config = StoredProjectsConfig

    def __init__(self, config: StoredProjectsConfig, kv_store: KVStore) -> None:
        super().__init__(config, kv_store)
        self._cache = KeyCache(self._read_caller)
        self._digests: dict[tuple[str, str], bytes] = {}
        self._uses_written_at = RecentEntries[str, float](_MAX_USES)

    async def close(self) -> None:
        await self._cache.close()
        await super().close()

    async def authenticate(self, key: bytes) -> Caller | None:
        if not key:
            return None
        caller = await self._cache.load(digest_key(key))
        return None if caller is None or caller.has_expired else caller

    async def find_caller(self, project_id: str, key_id: str) -> Caller | None:
        if not (is_safe_id(project_id) and is_safe_id(key_id)):
            return None
        digest = self._digests.get((project_id, key_id))
        if digest is None:
            entry = await self._kv.get(stored_key_key(project_id, key_id))
            if entry is None:
                return None
            if len(self._digests) >= _MAX_USES:
                self._digests.clear()
            digest = self._digests[project_id, key_id] = bytes.fromhex(decode_record(entry, StoredKey).digest)
        caller = await self._cache.load(digest)
        return None if caller is None or caller.has_expired else caller

    async def _read_caller(self, digest: bytes) -> Caller | None:
        reference = await self._kv.get(digest_reference_key(digest.hex()))
        if reference is None:
            return None
        with reading_stored(digest_reference_key(digest.hex())):
            record_key = reference.value.decode()
            project_id, _, key_id = record_key.removeprefix(stored_key_key("", "")[:-1]).partition("/")
            if record_key != stored_key_key(project_id, key_id):
                raise StorageCorrupt
        key_entry, *project_entries = await self._kv.get_many((record_key, *project_record_keys(project_id)))
        if key_entry is None:
            return None
        with reading_stored(record_key):
            key = decode_record(key_entry, StoredKey)
        project = read_project(self._kv, project_id, project_entries)
        self._bound_stored_bytes(project)
        if project_id != ADMIN_TENANT and not project.is_active:
            return None
        caller = project.build_caller(key.id, _to_grant(key), key.expires_at)
        if not caller.has_expired:
            await self._write_use(key.id)
        return caller

    async def _write_use(self, key_id: str) -> None:
        now = time.monotonic()
        if now - self._uses_written_at.get(key_id, -_USE_INTERVAL_S) < _USE_INTERVAL_S:
            return
        self._uses_written_at[key_id] = now
        try:
            await self._kv.put(last_use_key(key_id), b"%d" % time.time(), ttl_s=_USE_TTL_S, durable=False)
        except StoreUnavailable as exc:
            _log.warning("the last use of the API key %s was not stored: %s", key_id, exc.message)


def _to_grant(key: StoredKey) -> Grant:
    return Grant(ADMIN_SCOPE) if key.project_id == ADMIN_TENANT else parse_project_scopes(key.scopes)
