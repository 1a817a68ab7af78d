"""StoredProjects: projects, their limits and usage in the KVStore, whichever provider recognizes their keys."""

import secrets

from apis.accounts.accounts import Accounts
from apis.errors import StorageCorrupt
from apis.storage.kv_store import ABSENT, KVStore, Put
from providers.accounts.directory import StoredDirectory
from providers.accounts.limiter import StoredLimiter
from providers.accounts.records import SALT_KEY
from providers.accounts.usage_log import StoredUsageLog


class StoredProjects(Accounts):
    """Accounts whose projects are in the KVStore; a subclass recognizes the keys. Several of one store, as in a chain,
    have the same directory, limits, usage and secret."""

    def __init__(self, kv_store: KVStore, usage_retention_days: float) -> None:
        self._kv = kv_store
        self._directory = StoredDirectory(kv_store)
        self._limiter = StoredLimiter(kv_store)
        self._usage_log = StoredUsageLog(kv_store, usage_retention_days)
        self._salt_secret: bytes | None = None

    async def start(self) -> None:
        """Load the secret of the cache salts, which the first process of all creates."""
        await self._kv.write([Put(SALT_KEY, secrets.token_bytes(32), expect=ABSENT)])
        entry = await self._kv.get(SALT_KEY)
        if entry is None:
            raise StorageCorrupt
        self._salt_secret = entry.value

    async def close(self) -> None:
        await self._limiter.close()
        await self._usage_log.close()

    def directory(self) -> StoredDirectory:
        return self._directory

    def limiter(self) -> StoredLimiter:
        return self._limiter

    def usage_log(self) -> StoredUsageLog:
        return self._usage_log

    def cache_salt_secret(self) -> bytes | None:
        return self._salt_secret
