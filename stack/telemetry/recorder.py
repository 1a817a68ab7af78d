"""SpanRecorder: records spans, metrics and events with OpenTelemetry's API, in the names of its conventions."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from openai.types.responses import ResponseOutputItem
from opentelemetry._logs import LoggerProvider, LogRecord, get_logger_provider
from opentelemetry.context import Context, attach, get_current
from opentelemetry.metrics import Histogram, MeterProvider, get_meter_provider
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_current_span,
    get_tracer_provider,
    set_span_in_context,
)
from opentelemetry.trace import Span as TracedSpan
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from apis.chat import ChatRequest
from apis.telemetry import (
    CURRENT_SPAN,
    TRACE_HEADERS,
    Attributes,
    AttributeValue,
    Span,
    SpanType,
    Telemetry,
    TraceHeaders,
)
from stack import __version__
from stack.telemetry import messages
from stack.telemetry.conventions import (
    CLIENT_KEYS,
    COUNTERS,
    ERROR_METRICS,
    HISTOGRAMS,
    MAX_SERIES,
    NEWER_ATTRIBUTES,
    NEWER_METRICS,
    OLDER_ATTRIBUTES,
    OLDER_METRICS,
    OTHER_VALUE,
    PROVIDER_NAME,
    SPAN_FORMS,
    UP_DOWN_COUNTERS,
    SpanForm,
)
from stack.telemetry.sums import Sums
from stack.telemetry.switches import TelemetrySwitches

_SCOPE: Final = "responses-stack"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_KINDS: Final = {kind.name: kind for kind in SpanKind}
_OLDER_NAMES: Final = frozenset(name for name, _ in OLDER_METRICS.values())
_DETAILS_EVENT: Final = "gen_ai.client.inference.operation.details"


class SpanRecorder(Telemetry):
    """Telemetry over the providers of an OpenTelemetry SDK. Spans may end on any task of the event loop's thread."""

    is_on = True

    def __init__(
        self, switches: TelemetrySwitches, tracers: TracerProvider, meters: MeterProvider, loggers: LoggerProvider
    ) -> None:
        self.switches = switches
        self.captures_content = switches.content_in_spans or switches.emits_events
        self._tracer = tracers.get_tracer(_SCOPE, __version__)
        self._logger = loggers.get_logger(_SCOPE, __version__)
        self._series: dict[str, set[tuple[tuple[str, AttributeValue], ...]]] = {}
        meter = meters.get_meter(_SCOPE, __version__)
        self._histograms: dict[str, Histogram] = {
            name: meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)
            for name, (unit, bounds) in HISTOGRAMS.items()
            if self._emits(name)
        }
        counters = {name: unit for name, unit in COUNTERS.items() if self._emits(name)}
        self._sums = Sums(meter, counters, UP_DOWN_COUNTERS)

    def _emits(self, metric: str) -> bool:
        if metric in _OLDER_NAMES:
            return self.switches.emits_older
        return self.switches.emits_newest or metric not in NEWER_METRICS

    def open_span(
        self,
        span_type: SpanType,
        target: str,
        attributes: Attributes,
        *,
        parent: TraceHeaders | None = None,
        links: Sequence[TraceHeaders] = (),
        started_at_s: float | None = None,
    ) -> Span:
        form = SPAN_FORMS[span_type]
        start_ns = time.time_ns() if started_at_s is None else int(started_at_s * 1e9)
        contexts = [context for headers in links if headers and (context := _remote_context(headers)) is not None]
        traced = self._tracer.start_span(
            f"{form.name} {target}".strip(),
            context=None if parent is None else _PROPAGATOR.extract(parent, context=Context()),
            kind=_KINDS[form.kind],
            attributes=self.name_attributes(attributes),
            links=[Link(context) for context in contexts],
            start_time=start_ns,
        )
        span = _RecordedSpan(self, form, traced, start_ns, attributes)
        if span_type is SpanType.INVOKE_AGENT and self.switches.emits_older:
            span.set({"gen_ai.provider.name": PROVIDER_NAME})
        return span

    def add(self, metric: str, value: int, attributes: Attributes = MappingProxyType({})) -> None:
        self._sums.add(metric, value, attributes)

    def record(self, metric: str, values: Sequence[float], attributes: Attributes) -> None:
        """Record values of a histogram, or add them to a counter, by each name that the switches ask for."""
        series, key = self._series.setdefault(metric, set()), tuple(attributes.items())
        if key not in series:
            if len(series) < MAX_SERIES:
                series.add(key)
            else:
                attributes = {name: OTHER_VALUE if name in CLIENT_KEYS else value for name, value in attributes.items()}
        if (histogram := self._histograms.get(metric)) is None:
            self._sums.add(metric, sum(values), attributes)
        else:
            for value in values:
                histogram.record(value, attributes)
        older_name, older_attributes = OLDER_METRICS.get(metric, ("", {}))
        if (older := self._histograms.get(older_name)) is not None:
            for value in values:
                older.record(value, {**attributes, **older_attributes})

    def adopt_trace(self, headers: TraceHeaders) -> None:
        attach(_PROPAGATOR.extract(headers, context=Context()))

    def name_attributes(self, attributes: Attributes) -> Attributes:
        """Return the attributes by the names of the generations that are emitted."""
        if not self.switches.emits_older:
            return attributes
        named: dict[str, AttributeValue] = dict(attributes) if self.switches.emits_newest else {}
        for name, value in attributes.items():
            if name not in NEWER_ATTRIBUTES:
                named[OLDER_ATTRIBUTES.get(name, name)] = value
        return named

    def emit_details(self, span_attributes: Attributes, content: Mapping[str, Any]) -> None:
        """Emit the event of a model call, with its content in structured form where the operator wants it."""
        if self.switches.emits_events:
            attributes = {**span_attributes, **(content if self.switches.content_in_events else {})}
            self._logger.emit(
                LogRecord(
                    timestamp=time.time_ns(),
                    context=get_current(),
                    event_name=_DETAILS_EVENT,
                    attributes=attributes,
                )
            )

    def describe_input(self, chat: ChatRequest) -> Attributes:
        return messages.to_json(messages.input_content(chat)) if self.switches.content_in_spans else {}

    def describe_output(self, items: Sequence[ResponseOutputItem]) -> Attributes:
        return messages.to_json(messages.items_content(items)) if self.switches.content_in_spans else {}

    def describe_tool(self, arguments: str, result: str | None) -> Attributes:
        return messages.tool_content(arguments, result) if self.switches.content_in_spans else {}

    def describe_retrieval(self, queries: Sequence[str], documents: Sequence[tuple[str, float]]) -> Attributes:
        return messages.retrieval_content(queries, documents) if self.switches.content_in_spans else {}


def build_global_recorder(switches: TelemetrySwitches) -> SpanRecorder:
    """Return a recorder over the global providers that an instrumentation of the process has set."""
    return SpanRecorder(switches, get_tracer_provider(), get_meter_provider(), get_logger_provider())


class _RecordedSpan(Span):
    """A span of OpenTelemetry, with a copy of its attributes for its metrics."""

    __slots__ = (
        "_attributes",
        "_before",
        "_form",
        "_headers",
        "_is_over",
        "_recorder",
        "_start_ns",
        "_started_at_ns",
        "_traced",
    )

    def __init__(
        self, recorder: SpanRecorder, form: SpanForm, traced: TracedSpan, start_ns: int, attributes: Attributes
    ) -> None:
        self._recorder = recorder
        self._form = form
        self._traced = traced
        self._start_ns = start_ns
        # times of one span come from one clock that never goes back
        self._started_at_ns = time.perf_counter_ns() - max(0, time.time_ns() - start_ns)
        self._attributes: dict[str, AttributeValue] = dict(attributes)
        self._before: tuple[Span, Context, TraceHeaders] | None = None
        self._is_over = False
        self._headers: TraceHeaders | None = None

    @property
    def headers(self) -> TraceHeaders:
        if self._headers is None:
            self._headers = _to_headers(self._traced.get_span_context())
        return self._headers

    def set(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)
        self._traced.set_attributes(self._recorder.name_attributes(attributes))

    def rename(self, target: str) -> None:
        self._traced.update_name(f"{self._form.name} {target}".strip())

    def fail(self, error_type: str) -> None:
        self.set({"error.type": error_type})
        self._traced.set_status(Status(StatusCode.ERROR))

    def record(self, values: Mapping[str, float | Sequence[float]]) -> None:
        attributes = {key: self._attributes[key] for key in self._form.metric_keys if key in self._attributes}
        error_type = self._attributes.get("error.type")
        if error_type == "model_not_found" and "gen_ai.request.model" in attributes:
            attributes["gen_ai.request.model"] = OTHER_VALUE
        with_error = attributes if error_type is None else {**attributes, "error.type": error_type}
        for metric, value in values.items():
            series = value if isinstance(value, Sequence) else (value,)
            self._recorder.record(metric, series, with_error if metric in ERROR_METRICS else attributes)

    def make_current(self) -> None:
        self._before = (CURRENT_SPAN.get(), get_current(), TRACE_HEADERS.get())
        CURRENT_SPAN.set(self)
        TRACE_HEADERS.set(self.headers)
        attach(set_span_in_context(self._traced))

    def end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        duration_ns = time.perf_counter_ns() - self._started_at_ns
        self._traced.end(self._start_ns + duration_ns)
        if self._form.duration_metric:
            self.record({self._form.duration_metric: duration_ns / 1e9})
        if self._before is not None and CURRENT_SPAN.get() is self:
            # set again instead of reset: a generator may be closed in another context than it was started in
            span, context, headers = self._before
            CURRENT_SPAN.set(span)
            TRACE_HEADERS.set(headers)
            attach(context)
        self._before = None


def _remote_context(headers: TraceHeaders) -> SpanContext | None:
    context = get_current_span(_PROPAGATOR.extract(headers, context=Context())).get_span_context()
    return context if context.is_valid else None


def _to_headers(context: SpanContext) -> TraceHeaders:
    flags = f"{context.trace_flags:02x}"
    headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"}
    if state := context.trace_state.to_header():
        headers["tracestate"] = state
    return headers
