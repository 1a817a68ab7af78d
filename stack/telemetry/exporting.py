"""The way of spans, metrics and events out of the process: bounded queues, threads of the SDK, and a count of the lost.

The event loop only appends to a queue. While it is full, and when the receiver refuses or does not answer in time, the
records are dropped and counted.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from opentelemetry.sdk._logs import LoggerProvider, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, ConsoleLogRecordExporter
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from apis.errors import ConfigError
from apis.imports import ImportFromStringError, import_from_string
from stack.telemetry.switches import SignalSwitch, TelemetrySwitches

CountDropped = Callable[[str, int], None]
"""Counts records that were dropped: the name of the signal, and their number. Called from any thread."""

_log = logging.getLogger(__name__)
_LOG_INTERVAL_S: Final = 60.0
_POLL_S: Final = 0.005
_DEFAULT_QUEUE_SIZE: Final = 2048
"""Records that wait for their export, by OpenTelemetry's default."""
_OTLP_MODULES: Final = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}
_OTLP_CLASSES: Final = {
    "traces": "trace_exporter:OTLPSpanExporter",
    "metrics": "metric_exporter:OTLPMetricExporter",
    "logs": "_log_exporter:OTLPLogExporter",
}
_OTLP_ENCODERS: Final = {
    "traces": "opentelemetry.exporter.otlp.proto.common.trace_encoder:encode_spans",
    "logs": "opentelemetry.exporter.otlp.proto.common._log_encoder:encode_logs",
}
_CONSOLE_EXPORTERS: Final[dict[str, Callable[[], Any]]] = {
    "traces": ConsoleSpanExporter,
    "metrics": ConsoleMetricExporter,
    "logs": ConsoleLogRecordExporter,
}


class SdkProviders:
    """The SDK's providers of one process."""

    def __init__(self, switches: TelemetrySwitches, attributes: dict[str, str], count_dropped: CountDropped) -> None:
        """`attributes` describe this process, next to those that the environment sets."""
        resource = Resource.create({**attributes})
        self.tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        if switches.traces.exporter:
            self.tracers.add_span_processor(
                _BoundedSpanProcessor(_build_exporter("traces", switches.traces, count_dropped))
            )
        readers = (
            [PeriodicExportingMetricReader(cast("Any", _build_exporter("metrics", switches.metrics, count_dropped)))]
            if switches.metrics.exporter
            else []
        )
        # exemplars would take three quarters of the time of each measurement: they are for those who name a filter
        exemplars = None if os.environ.get("OTEL_METRICS_EXEMPLAR_FILTER") else AlwaysOffExemplarFilter()
        self.meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False, exemplar_filter=exemplars)
        self.loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        if switches.logs.exporter:
            self.loggers.add_log_record_processor(
                _BoundedLogProcessor(_build_exporter("logs", switches.logs, count_dropped))
            )

    async def shut_down(self, timeout_s: float) -> None:
        """Send the waiting records and end the SDK's threads, for `timeout_s` at most: then the process ends without
        them."""
        threads = [
            threading.Thread(target=_shut_down, args=(shut_down,), name="telemetry-shutdown", daemon=True)
            for shut_down in (self.tracers.shutdown, self.loggers.shutdown, self.meters.shutdown)
        ]
        for thread in threads:
            thread.start()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while any(thread.is_alive() for thread in threads) and loop.time() < deadline:  # noqa: ASYNC110 - threads set no event of the loop's
            await asyncio.sleep(_POLL_S)


def _shut_down(shut_down: Callable[[], object]) -> None:
    with suppress(Exception):  # the receiver may be gone: the loss is counted
        shut_down()


def _build_exporter(signal: str, switch: SignalSwitch, count_dropped: CountDropped) -> "_CountingExporter":
    """Return the exporter that the environment names. Raises ConfigError if its package is not installed."""
    if switch.exporter == "console":
        exporter = _CONSOLE_EXPORTERS[signal]()
    else:
        try:
            exporter = import_from_string(f"{_OTLP_MODULES[switch.protocol]}.{_OTLP_CLASSES[signal]}")()
        except (ImportError, ImportFromStringError) as exc:
            package = f"opentelemetry-exporter-otlp-proto-{switch.protocol.partition('/')[0]}"
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL is {switch.protocol}, and {package} is not installed. "
                f"Run: pip install {package}"
            ) from exc
    return _CountingExporter(exporter, signal, count_dropped)


def _read_queue_size(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else _DEFAULT_QUEUE_SIZE


def _is_success(result: Any) -> bool:
    return getattr(result, "name", "") == "SUCCESS"


class _CountingExporter:
    """Forwards batches to an exporter of the SDK, and counts and logs the records that it could not deliver. Those of a
    batch that the protocol cannot hold are left out of it, so that the others arrive."""

    def __init__(self, exporter: Any, signal: str, count_dropped: CountDropped) -> None:
        self._exporter = exporter
        self._signal = signal
        self._count = count_dropped
        self._logged_at = -_LOG_INTERVAL_S
        self._unlogged = 0
        self.taken = 0
        """Records that left the queue so far."""

    def export(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        records = cast("Sequence[Any]", batch) if isinstance(batch, Sequence) else (batch,)
        self.taken += len(records)
        result = self._export(batch, len(records), args, kwargs)
        encodable = records if _is_success(result) else [each for each in records if self._can_encode(each)]
        if len(encodable) < len(records):
            self.count_dropped(len(records) - len(encodable), "they cannot be encoded")
            result = self._export(encodable, len(encodable), args, kwargs) if encodable else result
        if encodable and not _is_success(result):
            self.count_dropped(len(encodable), "the receiver did not take them")
        return result

    def _export(self, batch: Any, size: int, args: Any, kwargs: Any) -> Any:
        try:
            return self._exporter.export(batch, *args, **kwargs)
        except (
            ValueError,
            TypeError,
            ArithmeticError,
        ):  # of the encoding: some raise, others return a failure
            return None
        except BaseException:
            self.count_dropped(size, "the exporter failed")
            raise

    def _can_encode(self, record: Any) -> bool:
        """Return whether a record of a batch that failed can be encoded for OTLP; true where that is not the format."""
        target = _OTLP_ENCODERS.get(self._signal)
        if target is None or not type(self._exporter).__module__.startswith("opentelemetry.exporter.otlp."):
            return True
        try:
            import_from_string(target)([record]).SerializeToString()
        except (ValueError, TypeError, ArithmeticError):
            return False
        return True

    def count_dropped(self, count: int, reason: str) -> None:
        """Count records that were dropped, and log that once a minute."""
        self._count(self._signal, count)
        self._unlogged += count
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at, unlogged, self._unlogged = now, self._unlogged, 0
            _log.warning("%d records of telemetry (%s) were dropped: %s", unlogged, self._signal, reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)


class _QueueBound:
    """Counts the records in the queue before an exporter, and drops those that it has no room for."""

    def __init__(self, exporter: _CountingExporter, size_variable: str) -> None:
        self._exporter = exporter
        self._accepted = 0
        self._max_queued = _read_queue_size(size_variable)

    def accepts_record(self) -> bool:
        """Return true if there is room for one more record, which is then in the queue; count it as dropped if not."""
        if self._accepted - self._exporter.taken >= self._max_queued:
            self._exporter.count_dropped(1, "their queue was full")
            return False
        self._accepted += 1
        return True


class _BoundedSpanProcessor(BatchSpanProcessor):
    """Drops and counts spans that the queue has no room for."""

    def __init__(self, exporter: _CountingExporter) -> None:
        super().__init__(exporter)  # pyright: ignore[reportArgumentType]  # forwards all of a SpanExporter
        self._bound = _QueueBound(exporter, "OTEL_BSP_MAX_QUEUE_SIZE")

    def on_end(self, span: ReadableSpan) -> None:
        if span.context and span.context.trace_flags.sampled and self._bound.accepts_record():
            super().on_end(span)


class _BoundedLogProcessor(BatchLogRecordProcessor):
    """Drops and counts events that the queue has no room for."""

    def __init__(self, exporter: _CountingExporter) -> None:
        super().__init__(exporter)  # pyright: ignore[reportArgumentType]  # forwards all of a LogRecordExporter
        self._bound = _QueueBound(exporter, "OTEL_BLRP_MAX_QUEUE_SIZE")

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        if self._bound.accepts_record():
            super().on_emit(log_record)
