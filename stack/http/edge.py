"""Edge, the outermost layer: it authenticates requests, gives them ids, renders their errors, counts and logs them."""

import hashlib
import hmac
import itertools
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import (
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    StackError,
    Unauthorized,
    UnsupportedMediaType,
    internal_error,
)
from apis.telemetry import REQUEST_ID, TRACE_HEADERS
from stack.config import HttpServerConfig
from stack.http.answers import error_response
from stack.http.context import HttpContext, get_context, set_context
from stack.http.metrics import METRICS_PATH, Metrics
from stack.http.request_record import OTHER, WEBSOCKET, RequestRecord, read_client_request_id, read_trace
from stack.http.streams import EVENT_STREAM_HEADER

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("stack.access")
_REQUEST_ID_PREFIX: Final = secrets.token_hex(10)
_request_numbers = itertools.count()
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
PROBE_PATHS: Final = OPEN_PATHS | {METRICS_PATH}
"""Paths that are requested all the time, also while the server drains: successful requests of them are not logged."""
UPLOAD_PATHS: Final = frozenset({"/v1/files", "/files"})
FORM_OR_JSON_PATHS: Final = re.compile(r"(?:/v1)?/containers/[^/]+/files")
_START_MESSAGE_TYPES: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Edge:
    """ASGI middleware that creates the HttpContext of each request.

    It denies by default, on the path that routing uses. `fixed_routes` are the templates of the routes without
    parameters, by path. Without API keys the server has one tenant, and only a browser could be tricked into calling
    it: Host and Origin must then be names that the config allows. With keys, the key alone decides.
    """

    def __init__(
        self, app: ASGIApp, config: HttpServerConfig, metrics: Metrics, fixed_routes: Mapping[str, str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._fixed_routes = fixed_routes
        self._logs_access = config.access_log
        self._metrics_access = config.metrics
        self._metrics_key = _digest(config.metrics_key.get_secret_value().encode()) if config.metrics_key else None
        self._tenants = {_digest(entry.key.get_secret_value().encode()): entry.tenant for entry in config.api_keys}
        self._tenant_log_names = {tenant: _digest(tenant.encode()).hex()[:12] for tenant in self._tenants.values()}
        hosts = (config.host, *config.allowed_hosts)
        self._allowed_hosts = None if "*" in hosts else _LOOPBACK | {host.lower() for host in hosts}
        if self._tenants and not config.allowed_hosts:
            self._allowed_hosts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        record = RequestRecord(
            f"req_{_REQUEST_ID_PREFIX}{next(_request_numbers):012x}",
            scope.get("method", WEBSOCKET),
            self._fixed_routes.get(scope["path"], OTHER),
        )
        context = HttpContext(record, partial(self._finish_request, scope=scope), read_trace(scope["headers"]))
        set_context(scope, context)

        async def observe_and_send(message: Message) -> None:
            body = message.get("body")
            if body is not None:
                record.sent_bytes += len(body)
            elif message["type"] in _START_MESSAGE_TYPES:
                record.status = message.get("status", 101)
                record.is_stream = EVENT_STREAM_HEADER in message.get("headers", ())
                record.first_byte_s = record.elapsed_s()
                MutableHeaders(scope=message)["x-request-id"] = record.id
            elif (text := message.get("text")) is not None:
                record.sent_bytes += len(text)
            await send(message)

        websocket = record.method == WEBSOCKET
        self._metrics.open_websockets += websocket
        self._metrics.requests_in_flight += not websocket
        try:
            await self._respond(context, scope, receive, observe_and_send)
        finally:
            self._metrics.open_websockets -= websocket
            self._metrics.requests_in_flight -= not websocket
            self._finish_request(record, scope)

    async def _respond(self, context: HttpContext, scope: Scope, receive: Receive, send: Send) -> None:
        record = context.request_record
        try:
            # for every request, because one may start in the context of the one before it on its connection
            TRACE_HEADERS.set(context.trace)
            REQUEST_ID.set(context.request_id)
            self._admit(context, scope)
            await self._app(scope, receive, send)
        except StackError as exc:
            record.record_error(exc)
            if record.status:
                raise
            await error_response(exc)(scope, receive, send)
        except HTTPException as exc:
            await error_response(_routing_error(exc, scope))(scope, receive, send)
        except Exception:
            _log.exception("request %s failed on a bug", record.id)
            error = internal_error(record.id)
            record.record_error(error)
            if record.status:
                raise
            await error_response(error)(scope, receive, send)

    def _finish_request(self, request_record: RequestRecord, scope: Scope) -> None:
        """Count and log a request that is over."""
        request_record.status = request_record.status or 499
        self._metrics.count_request(request_record)
        if not self._logs_access or (request_record.status < 400 and scope["path"] in PROBE_PATHS):
            return
        if _access_log.isEnabledFor(logging.INFO):
            request_record.client_request_id = read_client_request_id(scope["headers"])
            request_record.tenant = self._tenant_log_names.get(get_context(scope).tenant, "")
            _access_log.info("%s", orjson.dumps(request_record.log_fields()).decode())

    def _admit(self, context: HttpContext, scope: Scope) -> None:
        """Set the request's tenant. Raises a StackError for a request that is refused before it is routed."""
        headers = Headers(scope=scope)
        if self._allowed_hosts is not None:
            self._check_host_and_origin(headers)
        if scope["path"] in OPEN_PATHS or (scope["path"] == METRICS_PATH and self._may_read_metrics(scope)):
            return
        context.tenant = self._authenticate(scope["headers"])
        if scope.get("method") == "POST":
            _check_content_type(scope["path"], headers)

    def _check_host_and_origin(self, headers: Headers) -> None:
        assert self._allowed_hosts is not None
        origin = headers.get("origin")
        names = {"Host": _parse_host(f"//{headers.get('host', '')}")}
        if origin is not None:
            names["Origin"] = _parse_host(origin)
        for name, host in names.items():
            if host not in self._allowed_hosts:
                raise PermissionDenied(f"This {name} is not allowed here: add it to `server.allowed_hosts`.")

    def _authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        if not self._tenants:
            return "default"
        tenant = self._tenants.get(_digest(_read_bearer_key(headers)))
        if tenant is None:
            raise _unauthorized_error()
        return tenant

    def _may_read_metrics(self, scope: Scope) -> bool:
        """Return true if the metrics are open to the request without an API key. Raises Unauthorized."""
        if self._metrics_access != "keyed" or self._metrics_key is None:
            return self._metrics_access == "open"
        if not hmac.compare_digest(_digest(_read_bearer_key(scope["headers"])), self._metrics_key):
            raise _unauthorized_error()
        return True


def _check_content_type(path: str, headers: Headers) -> None:
    """Raise UnsupportedMediaType for a body of another type than the path takes."""
    kind, _, parameters = headers.get("content-type", "").partition(";")
    kind, charset = kind.strip().lower(), parameters.strip().lower()
    if path in UPLOAD_PATHS:
        if kind != "multipart/form-data":
            raise UnsupportedMediaType("A file is sent as a form: `Content-Type: multipart/form-data`.")
        return
    if not kind and _has_no_body(headers):
        return
    if kind == "multipart/form-data" and FORM_OR_JSON_PATHS.fullmatch(path):
        return
    if kind != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise UnsupportedMediaType("The body must be JSON: send `Content-Type: application/json`.")


def _read_bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key of the one Authorization header; empty, which is no key, if there is none."""
    values = [value for name, value in headers if name == b"authorization"]
    return values[0][7:].strip() if len(values) == 1 and values[0][:7].lower() == b"bearer " else b""


def _unauthorized_error() -> Unauthorized:
    return Unauthorized("Incorrect API key provided: send `Authorization: Bearer KEY`.")


def _has_no_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _routing_error(exc: HTTPException, scope: Scope) -> StackError:
    """Return the API's own error for an exception of the router."""
    method, path = scope.get("method", "WebSocket"), scope["path"][:256]
    if exc.status_code == 405:
        return MethodNotAllowed(f"{path} does not take {method}.")
    return NotFound(f"Unknown request URL: {method} {path}.")


def _digest(key: bytes) -> bytes:
    # keys are looked up by their hash, so that the time it takes reveals nothing about the key
    return hashlib.sha256(key).digest()
