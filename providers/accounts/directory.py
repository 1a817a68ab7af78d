"""StoredDirectory: projects, service accounts and keys as records in the KVStore."""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from apis.accounts.accounts import ADMIN_TENANT, digest_key
from apis.accounts.directory import KeyOptions, NewKey, Project, ProjectPage, ServiceAccount, StoredKey, UpdateKey
from apis.accounts.requests import AccountPage
from apis.accounts.scopes import parse_project_scopes
from apis.errors import InvalidRequest, NotFound, StorageCorrupt
from apis.storage.keys import MAX_RECORD_ID_CHARS, new_id_key, record_id
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import (
    digest_reference_key,
    last_use_key,
    load_project,
    project_key,
    require_active,
    require_project,
    service_account_key,
    stored_key_key,
)
from providers.common.state.change import change, write_prepared
from providers.common.state.scan import first_matches, list_page, scan_records, skipping_damaged

_PROJECT_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_SECRET_BYTES: Final = 32
_SHOWN_CHARS: Final = 4
RecordT = TypeVar("RecordT", Project, ServiceAccount, StoredKey)


class StoredDirectory:
    """Manages projects and keys. Ids begin with the time of creation, so a listing by key is one by age. Changes hold
    everywhere within MAX_KEY_AGE_S, and survive the loss of power.

    Every method raises NotFound for an id that does not exist, and StoreUnavailable.
    """

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def create_project(self, name: str, *, project_id: str | None = None) -> Project:
        """Create a project, with the id of a tenant of the run config where `project_id` is set: the project then owns
        what that tenant has stored. Raises InvalidRequest if it exists or is no name of a tenant."""
        if project_id is not None and not _PROJECT_ID.fullmatch(project_id):
            raise InvalidRequest(
                "A project's id has 1 to 64 letters, digits, underscores, hyphens and dots, and begins with no dot.",
                param="project_id",
                code="invalid_value",
            )
        project = Project(project_id or f"proj_{new_id_key()}", name, int(time.time()))
        record = self._audit.put("project.created", project.id, project, {"data": {"name": name, "title": name}})
        versions = await self._kv.write([Put(project_key(project.id), encode_record(project), expect=ABSENT), record])
        if versions is None:
            raise InvalidRequest(f"The project '{project.id}' exists already.", param="project_id", code="exists")
        return project

    async def get_project(self, project_id: str) -> Project:
        """Return the project, archived or not."""
        return decode_record(await load_project(self._kv, project_id), Project)

    async def list_projects(self, page: ProjectPage) -> Page[Project]:
        """Return a page of the projects, oldest first."""
        prefix, last_key = project_key(""), project_key(record_id(page.after)) if page.after else ""
        rows = scan_records(self._kv, prefix, Project, after=last_key, page_size=100)
        projects = await first_matches(rows, page.limit, lambda each: page.include_archived or each.archived_at is None)
        return projects.map(lambda row: row.record)

    async def list_project_ids(self) -> Sequence[str]:
        """Return the ids of all projects, also of archived ones, oldest first."""
        return [row.record.id async for row in scan_records(self._kv, project_key(""), Project)]

    async def rename_project(self, project_id: str, name: str | None) -> Project:
        """Set the name where it is not None. Raises InvalidRequest if the project is archived."""

        def rename(project: Project | None) -> Project:
            active = require_active(require_project(project, project_id))
            return active if name is None else replace(active, name=name)

        def audit(project: Project) -> Put:
            return self._audit.put("project.updated", project.id, project, {"changes_requested": {"title": name}})

        return await self._change(project_key(record_id(project_id)), Project, rename, audit)

    async def archive_project(self, project_id: str) -> Project:
        """Refuse the project's keys for ever; what it has stored stays."""

        def archive(project: Project | None) -> Project:
            present = require_project(project, project_id)
            return present if present.archived_at is not None else replace(present, archived_at=int(time.time()))

        def audit(project: Project) -> Put:
            return self._audit.put("project.archived", project.id, project, {})

        return await self._change(project_key(record_id(project_id)), Project, archive, audit)

    async def create_service_account(self, project_id: str, name: str, *, role: str = "member") -> ServiceAccount:
        """Create an account without a key. Raises InvalidRequest if the project is archived."""
        project = require_active(await self.get_project(project_id))
        account = ServiceAccount(f"svc_acct_{new_id_key()}", project_id, name, int(time.time()), role)
        record = self._audit.put("service_account.created", account.id, project, {"data": {"role": role}})
        await self._kv.write([Put(service_account_key(project_id, account.id), encode_record(account)), record])
        return account

    async def get_service_account(self, project_id: str, account_id: str) -> ServiceAccount:
        """Return the service account of the project."""
        return decode_record(await self._load_account(project_id, account_id), ServiceAccount)

    async def list_service_accounts(self, project_id: str, page: AccountPage) -> Page[ServiceAccount]:
        """Return a page of the project's service accounts, oldest first."""
        await load_project(self._kv, project_id)
        return await self._list(service_account_key(project_id, ""), page, ServiceAccount)

    async def rename_service_account(self, project_id: str, account_id: str, name: str | None) -> ServiceAccount:
        """Set the name where it is not None."""

        def rename(account: ServiceAccount | None) -> ServiceAccount:
            if account is None:
                raise _no_account_error(account_id)
            return account if name is None else replace(account, name=name)

        def audit(_: ServiceAccount) -> Put:
            requested = {"changes_requested": {"name": name}}
            return self._audit.put("service_account.updated", account_id, project_id, requested)

        key = service_account_key(record_id(project_id), record_id(account_id))
        return await self._change(key, ServiceAccount, rename, audit)

    async def delete_service_account(self, project_id: str, account_id: str) -> None:
        """Delete the account and revoke its keys."""
        await self._load_account(project_id, account_id)
        # The account goes first: a key is only created together with a check that its account exists.
        record = self._audit.put("service_account.deleted", account_id, project_id, {})
        await self._kv.write([Delete(service_account_key(project_id, account_id)), record])
        async for stored in scan_records(self._kv, stored_key_key(project_id, ""), StoredKey):
            if stored.record.service_account_id == account_id:
                await self._delete_key(stored.record)

    async def create_key(self, account: ServiceAccount | None, options: KeyOptions) -> NewKey:
        """Create a key of the account, or one of an administrator for None. Raises InvalidRequest for unknown scopes
        and if the project is archived."""
        if account is None:
            new_key = _generate_key(ADMIN_TENANT, None, options)
            await self._kv.write(self._key_ops(new_key.key))
            return new_key
        parse_project_scopes(options.scopes)
        require_active(await self.get_project(account.project_id))
        new_key = _generate_key(account.project_id, account.id, options)

        async def prepare() -> list[Op]:
            owner = await self._load_account(account.project_id, account.id)
            # In one atomic step with the owner, so that no key outlives the deletion of its account.
            condition = Put(service_account_key(account.project_id, account.id), owner.value, expect=owner.version)
            return [condition, *self._key_ops(new_key.key)]

        await write_prepared(self._kv, prepare)
        return new_key

    async def get_key(self, project_id: str, key_id: str) -> StoredKey:
        """Return a key of the project, or one of an administrator for ADMIN_TENANT."""
        return decode_record(await self._load_key(project_id, key_id), StoredKey)

    async def list_keys(self, project_id: str, page: AccountPage, *, newest_first: bool = False) -> Page[StoredKey]:
        """Return a page of the keys of the project, or of administrators' keys for ADMIN_TENANT, oldest first."""
        if project_id != ADMIN_TENANT:
            await load_project(self._kv, project_id)
        return await self._list(stored_key_key(project_id, ""), page, StoredKey, reverse=newest_first)

    async def update_key(self, project_id: str, key_id: str, update: UpdateKey) -> StoredKey:
        """Change the scopes and the expiry of a project's key. Raises InvalidRequest for unknown scopes and for a key
        that has expired."""
        parse_project_scopes(update.scopes or ())

        def apply(key: StoredKey | None) -> StoredKey:
            if key is None:
                raise _no_key_error(key_id)
            now = int(time.time())
            if key.expires_at is not None and key.expires_at <= now:
                raise InvalidRequest("The API key has expired: create another one.", param="api_key_id")
            scopes = key.scopes if update.scopes is None else tuple(update.scopes)
            life_s = update.expires_in_seconds
            return replace(key, scopes=scopes, expires_at=key.expires_at if life_s is None else now + life_s)

        def audit(key: StoredKey) -> Put:
            requested = {"changes_requested": update.model_dump(exclude_none=True)}
            return self._audit.put("api_key.updated", key.id, project_id, requested)

        return await self._change(stored_key_key(record_id(project_id), record_id(key_id)), StoredKey, apply, audit)

    async def revoke_key(self, project_id: str, key_id: str) -> None:
        """Delete the key."""
        entry = await self._load_key(project_id, key_id)
        try:
            key = decode_record(entry, StoredKey)
        except StorageCorrupt:
            # no one can use a key whose record is damaged; its digest, which is unknown now, leads to nothing then
            record = self._audit.put("api_key.deleted", key_id, None if project_id == ADMIN_TENANT else project_id, {})
            await self._kv.write([Delete(stored_key_key(project_id, key_id)), Delete(last_use_key(key_id)), record])
        else:
            await self._delete_key(key)

    async def last_uses(self, keys: Sequence[StoredKey]) -> list[int | None]:
        """Return when each key was last used, in seconds of Unix time, known to a few minutes; None for never."""
        if not keys:
            return []
        entries = await self._kv.get_many([last_use_key(key.id) for key in keys])
        uses: list[int | None] = []
        for key, entry in zip(keys, entries, strict=True):
            used_at = None
            with skipping_damaged(self._kv, last_use_key(key.id), "last use of an API key"):
                used_at = None if entry is None else int(entry.value)
            uses.append(used_at)
        return uses

    async def _delete_key(self, key: StoredKey) -> None:
        keys = (digest_reference_key(key.digest), stored_key_key(key.project_id, key.id), last_use_key(key.id))
        record = self._audit.put("api_key.deleted", key.id, _project_of(key), {})
        await self._kv.write([*(Delete(name) for name in keys), record])

    def _key_ops(self, key: StoredKey) -> list[Put]:
        record_key = stored_key_key(key.project_id, key.id)
        return [
            Put(record_key, encode_record(key), expect=ABSENT),
            Put(digest_reference_key(key.digest), record_key.encode(), expect=ABSENT),
            self._audit.put("api_key.created", key.id, _project_of(key), {"data": {"scopes": [*key.scopes]}}),
        ]

    async def _load_key(self, project_id: str, key_id: str) -> Entry:
        entry = await self._kv.get(stored_key_key(record_id(project_id), record_id(key_id)))
        if entry is None:
            raise _no_key_error(key_id)
        return entry

    async def _load_account(self, project_id: str, account_id: str) -> Entry:
        entry = await self._kv.get(service_account_key(record_id(project_id), record_id(account_id)))
        if entry is None:
            raise _no_account_error(account_id)
        return entry

    async def _change(
        self,
        key: str,
        record_type: type[RecordT],
        edit: Callable[[RecordT | None], RecordT],
        audit: Callable[[RecordT], Put],
    ) -> RecordT:
        """Store the record that `edit` returns together with the record of the audit log, and return it. An edit that
        returns the very record that it got changes nothing."""
        edited: RecordT | None = None

        def edit_if_needed(stored: RecordT | None) -> RecordT | None:
            nonlocal edited
            edited = edit(stored)
            return None if edited is stored else edited

        await change(self._kv, key, record_type, edit_if_needed, also=lambda record: [audit(record)])
        assert edited is not None
        return edited

    async def _list(
        self, prefix: str, page: AccountPage, record_type: type[RecordT], *, reverse: bool = False
    ) -> Page[RecordT]:
        cursor = f"{prefix}{record_id(page.after)}" if page.after else ""
        order = "desc" if reverse else "asc"
        stored = await list_page(self._kv, prefix, record_type, cursor, order=order, limit=page.limit)
        return stored.map(lambda row: row.record)


def _generate_key(project_id: str, account_id: str | None, options: KeyOptions) -> NewKey:
    prefix = "sk-admin-" if account_id is None else "sk-svcacct-"
    value = f"{prefix}{secrets.token_urlsafe(_SECRET_BYTES)}"
    now = int(time.time())
    key = StoredKey(
        id=f"key_{new_id_key()}",
        project_id=project_id,
        name=options.name,
        digest=digest_key(value.encode()).hex(),
        redacted_value=f"{prefix}...{value[-_SHOWN_CHARS:]}",
        created_at=now,
        service_account_id=account_id,
        expires_at=None if options.expires_in_s is None else now + options.expires_in_s,
        scopes=tuple(options.scopes),
    )
    return NewKey(key, value)


def _project_of(key: StoredKey) -> str | None:
    return None if key.project_id == ADMIN_TENANT else key.project_id


def _no_account_error(account_id: str) -> NotFound:
    return NotFound(f"No service account found with id '{account_id[:MAX_RECORD_ID_CHARS]}'.")


def _no_key_error(key_id: str) -> NotFound:
    return NotFound(f"No API key found with id '{key_id[:MAX_RECORD_ID_CHARS]}'.")
