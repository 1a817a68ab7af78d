"""StoredProjectErasure: deletion of the accounts of archived projects in the KVStore."""

from typing import Final

from apis.accounts.directory import Project, StoredKey
from apis.errors import InvalidRequest
from apis.storage.kv_store import Delete, KVStore, Put
from apis.storage.records import decode_record, scan_all
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import (
    digest_reference_key,
    last_use_key,
    load_project,
    project_key,
    stored_key_key,
    tombstone_key,
)
from providers.common.state.scan import skipping_damaged

TOMBSTONE_LIFE_S: Final = 24 * 3600
"""Seconds for which a deleted project is remembered, longer than a request of it can have gone on."""


class StoredProjectErasure:
    """Deletes the accounts of archived projects: keys before their project, so that a deletion that broke off can be
    repeated. Sums of usage and the audit log stay for their own time."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def delete_keys(self, project_id: str) -> int:
        """Delete all keys of the project with their references, and return the number of keys."""
        count = 0
        async for name, entry in scan_all(self._kv, stored_key_key(project_id, "")):
            key_id = name.rpartition("/")[2]
            record = self._audit.put("api_key.deleted", key_id, project_id, {})
            names = [name, last_use_key(key_id)]
            with skipping_damaged(self._kv, name, StoredKey.__name__):  # its digest then leads to nothing
                names.append(digest_reference_key(decode_record(entry, StoredKey).digest))
            await self._kv.write([*(Delete(each) for each in names), record])
            count += 1
        return count

    async def end_project(self, project_id: str) -> None:
        """Delete the project itself, record that in the audit log and remember its id for TOMBSTONE_LIFE_S, in one
        atomic step. Raises NotFound, and InvalidRequest if it is not archived."""
        project = decode_record(await load_project(self._kv, project_id), Project)
        if project.archived_at is None:
            raise InvalidRequest("Only an archived project can be deleted.", param="project_id")
        tombstone = Put(tombstone_key(project_id), b"", TOMBSTONE_LIFE_S)
        record = self._audit.put("project.deleted", project_id, project, {})
        await self._kv.write([Delete(project_key(project_id)), tombstone, record])

    async def list_ended(self) -> list[str]:
        """Return the ids of the projects that were deleted within TOMBSTONE_LIFE_S and have not been created again."""
        prefix = tombstone_key("")
        ids = [name.removeprefix(prefix) async for name, _ in scan_all(self._kv, prefix)]
        projects = await self._kv.get_many([project_key(project_id) for project_id in ids]) if ids else ()
        return [project_id for project_id, project in zip(ids, projects, strict=True) if project is None]
