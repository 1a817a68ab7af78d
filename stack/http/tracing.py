"""The trace of a request or WebSocket: its client's headers, its span, and the count of those in progress."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from starlette.types import Scope

from apis.telemetry import NO_SPAN, AttributeValue, Span, SpanType, TraceHeaders, telemetry
from stack.http.request_record import OTHER, RequestRecord

_ACTIVE_REQUESTS: Final = "http.server.active_requests"
_FETCH_ROUTE: Final = "/v1/responses/{response_id}"
_SCHEMES: Final = {"ws": "http", "wss": "https"}
_NO_TRACE: Final[Mapping[str, str]] = MappingProxyType({})
_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE_MEMBER: Final = re.compile(
    rb"(?:[a-z0-9][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_TRACESTATE_MEMBERS: Final = 32
_MAX_TRACESTATE_BYTES: Final = 512
_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})


def read_trace(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return the valid trace headers by name, as W3C Trace Context (level 1) defines them.

    Later versions are accepted in the form of this one. An invalid header counts as absent, and so does a state without
    a parent.
    """
    trace_headers = [header for header in headers if header[0] in _TRACE_HEADERS]
    if not trace_headers:
        return _NO_TRACE
    parents = [value for name, value in trace_headers if name == b"traceparent"]
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0]):
        return _NO_TRACE
    state = b",".join([value for name, value in trace_headers if name == b"tracestate"])
    members = [member for entry in state.split(b",") if (member := entry.strip(b" \t"))]
    trace = {"traceparent": parents[0].decode()}
    if not members or len(state) > _MAX_TRACESTATE_BYTES or len(members) > _MAX_TRACESTATE_MEMBERS:
        return trace
    if len({member.partition(b"=")[0] for member in members}) < len(members):
        return trace
    if all(_TRACESTATE_MEMBER.fullmatch(member) for member in members):
        trace["tracestate"] = b",".join(members).decode()
    return trace


def open_request_span(scope: Scope, request_record: RequestRecord, trace: TraceHeaders) -> Span:
    """Return the span of a request, which is current and continues the client's trace."""
    recorder = telemetry()
    if not recorder.is_on:
        return NO_SPAN
    fields = _request_fields(scope, request_record)
    recorder.add(_ACTIVE_REQUESTS, 1, fields)
    attributes: dict[str, AttributeValue] = {
        **fields,
        "url.path": scope["path"],
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    span = recorder.open_span(SpanType.HTTP_REQUEST, _span_name(fields, request_record), attributes, parent=trace)
    span.make_current()
    return span


def end_request_span(span: Span, scope: Scope, request_record: RequestRecord) -> None:
    """End the span of a request with its route and its status."""
    if span is NO_SPAN:
        return
    fields = _request_fields(scope, request_record)
    attributes: dict[str, AttributeValue] = {}
    if request_record.route != OTHER:
        attributes["http.route"] = request_record.route
        span.rename(_span_name(fields, request_record))
    if request_record.status:
        attributes["http.response.status_code"] = request_record.status
    if request_record.method == "GET" and request_record.route == _FETCH_ROUTE:
        attributes["gen_ai.operation.name"] = "fetch_response"
    span.set(attributes)
    if request_record.status >= 500:
        span.fail(str(request_record.status))
    elif request_record.outcome == "failed":  # a stream, whose status was sent before
        span.fail(request_record.code or "response_failed")
    elif request_record.status in (0, 499):
        span.fail("client_disconnected")
    telemetry().add(_ACTIVE_REQUESTS, -1, fields)
    span.end()


def _request_fields(scope: Scope, request_record: RequestRecord) -> dict[str, AttributeValue]:
    method = "_OTHER" if request_record.method == OTHER else scope.get("method", "GET")
    scheme: str = scope["scheme"]
    return {"http.request.method": method, "url.scheme": _SCHEMES.get(scheme, scheme)}


def _span_name(fields: dict[str, AttributeValue], request_record: RequestRecord) -> str:
    method = str(fields["http.request.method"]).replace("_OTHER", "HTTP")
    return f"{method} {request_record.route}" if request_record.route != OTHER else method
