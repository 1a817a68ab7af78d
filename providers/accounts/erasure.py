"""StoredProjectErasure: deletion of the accounts of archived projects in the KVStore."""

from apis.accounts.directory import Project, StoredKey
from apis.accounts.erasure import TOMBSTONE_LIFE_S, ProjectErasure
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


class StoredProjectErasure(ProjectErasure):
    """Deletes keys before their project, so that a deletion that broke off can be repeated."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def delete_keys(self, project_id: str) -> int:
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
        project = decode_record(await load_project(self._kv, project_id), Project)
        if project.archived_at is None:
            raise InvalidRequest("Only an archived project can be deleted.", param="project_id")
        tombstone = Put(tombstone_key(project_id), b"", TOMBSTONE_LIFE_S)
        record = self._audit.put("project.deleted", project_id, project, {})
        await self._kv.write([Delete(project_key(project_id)), tombstone, record])

    async def list_ended(self) -> list[str]:
        prefix = tombstone_key("")
        ids = [name.removeprefix(prefix) async for name, _ in scan_all(self._kv, prefix)]
        projects = await self._kv.get_many([project_key(project_id) for project_id in ids]) if ids else ()
        return [project_id for project_id, project in zip(ids, projects, strict=True) if project is None]
