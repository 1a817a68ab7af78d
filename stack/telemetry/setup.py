"""running_telemetry: telemetry for as long as an app runs, as the environment asks for it."""

import logging
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from apis.errors import ConfigError
from apis.imports import import_from_string, install_command
from apis.inference import Inference
from apis.observation.traces import install_span_forwarder
from apis.telemetry import NO_TELEMETRY, install_telemetry, telemetry
from stack import __version__
from stack.telemetry.switches import TelemetrySwitches, read_switches

if TYPE_CHECKING:
    from stack.telemetry.exporting import CountDropped, SdkProviders
    from stack.telemetry.recorder import SpanRecorder

SERVICE_NAME: Final = "responses-stack"
_SHUTDOWN_TIMEOUT_S: Final = 0.3
"""Seconds that the end of the process waits for the last export."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def running_telemetry(
    count_dropped: "CountDropped", *, several_tenants: bool = False
) -> "AsyncGenerator[SpanRecorder | None]":
    """Record telemetry within the context, and yield the recorder; None where the environment asks for none, and
    nothing of OpenTelemetry is then imported.

    A process in which an instrumentation has set OpenTelemetry's global providers uses those. Raises ConfigError for a
    variable that cannot be honoured, and where the SDK is not installed.
    """
    switches = read_switches()
    if telemetry() is not NO_TELEMETRY:  # another app of this process records already
        yield telemetry()  # pyright: ignore[reportReturnType]  # only this function installs one, and it is a SpanRecorder
        return
    if not switches.is_on:
        yield None
        return
    providers: SdkProviders | None = None
    if _has_global_providers():
        recorder = import_from_string("stack.telemetry.recorder:build_global_recorder")(switches)
    else:
        providers = _build_providers(switches, count_dropped)
        recorder = import_from_string("stack.telemetry.recorder:SpanRecorder")(
            switches, providers.tracers, providers.meters, providers.loggers
        )
    install_telemetry(recorder)
    tracers = providers.tracers if providers is not None else sys.modules["opentelemetry.trace"].get_tracer_provider()
    forwarder_type = import_from_string("stack.telemetry.agent_spans:AgentSpanForwarder")
    install_span_forwarder(forwarder_type(tracers, several_tenants=several_tenants))
    _log.info("telemetry is on: %s", _describe(switches))
    try:
        yield recorder
    finally:
        install_telemetry(NO_TELEMETRY)
        install_span_forwarder(None)
        if providers is not None:
            await providers.shut_down(_SHUTDOWN_TIMEOUT_S)


def observe_inference(recorder: "SpanRecorder | None") -> Callable[[Inference], Inference]:
    """Return the function that puts the stack's inference under observation; without a recorder it changes nothing."""
    if recorder is None:
        return lambda inference: inference
    observed_type = import_from_string("stack.telemetry.observed_inference:ObservedInference")
    return lambda inference: observed_type(inference, recorder)


def _has_global_providers() -> bool:
    """Return true where something before us has set a TracerProvider of the SDK for the whole process."""
    api, sdk = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.sdk.trace")
    return api is not None and sdk is not None and isinstance(api.get_tracer_provider(), sdk.TracerProvider)


def _build_providers(switches: TelemetrySwitches, count_dropped: "CountDropped") -> "SdkProviders":
    try:
        provider_type: type[SdkProviders] = import_from_string("stack.telemetry.exporting:SdkProviders")
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"OTEL_* variables switch telemetry on, and the package {exc.name} is not installed. "
            f"Run: {install_command('otel')}, or set OTEL_SDK_DISABLED=true."
        ) from exc
    attributes = {"service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        attributes["service.name"] = SERVICE_NAME
    return provider_type(switches, attributes, count_dropped)


def _describe(switches: TelemetrySwitches) -> str:
    signals = {"traces": switches.traces, "metrics": switches.metrics, "logs": switches.logs}
    return ", ".join(f"{name} by {switch.exporter}" for name, switch in signals.items() if switch.exporter)
