"""build_recorder: a recorder over the global providers that an instrumentation of the process has set."""

from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import get_tracer_provider

from stack.telemetry.recorder import SpanRecorder
from stack.telemetry.switches import TelemetrySwitches


def build_recorder(switches: TelemetrySwitches) -> SpanRecorder:
    """Return a recorder over OpenTelemetry's global providers."""
    return SpanRecorder(switches, get_tracer_provider(), get_meter_provider(), get_logger_provider())
