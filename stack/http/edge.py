"""The outermost layer: who may come in, by which name, under which request id, how every error looks, and what is
said of every request when it is over."""

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
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import (
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    StackError,
    Unauthorized,
    UnsupportedMediaType,
    error_to_body,
    internal_error,
)
from apis.telemetry import TRACE_HEADERS
from stack.config import HttpServerConfig
from stack.http.metrics import Metrics
from stack.http.request_record import OTHER, WEBSOCKET, RequestRecord, read_client_request_id, read_trace
from stack.http.streams import EVENT_STREAM_HEADER

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("stack.access")
_REQUEST_ID_PREFIX: Final = secrets.token_hex(10)
_request_numbers = itertools.count()
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
METRICS_PATH: Final = "/metrics"
PROBE_PATHS: Final = OPEN_PATHS | {METRICS_PATH}
"""Those that are asked again and again, also of a server that drains; nothing is logged of it when all is well."""
UPLOAD_PATHS: Final = frozenset({"/v1/files", "/files"})
FORM_OR_JSON_PATHS: Final = re.compile(r"(?:/v1)?/containers/[^/]+/files")
_START_MESSAGE_TYPES: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Edge:
    """ASGI middleware. Denies by default, on the path that routing uses; leaves the caller's tenant in the scope, and
    the `visit`, which whoever answers tells what there is to be told of. `fixed` are the routes that are one path, by
    that path.

    Without API keys the server is of one tenant, and only a browser could be tricked into calling it: so then Host and
    Origin must be names that the config allows. With keys, the key says it all.
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
        named = (config.host, *config.allowed_hosts)
        self._allowed_hosts = None if "*" in named else _LOOPBACK | {host.lower() for host in named}
        if self._tenants and not config.allowed_hosts:
            self._allowed_hosts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        visit = RequestRecord(
            f"req_{_REQUEST_ID_PREFIX}{next(_request_numbers):012x}",
            scope.get("method", WEBSOCKET),
            self._fixed_routes.get(scope["path"], OTHER),
        )
        scope["request_id"] = visit.id
        scope["request_record"] = visit
        scope["finish_request"] = partial(self._finish_request, scope=scope)

        async def answer(message: Message) -> None:
            body = message.get("body")
            if body is not None:
                visit.sent_bytes += len(body)
            elif message["type"] in _START_MESSAGE_TYPES:
                visit.status = message.get("status", 101)
                visit.is_stream = EVENT_STREAM_HEADER in message.get("headers", ())
                visit.first_byte_s = visit.elapsed_s()
                MutableHeaders(scope=message)["x-request-id"] = visit.id
            elif (text := message.get("text")) is not None:
                visit.sent_bytes += len(text)
            await send(message)

        websocket = visit.method == WEBSOCKET
        self._metrics.open_websockets += websocket
        self._metrics.requests_in_flight += not websocket
        try:
            await self._respond(scope, receive, answer)
        finally:
            self._metrics.open_websockets -= websocket
            self._metrics.requests_in_flight -= not websocket
            self._finish_request(visit, scope)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit: RequestRecord = scope["request_record"]
        try:
            # for every request, because one may begin in the context of the one before it on its connection
            TRACE_HEADERS.set(read_trace(scope["headers"]))
            self._admit(scope)
            await self._app(scope, receive, send)
        except StackError as exc:
            visit.record_error(exc)
            if visit.status:
                raise
            await error_response(exc)(scope, receive, send)
        except HTTPException as exc:
            await error_response(_routing_error(exc, scope))(scope, receive, send)
        except Exception:
            _log.exception("request %s failed on a bug", visit.id)
            error = internal_error(visit.id)
            visit.record_error(error)
            if visit.status:
                raise
            await error_response(error)(scope, receive, send)

    def _finish_request(self, request_record: RequestRecord, scope: Scope) -> None:
        """Of one that is over."""
        request_record.status = request_record.status or 499
        self._metrics.count_request(request_record)
        if not self._logs_access or (request_record.status < 400 and scope["path"] in PROBE_PATHS):
            return
        if _access_log.isEnabledFor(logging.INFO):
            request_record.client_request_id = read_client_request_id(scope["headers"])
            request_record.tenant = self._tenant_log_names.get(scope.get("tenant", ""), "")
            _access_log.info("%s", orjson.dumps(request_record.log_fields()).decode())

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._allowed_hosts is not None:
            self._check_host_and_origin(headers)
        if scope["path"] in OPEN_PATHS or (scope["path"] == METRICS_PATH and self._may_read_metrics(scope)):
            return
        scope["tenant"] = self._authenticate(scope["headers"])
        if scope.get("method") == "POST":
            kind, _, parameters = headers.get("content-type", "").partition(";")
            charset = parameters.strip().lower()
            if scope["path"] in UPLOAD_PATHS:
                if kind.strip().lower() != "multipart/form-data":
                    raise UnsupportedMediaType("A file is sent as a form: `Content-Type: multipart/form-data`.")
                return
            if not kind and _has_no_body(headers):
                return
            if kind.strip().lower() == "multipart/form-data" and FORM_OR_JSON_PATHS.fullmatch(scope["path"]):
                return
            if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
                raise UnsupportedMediaType("The body must be JSON: send `Content-Type: application/json`.")

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
        """Whether the caller may, without being one of a tenant. Raises Unauthorized."""
        if self._metrics_access != "keyed" or self._metrics_key is None:
            return self._metrics_access == "open"
        if not hmac.compare_digest(_digest(_read_bearer_key(scope["headers"])), self._metrics_key):
            raise _unauthorized_error()
        return True


def _read_bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key that is given; empty, as no key is, without one."""
    given = [value for name, value in headers if name == b"authorization"]
    return given[0][7:].strip() if len(given) == 1 and given[0][:7].lower() == b"bearer " else b""


def _unauthorized_error() -> Unauthorized:
    return Unauthorized("Incorrect API key provided: send `Authorization: Bearer KEY`.")


def _has_no_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON bytes."""
    return Response(body, status, headers, media_type="application/json")


def client_disconnected_response() -> Response:
    """What is left to say when nobody listens any more."""
    return Response(status_code=499)


def error_response(error: StackError) -> Response:
    """OpenAI's error body, with what an SDK needs to know about retrying."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{max(1, round(error.retry_after_s))}"
    elif error.status == 503:
        headers["retry-after"] = "1"
    if error.repeats_work:
        headers["x-should-retry"] = "false"
    return json_response(orjson.dumps(error_to_body(error)), error.status, headers)


def _routing_error(exc: HTTPException, scope: Scope) -> StackError:
    """What the router raises, in the API's form."""
    method, path = scope.get("method", "WebSocket"), scope["path"][:256]
    if exc.status_code == 405:
        return MethodNotAllowed(f"{path} does not take {method}.")
    return NotFound(f"Unknown request URL: {method} {path}.")


def _digest(key: bytes) -> bytes:
    # keys are looked up by their hash: how long that takes says nothing about the key
    return hashlib.sha256(key).digest()
