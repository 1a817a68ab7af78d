"""The state of a project that each of its callers gets, read from several records in one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apis.accounts.accounts import Caller
from apis.accounts.directory import Project
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT, RateLimit
from apis.accounts.project_settings import ProjectSettings
from apis.accounts.scopes import Grant
from apis.storage.kv_store import Entry, KVStore
from apis.storage.records import decode_record
from providers.accounts.limiter import read_limits
from providers.accounts.project_settings import read_settings
from providers.accounts.records import ORGANIZATION_ID, limits_key, project_key, settings_key
from providers.common.state.scan import skipping_damaged


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


def read_project(kv: KVStore, project_id: str, entries: Sequence[Entry | None]) -> ProjectState:
    """Return the state of a tenant from the records of `project_record_keys`. Raises StorageCorrupt for one of its own;
    a damaged limit of all projects is logged and does not hold, because it would stop all tenants."""
    project_entry, limits_entry, settings_entry, organization_entry = entries
    project = None if project_entry is None else decode_record(project_entry, Project)
    limits = read_limits(limits_entry)
    with skipping_damaged(kv, limits_key(ORGANIZATION_ID), "limits of all projects"):
        limit_of_all = read_limits(organization_entry).get(WHOLE_PROJECT)
        if limit_of_all is not None and limit_of_all.month_cost is not None:
            limits[ORGANIZATION] = limit_of_all
    return ProjectState(project_id, project, limits, read_settings(settings_entry))
