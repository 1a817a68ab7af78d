"""The record of a project and others of the same project, read in one step."""

from collections.abc import Callable

from apis.errors import NotFound
from apis.storage.keys import MAX_RECORD_ID_CHARS, record_id
from apis.storage.kv_store import Entry, KVStore
from providers.accounts.records import project_key


async def load_project(kv: KVStore, project_id: str) -> Entry:
    """Return the record of a project. Raises NotFound."""
    return _require_found(await kv.get(project_key(record_id(project_id))), project_id)


async def load_project_with(
    kv: KVStore, project_id: str, related_key: Callable[[str], str]
) -> tuple[Entry, Entry | None]:
    """Return the record of a project, and the one that has `related_key` of its id. Raises NotFound."""
    name = record_id(project_id)
    project, related = await kv.get_many((project_key(name), related_key(name)))
    return _require_found(project, project_id), related


def _require_found(project: Entry | None, project_id: str) -> Entry:
    if project is None:
        raise NotFound(f"No project found with id '{project_id[:MAX_RECORD_ID_CHARS]}'.")
    return project
