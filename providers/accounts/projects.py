"""StoredProjects: projects, their limits and usage in the KVStore, whichever provider recognizes their keys."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from apis.accounts.accounts import Accounts, Caller
from apis.accounts.administration import Administration
from apis.accounts.directory import Project
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT, RateLimit
from apis.accounts.project_settings import ProjectSettings
from apis.accounts.scopes import Grant
from apis.errors import StorageCorrupt
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.directory import StoredDirectory
from providers.accounts.erasure import StoredProjectErasure
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.limiter import StoredLimiter, read_limits
from providers.accounts.prices import ModelPrice, Prices
from providers.accounts.project_settings import StoredProjectSettings, read_settings
from providers.accounts.records import ORGANIZATION_ID, SALT_KEY, limits_key, project_key, settings_key
from providers.accounts.spending import StoredSpendLimits
from providers.accounts.usage_log import StoredUsageLog


@dataclass(frozen=True, slots=True)
class ProjectState:
    """All that the store has of a tenant and that each of its callers gets. `project` is None for a tenant without a
    project, and for that of the administrators."""

    id: str
    project: Project | None
    limits: Mapping[str, RateLimit]
    settings: ProjectSettings

    @property
    def is_active(self) -> bool:
        """True if there is a project, and it is not archived."""
        return self.project is not None and self.project.archived_at is None

    def build_caller(self, key_id: str, grant: Grant, expires_at: float | None) -> Caller:
        """Return the caller with a key, or a token, of this tenant."""
        return Caller(self.id, key_id, grant, expires_at, self.limits, self.settings)


def project_record_keys(project_id: str) -> tuple[str, ...]:
    """Return the keys of the records that `read_project` takes, for one read together with others."""
    return project_key(project_id), limits_key(project_id), settings_key(project_id), limits_key(ORGANIZATION_ID)


def read_project(project_id: str, entries: Sequence[Entry | None]) -> ProjectState:
    """Return the state of a tenant from the records of `project_record_keys`. Raises StorageCorrupt."""
    project_entry, limits_entry, settings_entry, organization_entry = entries
    project = None if project_entry is None else decode_record(project_entry, Project)
    limits = read_limits(limits_entry)
    limit_of_all = read_limits(organization_entry).get(WHOLE_PROJECT)
    if limit_of_all is not None and limit_of_all.month_cost is not None:
        limits[ORGANIZATION] = limit_of_all
    return ProjectState(project_id, project, limits, read_settings(settings_entry))


class StoredProjectsConfig(Provider.Config):
    """`usage_retention_days` is how long the sums of each hour are stored, and `audit_retention_days` the records of
    administrative acts. `prices` are those of a million tokens by model, in `currency`."""

    usage_retention_days: float = Field(default=400, gt=0)
    audit_retention_days: float = Field(default=400, gt=0)
    prices: dict[str, ModelPrice] = Field(default_factory=dict[str, ModelPrice])
    currency: str = Field(default="usd", pattern=r"^[a-z]{3}$")


class StoredProjects(Accounts):
    """Accounts whose projects are in the KVStore; a subclass recognizes the keys. Several of one store, as in a chain,
    have the same directory, limits, usage and secret."""

    def __init__(self, config: StoredProjectsConfig, kv_store: KVStore) -> None:
        self._kv = kv_store
        audit_log = StoredAuditLog(kv_store, config.audit_retention_days)
        self._directory = StoredDirectory(kv_store, audit_log)
        self._administration = Administration(
            audit_log, StoredProjectSettings(kv_store, audit_log), StoredProjectErasure(kv_store, audit_log)
        )
        self._limiter = StoredLimiter(kv_store, audit_log)
        self._currency = config.currency
        self._ledger = StoredLedger(kv_store, Prices(config.prices), config.usage_retention_days * 86_400)
        self._usage_log = StoredUsageLog(kv_store, self._ledger)
        self._spend_limits = StoredSpendLimits(kv_store, self._limiter, self._usage_log)
        self._salt_secret: bytes | None = None

    async def start(self) -> None:
        """Load the secret of the cache salts, which the first process of all creates."""
        await self._kv.write([Put(SALT_KEY, secrets.token_bytes(32), expect=ABSENT)])
        entry = await self._kv.get(SALT_KEY)
        if entry is None:
            raise StorageCorrupt
        self._salt_secret = entry.value
        self._ledger.start()

    async def close(self) -> None:
        await self._ledger.close()

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

    def administration(self) -> Administration:
        return self._administration

    def cache_salt_secret(self) -> bytes | None:
        return self._salt_secret

    def _bound_stored_bytes(self, project: ProjectState) -> None:
        """Bound what the tenant may store, as its limits say now."""
        whole = project.limits.get(WHOLE_PROJECT)
        self._kv.bound_tenant(project.id, None if whole is None else whole.stored_bytes)
