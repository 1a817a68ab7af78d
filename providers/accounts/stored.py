"""StoredAccounts: keys in the KVStore, shared by all workers and machines, changed while the server runs."""

import logging
import secrets
import time
from typing import Final

from pydantic import Field

from apis.accounts.accounts import ADMIN_TENANT, Accounts, Caller, digest_key
from apis.accounts.directory import Project, StoredKey
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT
from apis.accounts.scopes import ADMIN_SCOPE, Grant, parse_project_scopes
from apis.errors import StorageCorrupt, StoreUnavailable
from apis.provider import Provider
from apis.storage.keys import is_safe_id
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.storage.records import decode_record, reading_stored
from providers.accounts.directory import StoredDirectory
from providers.accounts.key_cache import KeyCache
from providers.accounts.ledger import StoredLedger
from providers.accounts.limiter import StoredLimiter, read_limits
from providers.accounts.prices import ModelPrice, Prices
from providers.accounts.records import (
    ORGANIZATION_ID,
    SALT_KEY,
    digest_reference_key,
    last_use_key,
    limits_key,
    project_key,
    stored_key_key,
)
from providers.accounts.spending import StoredSpendLimits
from providers.accounts.usage_log import StoredUsageLog

_log = logging.getLogger(__name__)
_USE_INTERVAL_S: Final = 300.0
"""Seconds between two writes of a key's last use by one process."""
_USE_TTL_S: Final = 400 * 24 * 3600.0
_MAX_USES: Final = 10_000


class StoredAccounts(Accounts):
    """Projects and keys in the KVStore, managed by `stack keys` and OpenAI's routes below /v1/organization. A key is
    stored as a hash, may expire and be bound to scopes, and is refused everywhere within a second once revoked."""

    class Config(Provider.Config):
        """`usage_retention_days` is how long the sums of each hour are stored. `prices` are those of a million tokens
        by model, in `currency`."""

        usage_retention_days: float = Field(default=400, gt=0)
        prices: dict[str, ModelPrice] = Field(default_factory=dict[str, ModelPrice])
        currency: str = Field(default="usd", pattern=r"^[a-z]{3}$")

    def __init__(self, config: Config, kv_store: KVStore) -> None:
        self._kv = kv_store
        self._cache = KeyCache(self._read_caller)
        self._directory = StoredDirectory(kv_store)
        self._limiter = StoredLimiter(kv_store)
        self._currency = config.currency
        self._ledger = StoredLedger(kv_store, Prices(config.prices), config.usage_retention_days * 86_400)
        self._usage_log = StoredUsageLog(kv_store, self._ledger)
        self._spend_limits = StoredSpendLimits(kv_store, self._limiter, self._usage_log)
        self._salt_secret: bytes | None = None
        self._digests: dict[tuple[str, str], bytes] = {}
        self._uses_written_at: dict[str, float] = {}

    async def start(self) -> None:
        """Load the secret of the cache salts, which the first process of all creates."""
        await self._kv.write([Put(SALT_KEY, secrets.token_bytes(32), expect=ABSENT)])
        entry = await self._kv.get(SALT_KEY)
        if entry is None:
            raise StorageCorrupt
        self._salt_secret = entry.value
        self._ledger.start()

    async def close(self) -> None:
        await self._cache.close()
        await self._ledger.close()

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

    def directory(self) -> StoredDirectory:
        return self._directory

    def meter(self) -> StoredLedger:
        return self._ledger

    def limiter(self) -> StoredLimiter:
        return self._limiter

    def spend_limits(self) -> StoredSpendLimits:
        return self._spend_limits

    def usage_log(self) -> StoredUsageLog:
        return self._usage_log

    def currency(self) -> str:
        return self._currency

    def cache_salt_secret(self) -> bytes | None:
        return self._salt_secret

    async def _read_caller(self, digest: bytes) -> Caller | None:
        reference = await self._kv.get(digest_reference_key(digest.hex()))
        if reference is None:
            return None
        record_key = reference.value.decode()
        project_id = record_key.split("/")[-2]
        names = (record_key, project_key(project_id), limits_key(project_id), limits_key(ORGANIZATION_ID))
        key_entry, project_entry, limits_entry, organization_entry = await self._kv.get_many(names)
        if key_entry is None:
            return None
        with reading_stored(record_key):
            key = decode_record(key_entry, StoredKey)
        limits = read_limits(limits_entry)
        caller = Caller(project_id, key.id, _to_grant(key), key.expires_at, limits)
        whole, of_all = limits.get(WHOLE_PROJECT), read_limits(organization_entry).get(WHOLE_PROJECT)
        if of_all is not None and of_all.month_cost is not None:
            limits[ORGANIZATION] = of_all
        self._kv.bound_tenant(project_id, None if whole is None else whole.stored_bytes)
        if project_id != ADMIN_TENANT and not (project_entry and _is_active(decode_record(project_entry, Project))):
            return None
        if not caller.has_expired:
            await self._write_use(key.id)
        return caller

    async def _write_use(self, key_id: str) -> None:
        now = time.monotonic()
        if now - self._uses_written_at.get(key_id, -_USE_INTERVAL_S) < _USE_INTERVAL_S:
            return
        if len(self._uses_written_at) >= _MAX_USES:
            del self._uses_written_at[next(iter(self._uses_written_at))]
        self._uses_written_at[key_id] = now
        try:
            await self._kv.put(last_use_key(key_id), b"%d" % time.time(), ttl_s=_USE_TTL_S, durable=False)
        except StoreUnavailable as exc:
            _log.warning("the last use of the API key %s was not stored: %s", key_id, exc.message)


def _is_active(project: Project) -> bool:
    return project.archived_at is None


def _to_grant(key: StoredKey) -> Grant:
    return Grant(ADMIN_SCOPE) if key.project_id == ADMIN_TENANT else parse_project_scopes(key.scopes)
