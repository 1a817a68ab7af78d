"""Edge, the outermost layer: it gives requests their ids, routes and gates, renders their errors, and ends them."""

import asyncio
import hashlib
import itertools
import logging
import secrets
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Final

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from apis.errors import Overloaded, StackError
from apis.telemetry import NO_SPAN, REQUEST_ID, TRACE_HEADERS, current_span
from providers.common.tracebacks import without_traceback
from stack.config import StackConfig
from stack.http.answers import error_response
from stack.http.context import HttpContext, get_context, set_context
from stack.http.gates import CorsPolicy, Gates, HeadAnswered
from stack.http.idempotency import Idempotency
from stack.http.messages.dialect import speaks_messages
from stack.http.metrics import Metrics
from stack.http.peer import get_peer
from stack.http.request_record import WEBSOCKET, RequestRecord, read_client_request_id
from stack.http.route_table import RouteTable, get_match, set_match
from stack.http.streams import EVENT_STREAM_HEADER, SHUTTING_DOWN_MESSAGE
from stack.http.tracing import end_request_span, open_request_span, read_trace

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("stack.access")
_SAFETY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""A browser renders no answer as another type than it has, and gives none to a page of another origin without CORS."""
_START_MESSAGE_TYPES: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


class Edge:
    """ASGI middleware that finds the route of each request, creates its HttpContext, has it pass the gates, and ends
    it. `Idempotency` gets what passed."""

    def __init__(self, stack_config: StackConfig, metrics: Metrics, table: RouteTable) -> None:
        config = stack_config.server
        self._names_callers = stack_config.requires_keys
        self._idempotency = Idempotency(table)
        self._metrics = metrics
        self._table = table
        self._logs_access = config.access_log
        self._names_tenants = config.access_log_tenants == "named"
        self._cors = CorsPolicy(config.cors_origins) if config.cors_origins else None
        self._gates = Gates(stack_config, self._cors)
        self._request_id_prefix = secrets.token_hex(10)
        self._request_numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._table.lacks(scope["path"]):
            await self._table.load_for(scope["path"])
        # a WebSocket is opened where a POST would create the response
        match = self._table.find(scope.get("method", "POST"), scope["path"])
        set_match(scope, match)
        record = RequestRecord(
            f"req_{self._request_id_prefix}{next(self._request_numbers):012x}",
            scope.get("method", WEBSOCKET),
            match.template,
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
                message["headers"] = self._add_headers(message.get("headers", ()), scope, context)
            elif (text := message.get("text")) is not None:
                record.sent_bytes += len(text)
            await send(message)

        is_probe = match.route is not None and match.route.probe
        span = NO_SPAN if is_probe else open_request_span(scope, record, context.trace)
        websocket = record.method == WEBSOCKET
        self._metrics.open_websockets += websocket
        self._metrics.requests_in_flight += not websocket
        try:
            await self._respond(context, scope, receive, observe_and_send)
        finally:
            self._metrics.open_websockets -= websocket
            self._metrics.requests_in_flight -= not websocket
            end_request_span(span, scope, record)
            context.end()

    def _add_headers(
        self, headers: Iterable[tuple[bytes, bytes]], scope: Scope, context: HttpContext
    ) -> list[tuple[bytes, bytes]]:
        """Return these headers of a response with those that every one has, which no handler sets."""
        request_id = context.request_record.id.encode()
        all_headers = [*headers, (b"x-request-id", request_id), *_SAFETY_HEADERS]
        if speaks_messages(scope):
            all_headers.append((b"request-id", request_id))
        if context.charge is not None:
            limits = context.charge.headers
            all_headers += [(name.encode(), limits[name].encode()) for name in limits]
        if self._cors is not None:
            self._cors.add_headers(MutableHeaders(raw=all_headers), Headers(scope=scope).get("origin"))
        return all_headers

    async def _respond(self, context: HttpContext, scope: Scope, receive: Receive, send: Send) -> None:
        record = context.request_record
        try:
            # for every request, because one may start in the context of the one before it on its connection
            TRACE_HEADERS.set(current_span().headers or context.trace)
            REQUEST_ID.set(context.request_id)
            await self._gates.pass_through(scope, context)
            await self._idempotency(scope, receive, send)
        except HeadAnswered as exc:
            await exc.response(scope, receive, send)
        except asyncio.CancelledError:
            if record.status or not scope["app"].state.draining:
                raise
            error = context.fail(Overloaded(SHUTTING_DOWN_MESSAGE))
            await error_response(error, scope, record.id)(scope, receive, send)
        except StackError as exc:
            without_traceback(exc)
            context.fail(exc)
            if record.status:
                await _cut_off(scope, receive, exc)
                return
            await error_response(exc, scope, record.id)(scope, receive, send)
        except Exception as exc:
            error = context.fail(exc)
            if record.status:
                raise
            await error_response(error, scope, record.id)(scope, receive, send)

    def _finish_request(self, scope: Scope, request_record: RequestRecord) -> None:
        """Count and log a request that is over."""
        self._metrics.count_request(request_record)
        route = get_match(scope).route
        if not self._logs_access or (request_record.status < 400 and route is not None and route.probe):
            return
        if _access_log.isEnabledFor(logging.INFO):
            request_record.client_request_id = read_client_request_id(scope)
            if self._names_callers and (tenant := get_context(scope).tenant):
                request_record.tenant = tenant if self._names_tenants else _hash_tenant(tenant)
            _access_log.info("%s", orjson.dumps(request_record.log_fields()).decode())


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
