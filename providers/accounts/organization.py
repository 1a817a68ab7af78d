"""StoredOrganization: projects and keys, their settings and limits, their use and money, and the log of what
administrators do, in the KVStore."""

import secrets
from collections.abc import Sequence
from typing import Final

from pydantic import ConfigDict, Field

from apis.accounts.organization import Organization
from apis.errors import StorageCorrupt
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


class StoredOrganization(Organization):
    """All that a store has of its projects. Providers of one stack share one, so that each request is counted and
    priced in one way."""

    def __init__(self, config: StoredProjectsConfig, kv_store: KVStore) -> None:
        ledger = StoredLedger(kv_store, Prices(config.prices), config.usage_retention_days * 86_400)
        super().__init__(ledger, config.currency)
        self._kv = kv_store
        self._ledger = ledger
        self.audit_log = StoredAuditLog(kv_store, config.audit_retention_days)
        self.directory = StoredDirectory(kv_store, self.audit_log)
        self.settings = StoredProjectSettings(kv_store, self.audit_log)
        self.erasure = StoredProjectErasure(kv_store, self.audit_log)
        self.limiter = StoredLimiter(kv_store, self.audit_log)
        self.usage_log = StoredUsageLog(kv_store, ledger)
        self.spend_limits = StoredSpendLimits(kv_store, self.limiter, self.usage_log)
        self._alerting = SpendAlerting(
            kv_store, self.audit_log, self.usage_log, email=config.email, currency=config.currency
        )
        self.spend_alerts = self._alerting.alerts

    async def start(self) -> None:
        """Load the secret of the cache salts, which the first process of all creates."""
        self.cache_salt_secret = await self._load_salt_secret()
        self._ledger.start()
        await self._alerting.start()

    async def close(self) -> None:
        """Count what waits, and send the e-mails that are due."""
        await self._alerting.close()
        await self._ledger.close()

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
