"""The record of a project and others of the same project, read in one step."""

from collections.abc import Callable
from typing import Final

from apis.errors import NotFound
from apis.storage.keys import record_id
from apis.storage.kv_store import Entry, KVStore
from providers.accounts.records import project_key

MAX_ID_CHARS: Final = 128
"""Characters of an id of accounts; a longer one has no record."""


async def load_project(kv: KVStore, project_id: str) -> Entry:
    """Return the record of a project. Raises NotFound."""
    return (await load_project_with(kv, project_id, project_key))[0]


async def load_project_with(
    kv: KVStore, project_id: str, related_key: Callable[[str], str]
) -> tuple[Entry, Entry | None]:
    """Return the record of a project, and the one that has `related_key` of its id. Raises NotFound."""
    name = record_id(project_id, MAX_ID_CHARS)
    project, related = await kv.get_many((project_key(name), related_key(name)))
    if project is None:
        raise NotFound(f"No project found with id '{project_id[:MAX_ID_CHARS]}'.")
    return project, related
