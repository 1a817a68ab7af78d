"""Switches: the variables of the environment that turn telemetry on and choose what it emits.

The names are those of OpenTelemetry: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from apis.errors import ConfigError

SIGNALS: Final = ("traces", "metrics", "logs")
_EXPORTERS: Final = ("otlp", "console", "none")
_PROTOCOLS: Final = ("http/protobuf", "grpc")
_CONTENT_MODES: Final = {
    "": (False, False),
    "NO_CONTENT": (False, False),
    "SPAN_ONLY": (True, False),
    "EVENT_ONLY": (False, True),
    "SPAN_AND_EVENT": (True, True),
}
_CONTENT_VARIABLE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_EVENT_VARIABLE: Final = "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT"
_CONVENTIONS_VARIABLE: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
OLDER_CONVENTIONS: Final = "gen_ai/1.41"
BOTH_CONVENTIONS: Final = "gen_ai/dup"
"""Values of OTEL_SEMCONV_STABILITY_OPT_IN for the names of v1.41 instead of, or next to, the newest ones."""


@dataclass(frozen=True, slots=True)
class SignalSwitch:
    """The exporter of one signal (`otlp` or `console`), empty where it is off, and the protocol of OTLP."""

    exporter: str = ""
    protocol: str = "http/protobuf"


@dataclass(frozen=True, slots=True)
class TelemetrySwitches:
    """The signals to export; whether spans and events hold texts of prompts, answers and tools; the generations of
    names to emit."""

    traces: SignalSwitch = SignalSwitch()
    metrics: SignalSwitch = SignalSwitch()
    logs: SignalSwitch = SignalSwitch()
    content_in_spans: bool = False
    content_in_events: bool = False
    emits_events: bool = False
    emits_newest: bool = True
    emits_older: bool = False

    @property
    def is_on(self) -> bool:
        """True where any signal is exported."""
        return bool(self.traces.exporter or self.metrics.exporter or self.logs.exporter)


def read_switches(environment: Mapping[str, str] | None = None) -> TelemetrySwitches:
    """Return the switches that the environment sets: a signal is exported where its exporter or an OTLP endpoint is
    named. Raises ConfigError for a value that is not known here."""
    variables = os.environ if environment is None else environment
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetrySwitches()
    signals = {signal: _read_signal(variables, signal) for signal in SIGNALS}
    mode = variables.get(_CONTENT_VARIABLE, "").strip().upper()
    if mode not in _CONTENT_MODES:
        raise _unknown_value_error(_CONTENT_VARIABLE, [name for name in _CONTENT_MODES if name])
    in_spans, in_events = _CONTENT_MODES[mode]
    emits_events = variables.get(_EVENT_VARIABLE, str(in_events)).strip().lower() == "true"
    conventions = {value.strip() for value in variables.get(_CONVENTIONS_VARIABLE, "").split(",")}
    emits_older = bool(conventions & {OLDER_CONVENTIONS, BOTH_CONVENTIONS})
    return TelemetrySwitches(
        **signals,
        content_in_spans=in_spans,
        content_in_events=in_events,
        emits_events=emits_events and bool(signals["logs"].exporter),
        emits_newest=OLDER_CONVENTIONS not in conventions,
        emits_older=emits_older,
    )


def _read_signal(variables: Mapping[str, str], signal: str) -> SignalSwitch:
    name = signal.upper()
    exporter_variable = f"OTEL_{name}_EXPORTER"
    endpoint = variables.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT") or variables.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = variables.get(exporter_variable, "").strip().lower() or ("otlp" if endpoint else "none")
    if exporter not in _EXPORTERS:
        raise _unknown_value_error(exporter_variable, _EXPORTERS)
    if exporter == "none":
        return SignalSwitch()
    specific = f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL"
    protocol_variable = specific if variables.get(specific) else "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = variables.get(protocol_variable, "").strip().lower() or "http/protobuf"
    if protocol not in _PROTOCOLS:
        raise _unknown_value_error(protocol_variable, _PROTOCOLS)
    return SignalSwitch(exporter, protocol)


def _unknown_value_error(variable: str, values: Sequence[str]) -> ConfigError:
    return ConfigError(f"{variable} has a value that is not known here. Known ones: {', '.join(values)}.")
