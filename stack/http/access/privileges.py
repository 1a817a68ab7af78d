"""Privileges: the scopes of a key that admit a request, by the first part of its path below /v1.

The edge asks here before anything else sees the request: what has no row needs all rights of a project.
"""

from collections.abc import Mapping, Sequence
from typing import Final, cast

from pydantic import BaseModel

from apis.accounts.accounts import Caller
from apis.accounts.scopes import ADMIN_SCOPE, PROJECT_SCOPES, Scope
from apis.errors import PermissionDenied

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
    "responses": _RESPONSES,
    "stack": _RESPONSES,
    "traces": _RESPONSES,
    "uploads": _FILES,
    "vector_stores": _FILES,
}
"""Scopes of which one admits a request of any method. `read` admits GET of each resource that is a tenant's own."""
SERVER_RESOURCES: Final = frozenset({"version", "openapi.json", "metrics"})
"""Resources of the server itself, which every key may read."""
_READ_METHODS: Final = frozenset({"GET", "HEAD"})


def require_privilege(caller: Caller, method: str, path: str) -> None:
    """Raise PermissionDenied if the caller's key has no scope for the request."""
    resource = path.removeprefix("/v1").removeprefix("/").partition("/")[0]
    scopes = RESOURCE_SCOPES.get(resource)
    if scopes is None:
        if resource in SERVER_RESOURCES or caller.grant.scopes >= PROJECT_SCOPES:
            return
        raise PermissionDenied("This API key may not use this path: its scopes are for others.", code="missing_scope")
    if not scopes.isdisjoint(caller.grant.scopes):
        return
    if scopes is not ADMIN_SCOPE and method in _READ_METHODS:
        scopes = scopes | _READ
    caller.require_any(scopes, f"{method} /v1/{resource}")


def require_request(caller: Caller, request: BaseModel) -> None:
    """Raise PermissionDenied if the caller's key is bound to other models or tools than the request names."""
    grant = caller.grant
    if grant.models is not None:
        caller.require_model(getattr(request, "model", None))
    if grant.tools is not None:
        _require_tools(caller, request, "")
        for field in ("input", "items"):
            items: object = getattr(request, field, None)
            for index, item in enumerate(cast("list[object]", items) if isinstance(items, list) else ()):
                _require_tools(caller, item, f"{field}[{index}].")


def _require_tools(caller: Caller, owner: object, prefix: str) -> None:
    """Check the tools of a request, or those that one of its items loads."""
    tools: Sequence[object] = getattr(owner, "tools", None) or ()
    for index, tool in enumerate(tools):
        tool_type = getattr(tool, "type", None)
        if isinstance(tool_type, str):
            caller.require_tool(tool_type, f"{prefix}tools[{index}]")
