"""Privileges: the scopes of a key that admit a request, by the first part of its path below /v1; and the settings of
its project. What a request may ask of models and tools is in `providers/common/permissions.py`.

The edge asks here before anything else sees the request: what has no row needs all rights of a project.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import BaseModel

from apis.accounts.accounts import Caller
from apis.accounts.project_settings import OPEN_SETTINGS
from apis.accounts.scopes import ADMIN_SCOPE, PROJECT_SCOPES, Scope
from apis.errors import PermissionDenied

RequestT = TypeVar("RequestT", bound=BaseModel)
_RESPONSES: Final[frozenset[Scope]] = frozenset({"responses"})
_FILES: Final[frozenset[Scope]] = frozenset({"files"})
_READ: Final[frozenset[Scope]] = frozenset({"read"})
RESOURCE_SCOPES: Final[Mapping[str, frozenset[Scope]]] = {
    "batches": _RESPONSES,
    "chat": _RESPONSES,
    "completions": _RESPONSES,
    "containers": _RESPONSES,
    "conversations": _RESPONSES,
    "embeddings": _RESPONSES,
    "files": _FILES,
    "models": PROJECT_SCOPES,
    "organization": ADMIN_SCOPE,
    "projects": ADMIN_SCOPE,
    "responses": _RESPONSES,
    "skills": _FILES,
    "stack": _RESPONSES,
    "stack/key": PROJECT_SCOPES | ADMIN_SCOPE,
    "stack/usage": PROJECT_SCOPES | ADMIN_SCOPE,
    "traces": _RESPONSES,
    "uploads": _FILES,
    "vector_stores": _FILES,
    "webhook_endpoints": _RESPONSES,
    "webhook_event_types": _RESPONSES,
}
"""Scopes of which one admits a request of any method. `read` admits GET of each resource that is a tenant's own. A row
of two parts is for what every key may read about itself."""
SERVER_RESOURCES: Final = frozenset({"version", "openapi.json", "metrics"})
"""Resources of the server itself, which every key may read."""
_READ_METHODS: Final = frozenset({"GET", "HEAD"})


def require_privilege(caller: Caller, method: str, path: str) -> None:
    """Raise PermissionDenied if the caller's key has no scope for the request."""
    below = path.removeprefix("/v1").removeprefix("/")
    resource = below.partition("/")[0]
    scopes = RESOURCE_SCOPES.get(below) or RESOURCE_SCOPES.get(resource)
    if scopes is None:
        if resource in SERVER_RESOURCES or caller.grant.scopes >= PROJECT_SCOPES:
            return
        raise PermissionDenied("This API key may not use this path: its scopes are for others.", code="missing_scope")
    if not scopes.isdisjoint(caller.grant.scopes):
        return
    if scopes is not ADMIN_SCOPE and method in _READ_METHODS:
        scopes = scopes | _READ
    caller.require_any(scopes, f"{method} /v1/{resource}")


def apply_settings(caller: Caller, request: RequestT) -> RequestT:
    """Return the request as the settings of its project have it: with their default tier where it names none, and
    without storing where nothing may be stored. Raises PermissionDenied if it cannot do without."""
    settings = caller.settings
    if settings is OPEN_SETTINGS:
        return request
    fields = type(request).model_fields
    changes: dict[str, object] = {}
    if settings.default_tier != "standard" and getattr(request, "service_tier", None) in (None, "auto"):
        changes["service_tier"] = settings.default_tier
    if settings.stores_nothing:
        for name in ("background", "conversation"):
            if getattr(request, name, None):
                raise PermissionDenied(f"This project stores nothing: '{name}' needs that.", param=name)
        changes["store"] = False
    changes = {name: value for name, value in changes.items() if name in fields}
    return request.model_copy(update=changes) if changes else request
