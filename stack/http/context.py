"""HttpContext, the facts of one request; Services, the open stack that handlers use; Route, which joins them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from apis.accounts.accounts import NO_CALLER, Caller
from apis.accounts.charges import Charge
from apis.accounts.project_settings import HostedTool
from apis.errors import PermissionDenied, Unsupported
from apis.fair_share import Place
from stack.build import Stack
from stack.http.access.admission_queue import AdmissionQueue
from stack.http.answers import client_disconnected_response
from stack.http.cache_salts import CacheSalts
from stack.http.metrics import Metrics
from stack.http.readiness import StoreProbe
from stack.http.request_record import RequestRecord
from stack.http.shares import RequestShares
from stack.http.streams import ClientDisconnected, EventStream, StreamMonitor

ProviderT = TypeVar("ProviderT")
_CONTEXT_KEY: Final = "stack.http_context"
_METRICS_REFRESH_S: Final = 1.0


class HttpContext(msgspec.Struct):
    """The facts of one HTTP request or WebSocket, created by the edge and shared by all layers within it.

    `finish_request` counts and logs one record; the edge calls it for `request_record`, a WebSocket for each response.
    """

    request_record: RequestRecord
    finish_request: Callable[[RequestRecord], None]
    trace: Mapping[str, str]
    """The W3C headers `traceparent` and `tracestate`, by name; empty without a valid parent."""
    tenant: str = ""
    """Empty until the edge has authenticated the request, and on paths that are open to all."""
    caller: Caller = NO_CALLER
    """The sender, its key and that key's rights; as `tenant`, unknown until the edge has authenticated the request."""
    authenticate_again: Callable[[], Awaitable[Caller]] | None = None
    """Returns the caller of a WebSocket's key as it is now, or raises Unauthorized; None where no key is needed."""
    charge: Charge | None = None
    """The charge of a request that reaches a model; the edge ends it when the request is over."""
    is_batch_line: bool = False
    """True for a request of a batch, which has no connection."""
    response_id: str | None = None
    """The id that a create of a response has to use; None lets the route choose one."""
    body_places: list[Place] = []
    """Places that the request, or its body, holds until the request is over."""
    created_id: str = ""
    """The id of the conversation, vector store or container that the request has created."""

    @property
    def is_over_limit(self) -> bool:
        """True of a request that was refused under the limits of its key, before any work."""
        return bool(self.caller.limits) and self.charge is None

    @property
    def is_administrator(self) -> bool:
        """True if the sender may see and manage what belongs to no single tenant."""
        return self.caller.is_administrator

    @property
    def request_id(self) -> str:
        """The id in the `x-request-id` header of the response."""
        return self.request_record.id


def set_context(scope: Scope, context: HttpContext) -> None:
    """Store the context of the request whose scope it is; copies of the scope share it."""
    scope[_CONTEXT_KEY] = context


def get_context(scope: Scope) -> HttpContext:
    """Return the context that the edge stored."""
    return scope[_CONTEXT_KEY]


@dataclass(frozen=True, slots=True)
class Services:
    """The open stack of an app, and what its handlers share."""

    stack: Stack
    monitor: StreamMonitor
    metrics: Metrics
    cache_salts: CacheSalts
    routes: tuple[tuple[str, "Route"], ...]
    """The routes by their full paths, those with and without /v1 once."""
    shares: RequestShares
    admission: AdmissionQueue
    store_probe: StoreProbe

    @property
    def max_body_bytes(self) -> int:
        """The most bytes that a body of JSON may have."""
        return self.stack.config.server.max_body_bytes

    def end_running(self) -> None:
        """Let the requests that still run end with an error when they are cancelled, because the process ends."""
        self.monitor.is_ending = True
        self.stack.responses.end_running()

    async def refresh_metrics(self) -> None:
        """Set the metrics that are not counted as they happen."""
        await self.metrics.refresh(self.stack.inference, self.stack.providers_by_path, self.monitor.open_streams)

    async def keep_metrics_fresh(self) -> None:
        """Refresh the metrics every second until cancelled, for the scrapes that other workers answer."""
        while True:
            await self.refresh_metrics()
            await asyncio.sleep(_METRICS_REFRESH_S)


def require_section(provider: ProviderT | None, lack: str, section: str) -> ProviderT:
    """Return the provider of a section of the run config. Raises Unsupported, which says what the server lacks, where
    there is none."""
    if provider is None:
        raise Unsupported(f"This server {lack}: its config has no section `{section}`.", code="not_configured")
    return provider


def get_services(scope: Scope) -> Services:
    """Return the services of the app that a request reached; they exist while its lifespan lasts."""
    return scope["app"].state.services


Handler = Callable[[Request, HttpContext, Services], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, its handler, and the models of the body and the query that the handler reads.

    A handler returns an ASGI response or raises a StackError. A route with `form` takes a file as
    `multipart/form-data`, in the field `file_field`; the model describes the other fields of the form, and BaseModel
    itself has none.

    Every POST declares whether it `stores` content of its tenant, whichever fields it has: it is then closed to
    projects that store nothing. `tool` is the hosted tool whose work the route does, without which it is closed.
    """

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    file_field: str = "file"
    stores: bool | None = None
    tool: HostedTool | None = None

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


class Endpoint:
    """ASGI app over the handler of one route. Starlette puts three more layers around a plain function, and every token
    of a stream would pass through them."""

    def __init__(self, route: Route, path: str) -> None:
        self._route = route
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = get_context(scope)
        context.request_record.route = self._path
        services = get_services(scope)
        self._route.require_access(context.caller)
        try:
            response = await self._route.handler(Request(scope, receive, send), context, services)
        except ClientDisconnected:
            response = client_disconnected_response()
        if isinstance(response, EventStream):
            with services.shares.open_stream(context.tenant):
                await response(scope, receive, send)
        else:
            await response(scope, receive, send)


class FixedRoutes:
    """ASGI layer around a router that has all its routes. It finds the endpoint of a path without parameters by one
    look-up. The router, which tries each route, gets every other request: with parameters, of another method, or of no
    route."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._endpoints: dict[tuple[str, str], ASGIApp] = {}
        for route in router.routes:
            if isinstance(route, StarletteRoute) and "{" not in route.path:
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.app)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self._endpoints.get((scope.get("method", ""), scope.get("path", "")), self._router)
        return endpoint(scope, receive, send)
