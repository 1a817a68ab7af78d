"""The directory of accounts: projects, their service accounts and keys, and the keys of administrators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from apis.accounts.requests import AccountPage
from apis.wire.base import Wire

MAX_KEY_LIFE_S = 10 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Project:
    """A tenant: its id is the tenant's name. Times are seconds of Unix time. An archived project's keys are refused."""

    id: str
    name: str
    created_at: int
    archived_at: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """An owner of keys within a project that is no person."""

    id: str
    project_id: str
    name: str
    created_at: int
    role: str = "member"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key without its secret, of which only the SHA-256 (`digest`, hexadecimal) and a shortened text are stored.

    `project_id` is that of ADMIN_TENANT for a key of an administrator. `scopes` are the texts that
    `parse_project_scopes` reads.
    """

    id: str
    project_id: str
    name: str
    digest: str
    redacted_value: str
    created_at: int
    service_account_id: str | None = None
    expires_at: int | None = None
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that has just been created, with its secret, which is returned this once."""

    key: StoredKey
    value: str


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """The fields of a new key. `expires_in_s` is None for one that never expires."""

    name: str
    scopes: Sequence[str] = ()
    expires_in_s: int | None = None


class ProjectPage(AccountPage):
    """Query of the listing of projects."""

    include_archived: bool = False


class KeyPage(AccountPage):
    """Query of the listing of a project's keys. `owner_project_access` is `inactive` where the project is archived."""

    owner_project_access: Literal["active", "inactive", "any"] | None = None


class AdminKeyPage(AccountPage):
    """Query of the listing of administrators' keys."""

    order: Literal["asc", "desc"] = "asc"


class CreateProject(Wire):
    """Body that creates a project."""

    name: str = Field(min_length=1, max_length=256)


class UpdateProject(Wire):
    """Body that renames a project."""

    name: str | None = Field(default=None, min_length=1, max_length=256)


class CreateServiceAccount(Wire):
    """Body that creates a service account, with a first key unless that is switched off."""

    name: str = Field(min_length=1, max_length=256)
    create_service_account_only: bool | None = None
    expires_in_seconds: int | None = Field(default=None, ge=1, le=MAX_KEY_LIFE_S)


class UpdateServiceAccount(Wire):
    """Body that renames a service account."""

    name: str | None = Field(default=None, min_length=1, max_length=256)


class CreateServiceAccountKey(Wire):
    """Body that creates a further key of a service account."""

    name: str | None = Field(default=None, min_length=1, max_length=256)
    scopes: list[str] = Field(default=[], max_length=128)
    expires_in_seconds: int | None = Field(default=None, ge=1, le=MAX_KEY_LIFE_S)


class UpdateKey(Wire):
    """Body that changes a key of a project: fields that are absent stay, and no scopes stand for all of them."""

    scopes: list[str] | None = Field(default=None, max_length=128)
    expires_in_seconds: int | None = Field(default=None, ge=1, le=MAX_KEY_LIFE_S)


class CreateAdminKey(Wire):
    """Body that creates a key of an administrator."""

    name: str = Field(min_length=1, max_length=256)
    expires_in_seconds: int | None = Field(default=None, ge=1, le=MAX_KEY_LIFE_S)
