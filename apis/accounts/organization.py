"""Organization: all that a stack keeps of its projects, apart from who may send a request."""

from dataclasses import dataclass

from apis.accounts.audit import AuditLog
from apis.accounts.charges import Meter
from apis.accounts.directory import AccountDirectory
from apis.accounts.erasure import ProjectErasure
from apis.accounts.limits import Limiter
from apis.accounts.project_settings import ProjectSettingsStore
from apis.accounts.spend_alerts import SpendAlerts
from apis.accounts.spending import SpendLimits
from apis.accounts.usage import UsageLog


@dataclass(slots=True)
class Organization:
    """The projects and keys, their settings and limits, what they use and spend, and the log of what administrators do.
    A stack has one, or none where its keys are those of the run config.

    `currency` is that of the prices: three lower-case letters of ISO 4217. `cache_salt_secret` is shared by all workers
    and known to no client; it is there once the accounts have started.
    """

    directory: AccountDirectory
    settings: ProjectSettingsStore
    erasure: ProjectErasure
    audit_log: AuditLog
    limiter: Limiter
    meter: Meter
    usage_log: UsageLog
    spend_limits: SpendLimits
    spend_alerts: SpendAlerts
    currency: str
    cache_salt_secret: bytes | None = None
