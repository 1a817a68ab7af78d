"""The command `stack keys`: create, list and revoke keys in the store of a run config, whether or not a server runs."""

import asyncio
import getpass
import json
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from apis.accounts.accounts import ADMIN_TENANT, Accounts
from apis.accounts.audit import CURRENT_ACTOR, AuditActor
from apis.accounts.directory import KeyOptions, NewKey, StoredKey
from apis.accounts.requests import AccountPage
from apis.accounts.scopes import parse_project_scopes
from apis.documents.fetcher import Fetcher
from apis.errors import ConfigError, InvalidRequest, NotFound
from apis.storage.kv_store import KVStore
from stack.build import find_organization, open_providers
from stack.config import StackConfig
from stack.wiring import ProviderSpec, load_wired_config

if TYPE_CHECKING:
    from providers.accounts.directory import StoredDirectory
    from providers.accounts.organization import StoredOrganization

LoadedConfig = tuple[StackConfig, dict[str, ProviderSpec]]
"""A run config and the providers of its APIs."""
_PAGE_KEYS = 100
_MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """The options of `stack keys create`. A `project_id` of None creates a key of an administrator."""

    project_id: str | None
    name: str
    scopes: Sequence[str] = ()
    expires_in_s: int | None = None


def create(file: str, request: KeyRequest) -> Iterator[str]:
    """Create a key, and its project if that is absent; yield its text and a line about it. Raises ConfigError."""
    try:
        parse_project_scopes(request.scopes)
    except InvalidRequest as exc:
        raise ConfigError(exc.message) from exc
    new = asyncio.run(_create(load_accounts_config(file), request))
    yield new.value
    yield f"This is key {new.key.id}. Store it now: it is not shown again."


def list_keys(file: str, *, as_json: bool) -> Iterator[str]:
    """Yield a line for each key of all projects and of the administrators. Raises ConfigError."""
    rows = asyncio.run(_list(load_accounts_config(file)))
    if as_json:
        yield json.dumps(rows, indent=2)
        return
    cells = [("ID", "PROJECT", "NAME", "KEY", "SCOPES", "EXPIRES", "LAST USED"), *map(_table_row, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def revoke(file: str, key_id: str) -> str:
    """Revoke the key and return a line about it. Raises ConfigError if there is none of this id."""
    return asyncio.run(_revoke(load_accounts_config(file), key_id))


def load_accounts_config(file: str) -> LoadedConfig:
    """Return the run config and its providers. Raises ConfigError, also where its store is one of this process."""
    config, specs = load_wired_config(file)
    if config.kv_store.provider == _MEMORY:
        raise ConfigError(
            f"{config.source}: kv_store.provider: memory ends with its process: keys need sqlite, postgres or redis."
        )
    return config, specs


async def _create(loaded: LoadedConfig, request: KeyRequest) -> NewKey:
    async with _open_directory(loaded) as directory:
        try:
            account = None
            if request.project_id is not None:
                try:
                    await directory.get_project(request.project_id)
                except NotFound:
                    await directory.create_project(request.project_id, project_id=request.project_id)
                account = await directory.create_service_account(request.project_id, request.name)
            options = KeyOptions(request.name, request.scopes, expires_in_s=request.expires_in_s)
            return await directory.create_key(account, options)
        except InvalidRequest as exc:
            raise ConfigError(exc.message) from exc


async def _list(loaded: LoadedConfig) -> list[dict[str, Any]]:
    async with _open_directory(loaded) as directory:
        rows: list[dict[str, Any]] = []
        async for key, used_at in _all_keys(directory):
            rows.append(_key_fields(key, used_at))
        return rows


async def _revoke(loaded: LoadedConfig, key_id: str) -> str:
    async with _open_directory(loaded) as directory:
        async for key, _ in _all_keys(directory):
            if key.id == key_id:
                await directory.revoke_key(key.project_id, key.id)
                return f"Revoked {key.id} ({key.name}): every server of this store refuses it within a second."
    raise ConfigError(f"There is no key {key_id}. `stack keys list` shows the ids.")


async def _all_keys(directory: "StoredDirectory") -> AsyncGenerator[tuple[StoredKey, int | None]]:
    for project_id in (ADMIN_TENANT, *await directory.list_project_ids()):
        after = None
        while True:
            keys = await directory.list_keys(project_id, AccountPage(after=after, limit=_PAGE_KEYS))
            for key, used_at in zip(keys.data, await directory.last_uses(keys.data), strict=True):
                yield key, used_at
            if not keys.has_more:
                break
            after = keys.data[-1].id


@asynccontextmanager
async def _open_directory(loaded: LoadedConfig) -> AsyncGenerator["StoredDirectory"]:
    CURRENT_ACTOR.set(AuditActor("session", f"command-line:{_user_name()}"))
    async with open_accounts(loaded) as accounts:
        yield require_organization(loaded, accounts).directory


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())


@asynccontextmanager
async def open_accounts(loaded: LoadedConfig) -> AsyncGenerator[Accounts]:
    """Start the accounts of the run config, with the store and the fetcher that they need, and nothing else of it.
    Raises ConfigError."""
    async with open_providers(*loaded, ("accounts",), started=Accounts | Fetcher | KVStore) as (live, _):
        yield cast("Accounts", live["accounts"])


def require_organization(loaded: LoadedConfig, accounts: Accounts) -> "StoredOrganization":
    """Return the organization of the accounts. Raises ConfigError where they are those of the run config."""
    config, _ = loaded
    organization = find_organization(accounts)
    if organization is None:
        raise ConfigError(
            f"{config.source}: accounts.provider: is {config.accounts.provider}, whose keys are changed in the run "
            "config. Add the section `accounts: {provider: stored}`."
        )
    return organization


def _key_fields(key: StoredKey, last_used_at: int | None) -> dict[str, Any]:
    is_admin = key.project_id == ADMIN_TENANT
    return {
        "id": key.id,
        "project_id": None if is_admin else key.project_id,
        "name": key.name,
        "redacted_value": key.redacted_value,
        "scopes": ["admin"] if is_admin else [*key.scopes],
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": last_used_at,
    }


def _table_row(fields: dict[str, Any]) -> tuple[str, ...]:
    return (
        fields["id"],
        fields["project_id"] or "",
        fields["name"],
        fields["redacted_value"],
        " ".join(fields["scopes"]) or "all",
        _date(fields["expires_at"], "never"),
        _date(fields["last_used_at"], "never"),
    )


def _date(seconds: int | None, absent: str) -> str:
    return absent if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
