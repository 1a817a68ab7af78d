"""StoredProjects: projects, their limits and usage in the KVStore, whichever provider recognizes their keys."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import ConfigDict, Field

from apis.accounts.accounts import ADMIN_TENANT, Accounts, Caller
from apis.accounts.limits import WHOLE_PROJECT
from apis.accounts.organization import Organization
from apis.accounts.scopes import Grant
from apis.errors import ConfigError, StorageCorrupt
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, KVStore, Op, Put
from providers.accounts.alerts.alerting import SpendAlerting
from providers.accounts.alerts.settings import EmailConfig
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.directory import StoredDirectory
from providers.accounts.erasure import StoredProjectErasure
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.limiter import StoredLimiter
from providers.accounts.prices import ModelPrice, Prices
from providers.accounts.project_settings import StoredProjectSettings
from providers.accounts.project_state import ProjectState, project_record_keys, read_project
from providers.accounts.records import SALT_KEY
from providers.accounts.spending import StoredSpendLimits
from providers.accounts.usage_log import StoredUsageLog
from providers.common.state.change import write_prepared
from providers.common.state.scan import skipping_damaged

_SECRET_BYTES: Final = 32


class StoredProjectsConfig(Provider.Config):
    """`usage_retention_days` is how long the sums of each hour are stored, and `audit_retention_days` the records of
    administrative acts. `prices` are those of a million tokens by model, in `currency`. `email` is the mail server that
    spend alerts need."""

    model_config = ConfigDict(hide_input_in_errors=True)

    usage_retention_days: float = Field(default=400, gt=0)
    audit_retention_days: float = Field(default=400, gt=0)
    prices: dict[str, ModelPrice] = Field(default_factory=dict[str, ModelPrice])
    currency: str = Field(default="usd", pattern=r"^[a-z]{3}$")
    email: EmailConfig | None = None


class StoredOrganization:
    """All that a store has of its projects. Providers of one stack share one, so that each request is counted and
    priced in one way."""

    def __init__(self, config: StoredProjectsConfig, kv_store: KVStore) -> None:
        self._kv = kv_store
        audit_log = StoredAuditLog(kv_store, config.audit_retention_days)
        limiter = StoredLimiter(kv_store, audit_log)
        self.ledger = StoredLedger(kv_store, Prices(config.prices), config.usage_retention_days * 86_400)
        usage_log = StoredUsageLog(kv_store, self.ledger)
        self._alerting = SpendAlerting(kv_store, audit_log, usage_log, email=config.email, currency=config.currency)
        self.parts = Organization(
            StoredDirectory(kv_store, audit_log),
            StoredProjectSettings(kv_store, audit_log),
            StoredProjectErasure(kv_store, audit_log),
            audit_log,
            limiter,
            self.ledger,
            usage_log,
            StoredSpendLimits(kv_store, limiter, usage_log),
            self._alerting.alerts,
            config.currency,
        )

    async def start(self) -> None:
        """Load the secret of the cache salts, which the first process of all creates."""
        self.parts.cache_salt_secret = await self._load_salt_secret()
        self.ledger.start()
        await self._alerting.start()

    async def close(self) -> None:
        """Count what waits, and send the e-mails that are due."""
        await self._alerting.close()
        await self.ledger.close()

    async def _load_salt_secret(self) -> bytes:
        """Return the secret of all processes. A damaged one is replaced: the engines' caches are filled again."""
        secret = b""

        async def prepare() -> Sequence[Op] | None:
            nonlocal secret
            entry = await self._kv.get(SALT_KEY)
            if entry is not None:
                with skipping_damaged(self._kv, SALT_KEY, "secret of the cache salts"):
                    secret = entry.value
                    if len(secret) != _SECRET_BYTES:
                        raise StorageCorrupt
                    return None
            secret = secrets.token_bytes(_SECRET_BYTES)
            return [Put(SALT_KEY, secret, expect=ABSENT if entry is None else entry.version)]

        await write_prepared(self._kv, prepare)
        return secret


class StoredProjects(Accounts):
    """Accounts whose projects are in the KVStore; a subclass recognizes the keys."""

    def __init__(self, config: StoredProjectsConfig, kv_store: KVStore) -> None:
        self._kv = kv_store
        self._settings = config
        self._organization = StoredOrganization(config, kv_store)
        self._owns_organization = True

    async def start(self) -> None:
        if self._owns_organization:
            await self._organization.start()

    async def close(self) -> None:
        if self._owns_organization:
            await self._organization.close()

    def organization(self) -> Organization:
        return self._organization.parts

    async def find_owner(self, project_id: str, key_id: str) -> Caller | None:
        if key_id or project_id == ADMIN_TENANT:
            return await super().find_owner(project_id, key_id)
        project = read_project(self._kv, project_id, await self._kv.get_many(project_record_keys(project_id)))
        is_archived = project.project is not None and not project.is_active
        return None if is_archived else project.build_caller("", Grant(), None)

    def _bound_stored_bytes(self, project: ProjectState) -> None:
        """Bound what the tenant may store, as its limits say now."""
        whole = project.limits.get(WHOLE_PROJECT)
        self._kv.bound_tenant(project.id, None if whole is None else whole.stored_bytes)

    @staticmethod
    def share_organization(members: Mapping[str, "StoredProjects"]) -> None:
        """Let these providers, by their names in the run config, share one organization, which has the settings that
        their sections set. Raises ConfigError for a setting that two of them set in different ways."""
        set_by: dict[str, str] = {}
        settings: dict[str, object] = {}
        for name, member in members.items():
            for field in sorted(member._settings.model_fields_set & StoredProjectsConfig.model_fields.keys()):
                value: object = getattr(member._settings, field)
                if settings.setdefault(field, value) != value:
                    raise ConfigError(
                        f"accounts.providers.{name}.{field}: differs from that of {set_by[field]}. The providers of a "
                        "chain share one organization: set it in one of them."
                    )
                set_by.setdefault(field, name)
        owner, *others = members.values()
        owner._organization = StoredOrganization(StoredProjectsConfig().model_copy(update=settings), owner._kv)
        for member in others:
            member._organization, member._owns_organization = owner._organization, False
