"""Edge, the outermost layer: it authenticates requests, gives them ids, renders their errors, counts and logs them."""

import asyncio
import hashlib
import hmac
import itertools
import logging
import secrets
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Final

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.accounts.accounts import OPEN_CALLER, Caller, digest_key
from apis.errors import (
    Overloaded,
    PermissionDenied,
    StackError,
    internal_error,
)
from apis.telemetry import NO_SPAN, REQUEST_ID, TRACE_HEADERS, current_span
from providers.common.fair_turns import CURRENT_TURN, turn_of
from providers.common.held_bytes import HELD_PLACES
from providers.common.tracebacks import without_traceback
from stack.config import StackConfig
from stack.http.access.metering import end_charge
from stack.http.access.privileges import require_privilege
from stack.http.admission import (
    CorsPolicy,
    HeadChecks,
    authenticate,
    check_body_type,
    read_bearer_key,
    routing_error,
    unauthorized_error,
)
from stack.http.answers import error_response
from stack.http.context import HttpContext, get_context, set_context
from stack.http.metrics import METRICS_PATH, Metrics
from stack.http.peer import get_peer
from stack.http.request_record import (
    DISCONNECTED_STATUS,
    OTHER,
    WEBSOCKET,
    RequestRecord,
    read_client_request_id,
    read_trace,
)
from stack.http.streams import EVENT_STREAM_HEADER, SHUTTING_DOWN_MESSAGE
from stack.telemetry.http_spans import end_request_span, open_request_span

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("stack.access")
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
PROBE_PATHS: Final = OPEN_PATHS | {METRICS_PATH}
"""Paths that are requested all the time, also while the server drains: successful requests of them are not logged."""
_SAFETY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""A browser renders no answer as another type than it has, and gives none to a page of another origin without CORS."""
_START_MESSAGE_TYPES: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


class Edge:
    """ASGI middleware that creates the HttpContext of each request.

    It denies by default, on the path that routing uses. `fixed_routes` are the templates of the routes without
    parameters, by path. Without API keys the server has one tenant; with keys, the accounts decide who it is. Figures
    of several tenants are only for the key of the metrics and for administrators.
    """

    def __init__(
        self, app: ASGIApp, stack_config: StackConfig, metrics: Metrics, fixed_routes: Mapping[str, str]
    ) -> None:
        config = stack_config.server
        self._requires_keys = stack_config.requires_keys
        self._app = app
        self._metrics = metrics
        self._fixed_routes = fixed_routes
        self._logs_access = config.access_log
        self._names_tenants = config.access_log_tenants == "named"
        self._metrics_access = config.metrics
        self._metrics_key = digest_key(config.metrics_key.get_secret_value().encode()) if config.metrics_key else None
        has_no_key = config.metrics == "keyed" and self._metrics_key is None
        self._hides_metrics = has_no_key and stack_config.has_several_tenants
        self._cors = CorsPolicy(config.cors_origins) if config.cors_origins else None
        self._head_checks = HeadChecks(config, self._cors, requires_keys=self._requires_keys)
        self._request_id_prefix = secrets.token_hex(10)
        self._request_numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        record = RequestRecord(
            f"req_{self._request_id_prefix}{next(self._request_numbers):012x}",
            scope.get("method", WEBSOCKET),
            self._fixed_routes.get(scope["path"], OTHER),
        )
        context = HttpContext(record, partial(self._finish_request, scope), read_trace(scope["headers"]))
        set_context(scope, context)

        async def observe_and_send(message: Message) -> None:
            body = message.get("body")
            if body is not None:
                record.sent_bytes += len(body)
            elif message["type"] in _START_MESSAGE_TYPES:
                record.status = message.get("status", 101)
                record.is_stream = EVENT_STREAM_HEADER in message.get("headers", ())
                record.first_byte_s = record.elapsed_s()
                # no response has these already, so nothing is replaced
                response_headers = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.id.encode()),
                    *_SAFETY_HEADERS,
                ]
                if context.charge is not None:
                    limits = context.charge.headers
                    response_headers += [(name.encode(), limits[name].encode()) for name in limits]
                if self._cors is not None:
                    self._cors.add_headers(MutableHeaders(raw=response_headers), Headers(scope=scope).get("origin"))
                message["headers"] = response_headers
            elif (text := message.get("text")) is not None:
                record.sent_bytes += len(text)
            await send(message)

        span = NO_SPAN if scope["path"] in PROBE_PATHS else open_request_span(scope, record, context.trace)
        websocket = record.method == WEBSOCKET
        self._metrics.open_websockets += websocket
        self._metrics.requests_in_flight += not websocket
        try:
            await self._respond(context, scope, receive, observe_and_send)
        finally:
            self._metrics.open_websockets -= websocket
            self._metrics.requests_in_flight -= not websocket
            for place in context.body_places:
                place.release()
            end_request_span(span, scope, record)
            self._finish_request(scope, record)
            end_charge(context.charge, record)

    async def _respond(self, context: HttpContext, scope: Scope, receive: Receive, send: Send) -> None:
        record = context.request_record
        try:
            # for every request, because one may start in the context of the one before it on its connection
            TRACE_HEADERS.set(current_span().headers or context.trace)
            REQUEST_ID.set(context.request_id)
            self._head_checks.check(scope)
            if self._cors is not None and record.method == "OPTIONS":
                preflight = self._cors.build_preflight_response(Headers(scope=scope))
                if preflight is not None:
                    await preflight(scope, receive, send)
                    return
            await self._admit(context, scope)
            await self._app(scope, receive, send)
        except StackError as exc:
            without_traceback(exc)
            record.record_error(exc)
            if record.status:
                await _cut_off(scope, receive, exc)
                return
            await error_response(exc)(scope, receive, send)
        except HTTPException as exc:
            error, error_headers = routing_error(exc, scope, scope["app"].router.routes)
            response = error_response(error)
            response.headers.update(error_headers)
            await response(scope, receive, send)
        except asyncio.CancelledError:
            if record.status or not scope["app"].state.draining:
                raise
            error = Overloaded(SHUTTING_DOWN_MESSAGE)
            record.record_error(error)
            await error_response(error)(scope, receive, send)
        except Exception:
            _log.exception("request %s failed on a bug", record.id)
            error = internal_error(record.id)
            record.record_error(error)
            if record.status:
                raise
            await error_response(error)(scope, receive, send)

    def _finish_request(self, scope: Scope, request_record: RequestRecord) -> None:
        """Count and log a request that is over."""
        request_record.status = request_record.status or DISCONNECTED_STATUS
        self._metrics.count_request(request_record)
        if not self._logs_access or (request_record.status < 400 and scope["path"] in PROBE_PATHS):
            return
        if _access_log.isEnabledFor(logging.INFO):
            request_record.client_request_id = read_client_request_id(scope["headers"])
            if self._requires_keys and (tenant := get_context(scope).tenant):
                request_record.tenant = tenant if self._names_tenants else _hash_tenant(tenant)
            _access_log.info("%s", orjson.dumps(request_record.log_fields()).decode())

    async def _admit(self, context: HttpContext, scope: Scope) -> None:
        """Set the request's tenant. Raises a StackError for a request that is refused before it is routed."""
        path = scope["path"]
        if path in OPEN_PATHS:
            return
        if path == METRICS_PATH and self._may_read_metrics(scope):
            return
        context.caller = await self._authenticate(scope)
        context.tenant = context.caller.tenant
        turn = turn_of(context.tenant)
        CURRENT_TURN.set(turn)
        HELD_PLACES.set(context.body_places)
        if self._requires_keys and scope["type"] == "websocket":
            context.authenticate_again = partial(self._authenticate, scope)
        peer = get_peer(scope)
        if peer is not None and peer.turn is not turn:
            peer.admit(turn)
        if self._requires_keys:
            require_privilege(context.caller, context.request_record.method, path)
        if path == METRICS_PATH and self._hides_metrics and not context.is_administrator:
            raise PermissionDenied("The figures are those of all tenants: set `server.metrics_key`, and send that key.")
        if scope.get("method") == "POST":
            check_body_type(path, scope["headers"])

    async def _authenticate(self, scope: Scope) -> Caller:
        if not self._requires_keys:
            return OPEN_CALLER
        services = scope["app"].state.services
        if services is None:
            raise Overloaded(SHUTTING_DOWN_MESSAGE)
        return await authenticate(services.stack.accounts, scope["headers"])

    def _may_read_metrics(self, scope: Scope) -> bool:
        """Return true if the metrics are open to the request without an API key. Raises Unauthorized."""
        if self._metrics_access != "keyed" or self._metrics_key is None:
            return self._metrics_access == "open"
        if not hmac.compare_digest(digest_key(read_bearer_key(scope["headers"])), self._metrics_key):
            raise unauthorized_error()
        return True


async def _cut_off(scope: Scope, receive: Receive, error: StackError) -> None:
    """Close the connection of a response that has begun and cannot be finished, so that the client misses its end."""
    peer = get_peer(scope)
    if peer is None or scope["type"] != "http":
        raise error
    _log.error("a response to %s %s was cut off: %s", scope["method"], scope["path"], error.message)
    peer.abort()
    while (await receive())["type"] != "http.disconnect":
        pass


@lru_cache(maxsize=1024)
def _hash_tenant(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:12]
