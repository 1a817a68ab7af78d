"""StoredProjectSettings: one record for each project that has settings, in the KVStore."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from apis.accounts.directory import Project
from apis.accounts.project_settings import OPEN_SETTINGS, ProjectSettings, ProjectSettingsStore
from apis.errors import InvalidRequest, Overloaded
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import load_project_with, settings_key

_ATTEMPTS: Final = 8


class StoredProjectSettings(ProjectSettingsStore):
    """Settings that are replaced only if no one has changed them meanwhile."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def get_settings(self, project_id: str) -> ProjectSettings:
        return read_settings((await self._load(project_id))[1])

    async def change_settings(
        self, project_id: str, change: Callable[[ProjectSettings], ProjectSettings], requested: Mapping[str, Any]
    ) -> ProjectSettings:
        for _ in range(_ATTEMPTS):
            project, entry = await self._load(project_id)
            if project.archived_at is not None:
                raise InvalidRequest(
                    f"The project '{project.id}' is archived.", param="project_id", code="project_archived"
                )
            changed = change(read_settings(entry))
            version = ABSENT if entry is None else entry.version
            put = Put(settings_key(project.id), encode_record(changed), expect=version)
            record = self._audit.put("project.updated", project.id, project, {"changes_requested": {**requested}})
            if await self._kv.write([put, record]) is not None:
                return changed
        raise Overloaded("Others are changing the same settings. Try again.", retry_after_s=1)

    async def _load(self, project_id: str) -> tuple[Project, Entry | None]:
        project, settings = await load_project_with(self._kv, project_id, settings_key)
        return decode_record(project, Project), settings


def read_settings(entry: Entry | None) -> ProjectSettings:
    """Return the settings in the record of a project."""
    return OPEN_SETTINGS if entry is None else decode_record(entry, ProjectSettings)
