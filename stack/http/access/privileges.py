"""Privileges: the scopes of a key that admit a request, by the first part of its path below /v1.

The edge asks here before anything else sees the request: what has no row needs all rights of a project.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, cast

from pydantic import BaseModel

from apis.accounts.accounts import Caller
from apis.accounts.project_settings import OPEN_SETTINGS, STORING_RESOURCES
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
    if method == "POST" and caller.settings.stores_nothing and resource in STORING_RESOURCES:
        raise PermissionDenied(f"This project stores nothing: /v1/{resource} is closed to it.", code="zero_retention")
    if not scopes.isdisjoint(caller.grant.scopes):
        return
    if scopes is not ADMIN_SCOPE and method in _READ_METHODS:
        scopes = scopes | _READ
    caller.require_any(scopes, f"{method} /v1/{resource}")


def require_request(caller: Caller, request: BaseModel) -> None:
    """Raise PermissionDenied if the caller's key or project is bound to other models or tools than the request names,
    or the project to other service tiers."""
    grant, settings = caller.grant, caller.settings
    if grant.models is None and grant.tools is None and settings.are_open:
        return
    if grant.models is not None:
        caller.require_model(getattr(request, "model", None))
    if "model" in type(request).model_fields:
        settings.require_model(getattr(request, "model", None))
    if "service_tier" in type(request).model_fields:
        settings.require_tier(getattr(request, "service_tier", None))
    if grant.tools is not None or settings.disabled_tools:
        _require_tools(caller, request, "")
        for field in ("input", "items"):
            items: object = getattr(request, field, None)
            for index, item in enumerate(cast("list[object]", items) if isinstance(items, list) else ()):
                _require_tools(caller, item, f"{field}[{index}].")


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


def _require_tools(caller: Caller, owner: object, prefix: str) -> None:
    """Check the tools of a request, or those that one of its items loads."""
    tools: Sequence[object] = getattr(owner, "tools", None) or ()
    for index, tool in enumerate(tools):
        tool_type = getattr(tool, "type", None)
        if isinstance(tool_type, str):
            param = f"{prefix}tools[{index}]"
            caller.require_tool(tool_type, param)
            environment = getattr(tool, "environment", None)
            caller.settings.require_tool(tool_type, getattr(environment, "type", None), param)
