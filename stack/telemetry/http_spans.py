"""Spans and counts of HTTP requests and WebSockets, as the server receives them."""

from typing import Final

from starlette.types import Scope

from apis.telemetry import NO_SPAN, AttributeValue, Span, SpanType, TraceHeaders, telemetry
from stack.http.request_record import OTHER, RequestRecord

_ACTIVE_REQUESTS: Final = "http.server.active_requests"
_FETCH_ROUTE: Final = "/v1/responses/{response_id}"
_SCHEMES: Final = {"ws": "http", "wss": "https"}


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
