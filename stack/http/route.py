"""Route: all facts of one method of one path. Code that treats paths differently reads them here."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.accounts import Caller
from apis.accounts.project_settings import HostedTool
from apis.accounts.scopes import ADMIN_SCOPE, PROJECT_SCOPES, Scope
from apis.errors import PermissionDenied
from stack.http.context import HttpContext, Services

_READ_METHODS: Final = frozenset({"GET", "HEAD"})
_READ: Final[frozenset[Scope]] = frozenset({"read"})


@dataclass(frozen=True, slots=True)
class Access:
    """The scopes of which a key needs one. With `lets_read`, each of the `readers` admits GET as well. Without
    `needs_key` anyone may send the request."""

    scopes: frozenset[Scope]
    lets_read: bool = False
    readers: frozenset[Scope] = _READ
    needs_key: bool = True

    def find_scopes(self, method: str) -> frozenset[Scope]:
        """Return the scopes of which one admits the method."""
        return self.scopes | self.readers if self.lets_read and method in _READ_METHODS else self.scopes


RESPONSES: Final = Access(frozenset({"responses"}), lets_read=True)
_READ_AGENTS: Final[frozenset[Scope]] = frozenset({"read", "api.agents.read"})
AGENTS: Final = Access(frozenset({"api.agents.write"}), lets_read=True, readers=_READ_AGENTS)
_READ_VAULTS: Final[frozenset[Scope]] = frozenset({"read", "api.vaults.read"})
VAULTS: Final = Access(frozenset({"api.vaults.write"}), lets_read=True, readers=_READ_VAULTS)
FILES: Final = Access(frozenset({"files"}), lets_read=True)
ANY_PROJECT_KEY: Final = Access(PROJECT_SCOPES)
ADMINISTRATION: Final = Access(ADMIN_SCOPE)
ANY_KEY: Final = Access(PROJECT_SCOPES | ADMIN_SCOPE)
NO_KEY: Final = Access(frozenset(), needs_key=False)

Handler = Callable[[Request, HttpContext, Services], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, who may use it, its handler, and the models of the body and the query that it reads.

    A handler returns an ASGI response or raises a StackError. A route with `form` takes a file as
    `multipart/form-data`, in the field `file_field`, and further ones in `optional_files`; the model describes the
    other fields of the form, and BaseModel itself has none. With `form_or_json` the body may be JSON instead.

    Every POST declares whether it `stores` content of its tenant, whichever fields it has: it is then closed to
    projects that store nothing. `tool` is the hosted tool whose work the route does, without which it is closed.

    `keyed` takes an Idempotency-Key; of a DELETE it says that the answers under such keys go with the object. `batched`
    lines of batches may name, `websocket` is also opened as a WebSocket, and a `probe` is requested all the time, also
    while the server drains: its successful requests are neither logged nor traced.
    """

    method: str
    path: str
    access: Access
    handler: Handler
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    file_field: str = "file"
    optional_files: tuple[str, ...] = ()
    form_or_json: bool = False
    stores: bool | None = None
    tool: HostedTool | None = None
    keyed: bool = False
    batched: bool = False
    websocket: bool = False
    probe: bool = False

    def __post_init__(self) -> None:
        if self.method == "POST" and self.stores is None:
            raise TypeError(f"POST {self.path} has to declare whether it stores content")

    def require_access(self, caller: Caller) -> None:
        """Raise PermissionDenied if the caller's project may not store what the route stores, or the caller may not use
        the tool whose work it does."""
        if self.stores and caller.settings.stores_nothing:
            raise PermissionDenied(
                f"This project stores nothing: {self.method} /v1{self.path} is closed to it.", code="zero_retention"
            )
        if self.tool is not None:
            caller.require_tool(self.tool, None)
            caller.settings.require_tool(self.tool, None, None)
