"""Gates: what a request passes before its handler, in order: its head, CORS, its key, its rights, the body's type.

A gate lets a request pass, or raises a StackError. What has to be read to be judged, the body's size, the model and
tools that it names, limits and the queue, is checked where a handler reads its body (`request_body.py`)."""

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Scope

from apis.accounts.accounts import OPEN_CALLER, Accounts, Caller, digest_key
from apis.accounts.scopes import PROJECT_SCOPES
from apis.errors import InvalidRequest, Overloaded, PermissionDenied, Unauthorized, UnsupportedMediaType
from providers.common.fair_turns import CURRENT_TURN, turn_of
from providers.common.held_bytes import HELD_PLACES
from stack.config import StackConfig
from stack.http.context import HttpContext
from stack.http.messages.dialect import speaks_messages
from stack.http.metrics import METRICS_PATH
from stack.http.parsing import find_header
from stack.http.peer import get_peer
from stack.http.route_table import get_match
from stack.http.streams import SHUTTING_DOWN_MESSAGE

_HTTP_VERSIONS: Final = frozenset({"1.1", "1.0"})
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
"""A Host header: a name or an address, and a port. `user@name` or a list of names are none."""
_FOREIGN_SITES: Final = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site by which a browser says that a page of another origin sends the request."""
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_ALLOWED_METHODS: Final = "GET, POST, DELETE"
_EXPOSED_HEADERS: Final = (
    "x-request-id, request-id, retry-after, x-should-retry, idempotent-replayed, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_MAX_AGE_S: Final = 600
"""Seconds for which a browser remembers the answer to a preflight."""
_MAX_REQUESTED_CHARS: Final = 1024


class CorsPolicy:
    """Lets web pages of the origins in `server.cors_origins` call the API, by the CORS protocol of the Fetch standard.

    `*` allows any origin. There are no credentials: an API key is sent as a header. Starlette's own middleware would
    add a layer to every message of every stream.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self.allows_all = "*" in origins
        self._origins = {origin.lower() for origin in origins}

    def allows(self, origin: str | None) -> bool:
        """Return true if pages of the origin may call the API."""
        return origin is not None and (self.allows_all or origin.lower() in self._origins)

    def build_preflight_response(self, headers: Headers) -> Response | None:
        """Return the response to a browser's preflight; None if the request is none, or its origin is not allowed."""
        if not self.allows(headers.get("origin")) or "access-control-request-method" not in headers:
            return None
        response = Response(status_code=204)
        response.headers["access-control-allow-methods"] = _ALLOWED_METHODS
        response.headers["access-control-max-age"] = str(_MAX_AGE_S)
        requested = headers.get("access-control-request-headers", "")
        if requested and len(requested) <= _MAX_REQUESTED_CHARS:
            response.headers["access-control-allow-headers"] = requested
        if headers.get("access-control-request-private-network") == "true":
            response.headers["access-control-allow-private-network"] = "true"
        return response

    def add_headers(self, response_headers: MutableHeaders, origin: str | None) -> None:
        """Add the headers that let a page of the request's origin read a response."""
        if not self.allows_all:
            response_headers.add_vary_header("Origin")
        if origin is not None and self.allows(origin):
            response_headers["access-control-allow-origin"] = "*" if self.allows_all else origin
            response_headers["access-control-expose-headers"] = _EXPOSED_HEADERS


class HeadAnswered(Exception):
    """The head of a request has an answer of its own, and its route none: a preflight."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


Gate = Callable[[Scope, HttpContext], Awaitable[None] | None]


class Gates:
    """The gates of an app. Without API keys the server has one tenant; with keys, the accounts decide who it is.

    The figures of several tenants are only for the key of the metrics and for administrators.

    Without API keys only a browser could be tricked into calling the server: then Host must be a name that the config
    allows, Origin must be the server's own, host and port, or be allowed by `allowed_hosts` or `cors_origins`, and a
    request without Origin may not come from a page of another origin, which could measure its time. With keys, the key
    alone decides, unless the config names hosts.
    """

    def __init__(self, stack_config: StackConfig, cors: CorsPolicy | None) -> None:
        config = stack_config.server
        self._requires_keys = stack_config.requires_keys
        self._cors = cors
        self._metrics_access = config.metrics
        self._metrics_key = digest_key(config.metrics_key.get_secret_value().encode()) if config.metrics_key else None
        has_no_key = config.metrics == "keyed" and self._metrics_key is None
        self._hides_metrics = has_no_key and stack_config.has_several_tenants
        self._listed_hosts = {host.lower() for host in config.allowed_hosts}
        hosts = {config.host, *self._listed_hosts}
        is_open = "*" in hosts or (self._requires_keys and not config.allowed_hosts)
        self._allowed_hosts = None if is_open else _LOOPBACK | {host.lower() for host in hosts}
        # a gate stands where this config gives it something to check
        self.of_all: tuple[Gate, ...] = (self.check_head, *([self.answer_preflight] if cors is not None else ()))
        self.of_callers: tuple[Gate, ...] = (
            self.authenticate,
            self.take_turn,
            *([self.check_scope] if self._requires_keys else ()),
            *([self.check_metrics] if self._hides_metrics else ()),
            *([self.check_project] if self._requires_keys else ()),
            self.check_body_type,
        )

    async def pass_through(self, scope: Scope, context: HttpContext) -> None:
        """Have a request pass its gates; only those of all, where it needs no key. Raises a StackError, and
        HeadAnswered."""
        for gate in self.of_all:
            gate(scope, context)
        if self._is_open(scope):
            return
        for gate in self.of_callers:
            waiting = gate(scope, context)
            if waiting is not None:
                await waiting

    def check_head(self, scope: Scope, _context: HttpContext) -> None:
        """Refuse a head that is not HTTP/1.x, a foreign Host, and a foreign Origin."""
        version = scope.get("http_version", "1.1")
        if version not in _HTTP_VERSIONS:
            raise InvalidRequest("This server speaks HTTP/1.1.")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 and (hosts or version != "1.0"):
            raise InvalidRequest(f"A request has one Host header, and this one has {len(hosts)}.")
        if self._allowed_hosts is None:
            return
        if not hosts or _read_host(hosts[0]) not in self._allowed_hosts:
            raise PermissionDenied("This Host is not allowed here: add it to `server.allowed_hosts`.")
        origin = find_header(scope, b"origin")
        if origin is not None and not self._allows_origin(origin, hosts[0].decode("latin-1")):
            raise PermissionDenied("This Origin is not allowed here: add it to `server.cors_origins`.")
        is_foreign = origin is None and find_header(scope, b"sec-fetch-site") in _FOREIGN_SITES
        if is_foreign and not (self._cors is not None and self._cors.allows_all):
            raise PermissionDenied("A page of another site may not call this server without the CORS protocol.")

    def _allows_origin(self, origin: str, host: str) -> bool:
        scheme, separator, authority = origin.partition("://")
        if scheme in ("http", "https") and separator and authority.lower() == host.lower():
            return True
        return (self._cors is not None and self._cors.allows(origin)) or _parse_host(origin) in self._listed_hosts

    def answer_preflight(self, scope: Scope, _context: HttpContext) -> None:
        """Answer the preflights of listed origins."""
        assert self._cors is not None
        if scope.get("method") == "OPTIONS":
            response = self._cors.build_preflight_response(Headers(scope=scope))
            if response is not None:
                raise HeadAnswered(response)

    def authenticate(self, scope: Scope, context: HttpContext) -> Awaitable[None] | None:
        """Set the caller and the tenant. Refuse an unknown key."""
        if self._requires_keys:
            return self._authenticate(scope, context)
        context.caller, context.tenant = OPEN_CALLER, OPEN_CALLER.tenant
        return None

    def take_turn(self, scope: Scope, context: HttpContext) -> None:
        """Count the work of the request, and what it holds, for its tenant."""
        peer = get_peer(scope)
        if peer is None or peer.turn.tenant != context.tenant:  # the connection's first request
            turn = turn_of(context.tenant)
            if peer is not None:
                peer.admit(turn)
        else:
            turn = peer.turn
        CURRENT_TURN.set(turn)
        HELD_PLACES.set(context.places)

    def check_scope(self, scope: Scope, context: HttpContext) -> None:
        """Refuse a route that is beyond the scopes of the key. What is unknown needs all rights of a project."""
        access, method = get_match(scope).access, context.request_record.method
        if access is not None:
            resource = scope["path"].removeprefix("/v1").split("/")[1]
            context.caller.require_any(access.find_scopes(method), f"{method} /v1/{resource[:64]}")
        elif not context.caller.grant.scopes >= PROJECT_SCOPES:
            raise PermissionDenied(
                "This API key may not use this path: its scopes are for others.", code="missing_scope"
            )

    def check_metrics(self, scope: Scope, context: HttpContext) -> None:
        """Refuse the figures of other tenants."""
        if scope["path"] == METRICS_PATH and not context.is_administrator:
            raise PermissionDenied("The figures are those of all tenants: set `server.metrics_key`, and send that key.")

    def check_project(self, scope: Scope, context: HttpContext) -> None:
        """Refuse a route that stores in a project that stores nothing, and the work of a tool that is not allowed."""
        route, caller = get_match(scope).route, context.caller
        if route is None:
            return
        route.require_access(caller)
        if route.keyed and caller.settings.stores_nothing and find_header(scope, b"idempotency-key"):
            raise PermissionDenied("This project stores nothing, also no answer under an Idempotency-Key.")

    def check_body_type(self, scope: Scope, _context: HttpContext) -> None:
        """Refuse a body of another type or encoding than the route takes."""
        route = get_match(scope).route
        if route is None or route.method != "POST" or scope["type"] != "http":
            return
        encoding = find_header(scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise UnsupportedMediaType(
                f"The body must not be encoded: send it without `Content-Encoding: {encoding[:64]}`.",
                param="Content-Encoding",
            )
        kind, _, parameters = (find_header(scope, b"content-type") or "").partition(";")
        kind, charset = kind.strip().lower(), parameters.strip().lower()
        if route.form is not None and not route.form_or_json:
            if kind != "multipart/form-data":
                raise UnsupportedMediaType("A file is sent as a form: `Content-Type: multipart/form-data`.")
            return
        if not kind and _has_no_body(scope):
            return
        if kind == "multipart/form-data" and route.form is not None:
            return
        if kind != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
            raise UnsupportedMediaType("The body must be JSON: send `Content-Type: application/json`.")

    async def _authenticate(self, scope: Scope, context: HttpContext) -> None:
        context.caller = await self._find_caller(scope)
        context.tenant = context.caller.tenant
        if scope["type"] == "websocket":
            context.authenticate_again = partial(self._find_caller, scope)

    async def _find_caller(self, scope: Scope) -> Caller:
        services = scope["app"].state.services
        if services is None:
            raise Overloaded(SHUTTING_DOWN_MESSAGE)
        accounts, headers = services.stack.accounts, scope["headers"]
        if speaks_messages(scope) and (key := read_header_key(scope)):
            caller = await accounts.authenticate(key)
            if caller is not None:
                return caller
        return await authenticate(accounts, headers)

    def _is_open(self, scope: Scope) -> bool:
        """Return true if the route is open to requests without an API key. Raises Unauthorized for a wrong key of the
        metrics."""
        route = get_match(scope).route
        if route is not None and not route.access.needs_key:
            return True
        if scope["path"] != METRICS_PATH:
            return False
        if self._metrics_access != "keyed" or self._metrics_key is None:
            return self._metrics_access == "open"
        if not hmac.compare_digest(digest_key(read_bearer_key(scope["headers"])), self._metrics_key):
            raise unauthorized_error()
        return True


def read_bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key of the one Authorization header; empty, which is no key, if there is none."""
    values = [value for name, value in headers if name == b"authorization"]
    return values[0][7:].strip() if len(values) == 1 and values[0][:7].lower() == b"bearer " else b""


def read_header_key(scope: Scope) -> bytes:
    """Return the key of the header `x-api-key`, which clients of the Messages API send instead of a bearer key, or in
    addition to it; empty, which is no key, if there is none."""
    return (find_header(scope, b"x-api-key") or "").strip().encode("latin-1")


async def authenticate(accounts: Accounts, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
    """Return the caller whose key the headers have. Raises Unauthorized, and StoreUnavailable."""
    caller = await accounts.authenticate(read_bearer_key(headers))
    if caller is None:
        raise unauthorized_error()
    return caller


def unauthorized_error() -> Unauthorized:
    """Return the error of a request without a key, or with one that no one has."""
    return Unauthorized("Incorrect API key provided: send `Authorization: Bearer KEY`.")


def _has_no_body(scope: Scope) -> bool:
    length = find_header(scope, b"content-length")
    return length in (None, "0") and find_header(scope, b"transfer-encoding") is None


@lru_cache(maxsize=256)
def _read_host(header: bytes) -> str | None:
    """Return the name or the address in a Host header; None for one that is malformed."""
    host = header.decode("latin-1")
    return _parse_host(f"//{host}") if _HOST.fullmatch(host) else None


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
