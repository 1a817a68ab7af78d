"""The way of records out of the process: one that cannot be encoded takes no other with it, and drops are logged."""

import asyncio

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from stack.telemetry.exporting import SdkProviders
from stack.telemetry.switches import read_switches
from tests.support.servers.otlp_receiver import otlp_variables, receiving_otlp


def test_a_span_that_cannot_be_encoded_is_dropped_alone_and_that_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A time beyond the wire format's last one lost the spans of all tenants that were in its batch."""
    dropped: list[tuple[str, int]] = []
    with receiving_otlp() as receiver:
        for name, value in otlp_variables(receiver).items():
            monkeypatch.setenv(name, value)
        providers = SdkProviders(read_switches(), {}, lambda signal, count: dropped.append((signal, count)))
        tracer = providers.tracers.get_tracer("test")
        for number in range(20):
            start_time = 2**64 if number in (3, 11) else 10**18
            tracer.start_span(f"span {number}", start_time=start_time).end(start_time)
        asyncio.run(providers.shut_down(10))
        assert {span.name for span in receiver.spans} == {f"span {number}" for number in range(20)} - {
            "span 3",
            "span 11",
        }
    assert dropped == [("traces", 2)]
    assert [record.message for record in caplog.records if "were dropped" in record.message] != []
