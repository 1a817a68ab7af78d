"""A receiver of OTLP over HTTP on a loopback port: decodes spans, metrics and events; refuses or hangs on request."""

import gzip
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS: Final = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT"}


@dataclass(frozen=True)
class SentSpan:
    """A span as it arrived. Ids are hexadecimal; `links` are trace ids and span ids."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    is_error: bool
    attributes: dict[str, Any]
    links: list[tuple[str, str]]


@dataclass(frozen=True)
class MetricPoint:
    """The newest point of a metric for some attributes: a sum, or a histogram's sum and count."""

    name: str
    unit: str
    attributes: dict[str, Any]
    total: float
    count: int = 0
    bounds: tuple[float, ...] = ()


@dataclass
class OtlpReceiver:
    """`answer_status` is the HTTP status of each request from now on; None never answers."""

    url: str = ""
    answer_status: int | None = 200
    spans: list[SentSpan] = field(default_factory=list[SentSpan])
    points: dict[tuple[str, str], MetricPoint] = field(default_factory=dict[tuple[str, str], MetricPoint])
    events: list[tuple[str, dict[str, Any], str]] = field(default_factory=list[tuple[str, dict[str, Any], str]])
    resources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    request_count: int = 0
    ending: threading.Event = field(default_factory=threading.Event)

    def receive(self, path: str, body: bytes) -> None:
        self.request_count += 1
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_values(resource.resource.attributes))
                self.spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in _points(metric):
                        self.points[point.name, repr(sorted(point.attributes.items()))] = point
        elif path == "/v1/logs":
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                for record in (record for scope in resource.scope_logs for record in scope.log_records):
                    self.events.append((record.event_name, _values(record.attributes), record.span_id.hex()))

    def named(self, beginning: str) -> list[SentSpan]:
        """The spans whose name begins so, in the order of their start."""
        return sorted((span for span in self.spans if span.name.startswith(beginning)), key=lambda span: span.start_s)

    def metric(self, name: str) -> list[MetricPoint]:
        return [point for point in self.points.values() if point.name == name]

    def wait_for(self, is_met: Callable[[], object], within_s: float = 10) -> None:
        """Block until the condition holds; call it from a thread, or after the stack has ended."""
        deadline = time.monotonic() + within_s
        while not is_met():
            assert time.monotonic() < deadline, sorted(span.name for span in self.spans)
            time.sleep(0.01)


def _span(span: Any) -> SentSpan:
    return SentSpan(
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code == 2,
        _values(span.attributes),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    )


def _points(metric: Any) -> Generator[MetricPoint]:
    for point in metric.histogram.data_points:
        yield MetricPoint(
            metric.name,
            metric.unit,
            _values(point.attributes),
            point.sum,
            point.count,
            tuple(point.explicit_bounds),
        )
    for point in metric.sum.data_points:
        yield MetricPoint(metric.name, metric.unit, _values(point.attributes), point.as_int or point.as_double)


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return _values(value.kvlist_value.values)
    return getattr(value, kind) if kind else None


@contextmanager
def receiving_otlp() -> Generator[OtlpReceiver]:
    """Run a receiver in threads of its own."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = receiver.answer_status
            if status is None:
                receiver.ending.wait(30)
                return
            if status == 200:
                receiver.receive(
                    self.path, gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                )
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


def otlp_variables(receiver: OtlpReceiver, **more: str) -> dict[str, str]:
    """The environment of a stack that sends to the receiver."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "50", **more}
