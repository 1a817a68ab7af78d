"""Administration: the parts of the accounts that only administrators use, apart from the directory of projects."""

from dataclasses import dataclass

from apis.accounts.audit import AuditLog
from apis.accounts.erasure import ProjectErasure
from apis.accounts.project_settings import ProjectSettingsStore


@dataclass(frozen=True, slots=True)
class Administration:
    """The log of acts, the settings of projects, and their deletion."""

    audit_log: AuditLog
    settings: ProjectSettingsStore
    erasure: ProjectErasure
