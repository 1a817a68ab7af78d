"""Accounts: the API that recognizes a client by its key. The HTTP edge uses nothing else to admit a request."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from apis.accounts.limits import KEY_SUBJECT_PREFIX, ORGANIZATION, WHOLE_PROJECT, RateLimit, is_model_subject
from apis.accounts.organization import Organization
from apis.accounts.project_settings import OPEN_SETTINGS, ProjectSettings, find_hosted_tool
from apis.accounts.scopes import ADMIN_SCOPE, PROJECT_SCOPES, Grant, Scope
from apis.accounts.sign_in import SignIn
from apis.errors import PermissionDenied
from apis.inference import ModelNames
from apis.provider import Provider

MAX_KEY_AGE_S: Final = 1.0
"""Seconds for which a provider may answer from memory: a revoked key is refused everywhere after this time."""
ADMIN_TENANT: Final = ".admin"
"""Tenant of administrators' keys. No project has its name, and no route of a tenant's own objects admits these keys."""
CLIENT_TOOLS: Final = frozenset({"function", "custom", "namespace"})
"""Types of tools that run where the client is, which every key may declare."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The one who sends a request: its tenant (the project), its key and what that key may do. `expires_at` is in
    seconds of Unix time."""

    tenant: str
    key_id: str = ""
    grant: Grant = field(default_factory=Grant)
    expires_at: float | None = None
    limits: Mapping[str, RateLimit] = field(default_factory=dict[str, RateLimit])
    """The limits of the project by subject: WHOLE_PROJECT, `key:KEY_ID` or a model; and that of all projects."""
    settings: ProjectSettings = OPEN_SETTINGS
    is_restricted: bool = field(init=False)
    """True if some models, tools or service tiers are closed to the key or to its project."""

    def __post_init__(self) -> None:
        grant = self.grant
        is_open = grant.models is None and grant.tools is None and self.settings.are_open
        object.__setattr__(self, "is_restricted", not is_open)

    def find_limits(self, model: ModelNames | None) -> Mapping[str, RateLimit]:
        """Return the limits that apply to a request for the model, by subject: those under all of its names."""
        if not self.limits:
            return {}
        names = () if model is None else sorted(model.names | model.shared)
        subjects = (
            *(ORGANIZATION, WHOLE_PROJECT, f"{KEY_SUBJECT_PREFIX}{self.key_id}"),
            *(name for name in names if is_model_subject(name)),
        )
        return {subject: self.limits[subject] for subject in subjects if subject in self.limits}

    @property
    def needs_listed_models(self) -> bool:
        """True if models are closed or limited one by one. A name that no list has could stand for any of them, so it
        is not for this caller."""
        settings = self.settings
        return (settings.model_mode == "deny_list" and bool(settings.model_ids)) or any(
            map(is_model_subject, self.limits)
        )

    @property
    def is_administrator(self) -> bool:
        """True if the key may manage projects and keys."""
        return "admin" in self.grant.scopes

    @property
    def has_expired(self) -> bool:
        """True from the second at which the key expires."""
        return self.expires_at is not None and time.time() >= self.expires_at

    def require_any(self, scopes: frozenset[Scope], resource: str) -> None:
        """Raise PermissionDenied if the key has none of `scopes`."""
        if scopes.isdisjoint(self.grant.scopes):
            names = " or ".join(sorted(scopes))
            raise PermissionDenied(
                f"This API key may not use {resource}: it needs the scope {names}.", code="missing_scope"
            )

    def require_model(self, model: ModelNames | None) -> None:
        """Raise PermissionDenied if the key is bound to other models, or to models and the request names none."""
        models = self.grant.models
        if models is None or (model is not None and not models.isdisjoint(model.names)):
            return
        named = ", ".join(sorted(models)[:10])
        problem = "has to name its model" if model is None else f"may not use the model '{model.name[:256]}'"
        raise PermissionDenied(
            f"A request with this API key {problem}: the key is for {named}.", param="model", code="model_not_allowed"
        )

    def require_tool(self, tool_type: str, param: str | None) -> None:
        """Raise PermissionDenied if the key is bound to other tools of the server. A tool has the same rights in all
        its spellings."""
        tools = self.grant.tools
        if tools is None or tool_type in tools or tool_type in CLIENT_TOOLS:
            return
        name = find_hosted_tool(tool_type)
        if name is not None and name in map(find_hosted_tool, tools):
            return
        raise PermissionDenied(
            f"This API key may not use the tool '{tool_type[:64]}': it is for {', '.join(sorted(tools)[:10])}.",
            param=param,
            code="tool_not_allowed",
        )


NO_CALLER: Final = Caller("", grant=Grant(frozenset()))
"""Stands for the sender of a request that nothing has authenticated."""
OPEN_CALLER: Final = Caller("default", grant=Grant(PROJECT_SCOPES | ADMIN_SCOPE))
"""Sender of every request to a server without keys, which belongs to whom it answers."""


@dataclass(frozen=True, slots=True)
class ConfiguredKeys:
    """The callers of `server.api_keys`, by the SHA-256 of their key. A provider whose constructor has a parameter of
    this type receives them."""

    callers: Mapping[bytes, Caller] = field(default_factory=dict[bytes, Caller])


def digest_key(key: bytes) -> bytes:
    """Return the SHA-256 of a key. Keys are looked up by it, so the time of a look-up reveals nothing about the key."""
    return hashlib.sha256(key).digest()


class Accounts(Provider, ABC):
    """Recognizes clients by their keys.

    Only the provider `config` of a run config without `server.api_keys` admits requests without a key; with any other
    provider every request needs one. Promises (tests/spec/accounts):
    - A revoked or expired key is refused everywhere within MAX_KEY_AGE_S.
    - The time of an answer depends on the key's hash only.
    - When the keys cannot be read, nothing is admitted: StoreUnavailable is raised.
    """

    @abstractmethod
    async def authenticate(self, key: bytes) -> Caller | None:
        """Return the caller whose key this is, None if no one has it. Raises StoreUnavailable."""

    @abstractmethod
    async def find_caller(self, project_id: str, key_id: str) -> Caller | None:
        """Return the caller with the key of this id, for work that is done after its request has ended; None if the
        key was revoked or has expired. Raises StoreUnavailable."""

    async def find_owner(self, project_id: str, key_id: str) -> Caller | None:
        """Return the caller for queued work: with the key of this id, or with the settings and limits of its project
        where `key_id` is empty, because no key was needed, or only a token. None if the key was revoked or has expired,
        or the project was archived. Raises StoreUnavailable."""
        return await self.find_caller(project_id, key_id) if key_id else Caller(project_id)

    async def find_lasting_key(self, caller: Caller) -> str:
        """Return the id of the caller's key for `find_owner`; empty for a token, which nothing is stored of."""
        if caller.expires_at is None:
            return caller.key_id
        return "" if await self.find_caller(caller.tenant, caller.key_id) is None else caller.key_id

    async def load_sign_in(self) -> SignIn | None:
        """Return how people get a key in their browser, None where they cannot. It needs no key, so it holds nothing
        that is not public. Raises StoreUnavailable while it cannot be read."""
        return None

    def organization(self) -> Organization | None:
        """Return what is kept of projects, None where they are those of the run config. Only providers that store
        projects have one (`providers/accounts/organization.py`)."""
        return None
