"""Checks of a request's head before it is routed: HTTP itself, Host, Origin and CORS, the body's type."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from apis.accounts.accounts import Accounts, Caller
from apis.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    StackError,
    Unauthorized,
    UnsupportedMediaType,
)
from stack.http.parsing import find_header
from stack.http.routes.absences import absence_message
from stack.server_config import HttpServerConfig

UPLOAD_PATHS: Final = re.compile(r"(?:/v1)?/(?:files|uploads/[^/]+/parts|skills|skills/[^/]+/versions)")
FORM_OR_JSON_PATHS: Final = re.compile(r"(?:/v1)?/containers/[^/]+/files")
WEBSOCKET_HINT: Final = (
    " Its WebSocket is opened with the headers `Upgrade: websocket` and `Connection: upgrade`, which a proxy in "
    "front has to pass on."
)
_WEBSOCKET_PATHS: Final = frozenset({"/v1/responses", "/responses"})
_HTTP_VERSIONS: Final = frozenset({"1.1", "1.0"})
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
"""A Host header: a name or an address, and a port. `user@name` or a list of names are none."""
_FOREIGN_SITES: Final = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site by which a browser says that a page of another origin sends the request."""
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_ALLOWED_METHODS: Final = "GET, POST, DELETE"
_EXPOSED_HEADERS: Final = (
    "x-request-id, retry-after, x-should-retry, idempotent-replayed, x-ratelimit-limit-requests, "
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


class HeadChecks:
    """Refuses requests whose head cannot be right.

    Without API keys only a browser could be tricked into calling the server: then Host must be a name that the config
    allows, Origin must be the server's own, host and port, or be allowed by `allowed_hosts` or `cors_origins`, and a
    request without Origin may not come from a page of another origin, which could measure its time. With keys, the key
    alone decides, unless the config names hosts.
    """

    def __init__(self, config: HttpServerConfig, cors: CorsPolicy | None, *, requires_keys: bool) -> None:
        self._cors = cors
        self._listed_hosts = {host.lower() for host in config.allowed_hosts}
        hosts = {config.host, *self._listed_hosts}
        self._allowed_hosts = None if "*" in hosts else _LOOPBACK | {host.lower() for host in hosts}
        if requires_keys and not config.allowed_hosts:
            self._allowed_hosts = None

    def check(self, scope: Scope) -> None:
        """Raise InvalidRequest for a head that is not HTTP/1.x, and PermissionDenied for a foreign Host or Origin."""
        version = scope.get("http_version", "1.1")
        if version not in _HTTP_VERSIONS:
            raise InvalidRequest("This server speaks HTTP/1.1.")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 and (hosts or version != "1.0"):
            raise InvalidRequest(f"A request has one Host header, and this one has {len(hosts)}.")
        if self._allowed_hosts is None:
            return
        host = hosts[0].decode("latin-1") if hosts else ""
        if not _HOST.fullmatch(host) or _parse_host(f"//{host}") not in self._allowed_hosts:
            raise PermissionDenied("This Host is not allowed here: add it to `server.allowed_hosts`.")
        origin = find_header(scope["headers"], b"origin")
        if origin is not None and not self._allows_origin(origin, host):
            raise PermissionDenied("This Origin is not allowed here: add it to `server.cors_origins`.")
        is_foreign = origin is None and find_header(scope["headers"], b"sec-fetch-site") in _FOREIGN_SITES
        if is_foreign and not (self._cors is not None and self._cors.allows_all):
            raise PermissionDenied("A page of another site may not call this server without the CORS protocol.")

    def _allows_origin(self, origin: str, host: str) -> bool:
        scheme, separator, authority = origin.partition("://")
        if scheme in ("http", "https") and separator and authority.lower() == host.lower():
            return True
        return (self._cors is not None and self._cors.allows(origin)) or _parse_host(origin) in self._listed_hosts


def read_bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key of the one Authorization header; empty, which is no key, if there is none."""
    values = [value for name, value in headers if name == b"authorization"]
    return values[0][7:].strip() if len(values) == 1 and values[0][:7].lower() == b"bearer " else b""


async def authenticate(accounts: Accounts, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
    """Return the caller whose key the headers have. Raises Unauthorized, and StoreUnavailable."""
    caller = await accounts.authenticate(read_bearer_key(headers))
    if caller is None:
        raise unauthorized_error()
    return caller


def unauthorized_error() -> Unauthorized:
    """Return the error of a request without a key, or with one that no one has."""
    return Unauthorized("Incorrect API key provided: send `Authorization: Bearer KEY`.")


def check_body_type(path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise UnsupportedMediaType for a body of another type or encoding than the path takes."""
    encoding = find_header(headers, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise UnsupportedMediaType(
            f"The body must not be encoded: send it without `Content-Encoding: {encoding[:64]}`.",
            param="Content-Encoding",
        )
    kind, _, parameters = (find_header(headers, b"content-type") or "").partition(";")
    kind, charset = kind.strip().lower(), parameters.strip().lower()
    if UPLOAD_PATHS.fullmatch(path):
        if kind != "multipart/form-data":
            raise UnsupportedMediaType("A file is sent as a form: `Content-Type: multipart/form-data`.")
        return
    if not kind and _has_no_body(headers):
        return
    if kind == "multipart/form-data" and FORM_OR_JSON_PATHS.fullmatch(path):
        return
    if kind != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise UnsupportedMediaType("The body must be JSON: send `Content-Type: application/json`.")


def routing_error(exc: HTTPException, scope: Scope, routes: Iterable[BaseRoute]) -> tuple[StackError, dict[str, str]]:
    """Return the API's own error for an exception of the router, and the headers that belong to it."""
    method, path = scope.get("method", "WebSocket"), scope["path"][:256]
    if exc.status_code != 405:
        return NotFound(absence_message(path) or f"Unknown request URL: {method} {path}."), {}
    methods: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] != Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    message = f"{path} does not take {method}."
    if method == "GET" and scope["path"] in _WEBSOCKET_PATHS:
        message += WEBSOCKET_HINT
    return MethodNotAllowed(message), {"allow": ", ".join(sorted(methods))}


def _has_no_body(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    length = find_header(headers, b"content-length")
    return length in (None, "0") and find_header(headers, b"transfer-encoding") is None


@lru_cache(maxsize=256)
def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
