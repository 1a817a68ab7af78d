"""The keys of the KVStore below which accounts are stored, and the record of a project. No key begins with a tenant, so
they count for no quota."""

from collections.abc import Callable
from typing import Final, TypeVar

from apis.accounts.directory import Project
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT
from apis.errors import InvalidRequest, NotFound
from apis.storage.keys import MAX_RECORD_ID_CHARS, id_to_key_part, record_id
from apis.storage.kv_store import Entry, KVStore

ProjectT = TypeVar("ProjectT", Project, Entry)
ROOT: Final = "/accounts"
ORGANIZATION_ID: Final = ".organization"
"""Stands for a project in the keys of the limits of all projects together. No project has its name."""
SALT_KEY: Final = f"{ROOT}/cache_salt_secret"
ALERT_LEASE_KEY: Final = f"{ROOT}/alert_lease"
"""The lease of the one process that sends the e-mails of spend alerts."""

SWEEP_LEASE_KEY: Final = f"{ROOT}/sweep_lease"
"""The lease of the one process that counts the ends of the others."""


def project_key(project_id: str) -> str:
    """Return the key of a project's record; with an empty id, the prefix of all."""
    return f"{ROOT}/projects/{project_id}"


def service_account_key(project_id: str, account_id: str) -> str:
    """Return the key of a service account's record; with an empty id, the prefix of all of the project."""
    return f"{ROOT}/service_accounts/{project_id}/{account_id}"


def stored_key_key(project_id: str, key_id: str) -> str:
    """Return the key of an API key's record; with an empty id, the prefix of all of the project."""
    return f"{ROOT}/keys/{project_id}/{key_id}"


def digest_reference_key(digest: str) -> str:
    """Return the key of the reference from a digest to the record of its API key; the value is the record's key."""
    return f"{ROOT}/digests/{digest}"


def limits_key(project_id: str) -> str:
    """Return the key of the record of a project's limits, by subject."""
    return f"{ROOT}/limits/{project_id}"


def settings_key(project_id: str) -> str:
    """Return the key of the record of a project's settings."""
    return f"{ROOT}/settings/{project_id}"


def tombstone_key(project_id: str) -> str:
    """Return the key that remembers a deleted project; with an empty id, the prefix of all."""
    return f"{ROOT}/deleted/{project_id}"


def counter_key(project_id: str, subject: str) -> str:
    """Return the key of the counter of one subject's requests and tokens."""
    return f"{ROOT}/counters/{project_id}/{subject}"


ORGANIZATION_COUNTER: Final = counter_key(ORGANIZATION_ID, WHOLE_PROJECT)
"""The key of the counter of all projects together."""


def find_counter_key(project_id: str, subject: str) -> str:
    """Return the key of the counter of a limit of a project, its keys or its models, or of all projects together."""
    if subject == ORGANIZATION:
        return ORGANIZATION_COUNTER
    return counter_key(project_id, id_to_key_part(subject))


def usage_key(hour: int | None, subject: str, process_name: str) -> str:
    """Return the key of what one process counted for a subject in an hour (since 1970), ordered by the hour; with None
    and empty names, the prefix of all."""
    hour_part = "" if hour is None else f"{max(0, hour):08d}/"
    return f"{ROOT}/usage/{hour_part}{subject and f'{subject}/{process_name}'}"


def last_use_key(key_id: str) -> str:
    """Return the key of the time at which an API key was last used; the value is seconds of Unix time."""
    return f"{ROOT}/last_uses/{key_id}"


def audit_key(record_id: str) -> str:
    """Return the key of a record of the audit log, ordered by time; with an empty id, the prefix of all."""
    return f"{ROOT}/audit/{record_id}"


def heartbeat_key(process_name: str) -> str:
    """Return the key that exists while a process renews it: the guard of the reservations of its requests."""
    return f"{ROOT}/heartbeats/{process_name}"


def alerts_key(project_id: str) -> str:
    """Return the key of the record of a project's spend alerts; with an empty id, the prefix of all."""
    return f"{ROOT}/alerts/{project_id}"


def alert_notices_prefix(project_id: str, alert_id: str) -> str:
    """Return the prefix of the keys of an alert's notices: each says that the e-mail for a month and a threshold was
    sent."""
    return f"{ROOT}/alert_notices/{project_id}/{alert_id}/"


async def load_project(kv: KVStore, project_id: str) -> Entry:
    """Return the record of a project. Raises NotFound."""
    return require_project(await kv.get(project_key(record_id(project_id))), project_id)


async def load_project_with(
    kv: KVStore, project_id: str, related_key: Callable[[str], str]
) -> tuple[Entry, Entry | None]:
    """Return the record of a project, and the one that has `related_key` of its id. Raises NotFound."""
    name = record_id(project_id)
    project, related = await kv.get_many((project_key(name), related_key(name)))
    return require_project(project, project_id), related


def require_active(project: Project) -> Project:
    """Return the project. Raises InvalidRequest for one that is archived."""
    if project.archived_at is not None:
        raise InvalidRequest(f"The project '{project.id}' is archived.", param="project_id", code="project_archived")
    return project


def require_project(project: ProjectT | None, project_id: str) -> ProjectT:
    """Return the project, or its entry. Raises NotFound where there is none."""
    if project is None:
        raise NotFound(f"No project found with id '{project_id[:MAX_RECORD_ID_CHARS]}'.")
    return project
