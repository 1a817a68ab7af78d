"""StoredProjects: accounts with an organization in the KVStore, whichever provider recognizes their keys."""

from collections.abc import Mapping

from apis.accounts.accounts import ADMIN_TENANT, Accounts, Caller
from apis.accounts.limits import WHOLE_PROJECT
from apis.accounts.scopes import Grant
from apis.errors import ConfigError
from apis.storage.kv_store import KVStore
from providers.accounts.organization import StoredOrganization, StoredProjectsConfig
from providers.accounts.project_state import ProjectState, project_record_keys, read_project


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

    def organization(self) -> StoredOrganization:
        return self._organization

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
