"""StoredProjectSettings: one record for each project that has settings, in the KVStore."""

from collections.abc import Callable, Mapping
from typing import Any

from apis.accounts.directory import Project
from apis.accounts.project_settings import OPEN_SETTINGS, ProjectSettings
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import load_project_with, require_active, settings_key
from providers.common.state.change import write_prepared


class StoredProjectSettings:
    """The settings of all projects, which are replaced only if no one has changed them meanwhile. Changes hold
    everywhere within MAX_KEY_AGE_S, for requests that come after it."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def get_settings(self, project_id: str) -> ProjectSettings:
        """Return the settings of the project. Raises NotFound, and StoreUnavailable."""
        return read_settings((await self._load(project_id))[1])

    async def change_settings(
        self, project_id: str, change: Callable[[ProjectSettings], ProjectSettings], requested: Mapping[str, Any]
    ) -> ProjectSettings:
        """Replace the settings by those that `change` returns, without losing another change that happens at the same
        time; `requested` is the change as the audit log shows it. Raises NotFound, InvalidRequest if the project is
        archived, and StoreUnavailable."""
        changed = OPEN_SETTINGS

        async def prepare() -> list[Op]:
            nonlocal changed
            project, entry = await self._load(project_id)
            require_active(project)
            changed = change(read_settings(entry))
            version = ABSENT if entry is None else entry.version
            put = Put(settings_key(project.id), encode_record(changed), expect=version)
            return [put, self._audit.put("project.updated", project.id, project, {"changes_requested": {**requested}})]

        await write_prepared(self._kv, prepare)
        return changed

    async def _load(self, project_id: str) -> tuple[Project, Entry | None]:
        project, settings = await load_project_with(self._kv, project_id, settings_key)
        return decode_record(project, Project), settings


def read_settings(entry: Entry | None) -> ProjectSettings:
    """Return the settings in the record of a project."""
    return OPEN_SETTINGS if entry is None else decode_record(entry, ProjectSettings)
