"""Agents' spans on their way to OpenTelemetry: their own ids and times, whole traces or nothing, and no content."""

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

from apis.observation.traces import IngestedSpan, install_span_forwarder
from stack.telemetry.agent_spans import AgentSpanForwarder
from tests.support.sdk.agent_traces import DAY, recorded_traces
from tests.support.servers.serving import serving

RECORDED: Any = recorded_traces()


def forward(*items: Any, tenant: str = "a", several_tenants: bool = False, **options: Any) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, **options)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    forwarder = AgentSpanForwarder(provider, several_tenants=several_tenants)
    for item in items:
        forwarder(IngestedSpan.model_validate(item), "chat-1", tenant)
    return [*exporter.get_finished_spans()]


def span(trace_number: int, **fields: Any) -> Any:
    times = {"started_at": f"{DAY}T12:00:00.250Z", "ended_at": f"{DAY}T12:00:01+00:00"}
    ids = {"id": f"span_{trace_number:024x}", "trace_id": f"trace_{trace_number:032x}"}
    return {"object": "trace.span", "span_data": {"type": "custom", "name": "n"}, **ids, **times, **fields}


async def test_a_stored_trace_is_sent_on_with_its_own_ids_and_times() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    install_span_forwarder(AgentSpanForwarder(provider, several_tenants=False))
    try:
        async with serving() as served:
            for _ in range(2):
                await served.client.post("/traces/ingest", cast_to=object, body=RECORDED)
    finally:
        install_span_forwarder(None)
    sent = {each["id"]: each for each in RECORDED["data"][1:]}
    spans = exporter.get_finished_spans()
    assert len(spans) == len(sent)
    for each in spans:
        attributes = dict(each.attributes or {})
        original = sent[str(attributes["openai.agents.span.id"])]
        assert each.context is not None
        assert f"{each.context.trace_id:032x}" == original["trace_id"].removeprefix("trace_")
        assert f"{each.context.span_id:016x}" == original["id"].removeprefix("span_")[:16]
        parent = each.parent and f"{each.parent.span_id:016x}"
        assert parent == (original["parent_id"] and original["parent_id"].removeprefix("span_")[:16])
        assert attributes["gen_ai.conversation.id"] == "chat-1"
        assert each.status.is_ok == (original["error"] is None)
    names = {each.name for each in spans}
    assert names >= {"invoke_agent Tutor", "execute_tool add", "chat m", "chat", "handoff", "guardrail safe"}
    [response] = [each for each in spans if each.name == "chat"]
    assert (response.attributes or {})["gen_ai.response.id"] == "resp_1"
    [generation] = [each for each in spans if each.name == "chat m"]
    assert (generation.attributes or {})["gen_ai.usage.output_tokens"] == 2


def test_times_are_exact_and_content_stays_here() -> None:
    data = {"type": "function", "name": "add", "input": "SECRET", "output": "SECRET"}
    [each] = forward(span(1, span_data=data, error={"message": "SECRET"}))
    assert each.start_time is not None
    assert each.end_time is not None
    assert each.end_time - each.start_time == 750_000_000
    assert "SECRET" not in each.to_json()


def test_ids_that_programs_chose_are_hashed_the_same_way_each_time() -> None:
    items = [
        span(1, id="mine", trace_id="run-1"),
        span(1, id="x", trace_id="run-1", parent_id="mine"),
    ]
    parent, child = forward(*items)
    assert parent.context is not None
    assert child.context is not None
    assert child.parent is not None
    assert child.parent.span_id == parent.context.span_id
    assert child.context.trace_id == parent.context.trace_id


def test_no_tenant_puts_a_span_under_the_trace_of_another() -> None:
    """Where there are several tenants, an id stands for a trace of its tenant alone."""
    spans = [forward(span(1), span(1, id="b"), tenant=tenant, several_tenants=True) for tenant in ("a", "b")]
    ids = [{each.context.trace_id for each in own if each.context is not None} for own in spans]
    assert [len(own) for own in ids] == [1, 1]
    assert ids[0] != ids[1]
    assert 1 not in ids[0] | ids[1], "the id that a request of this server may have"
    assert all((each.attributes or {})["openai.agents.trace.id"] == span(1)["trace_id"] for each in spans[0])


def test_a_trace_is_sampled_whole_or_not_at_all() -> None:
    items = [
        span(number * 2**119, id=f"span_{at:024x}", parent_id=parent)
        for number in range(1, 200)
        for at, parent in ((1, None), (2, f"span_{1:024x}"))
    ]
    for item in items:  # ratios look at the last 64 bits
        digits = int(item["trace_id"][6:], 16) >> 64
        item["trace_id"] = f"trace_{(digits << 64) | (digits * 2**8 % 2**64):032x}"
    exporter = forward(*items, sampler=ParentBased(TraceIdRatioBased(0.5)))
    traces = [each.context.trace_id for each in exporter if each.context is not None]
    assert 0 < len(traces) < len(items)
    assert all(traces.count(trace_id) == 2 for trace_id in traces)
    assert forward(*items, sampler=ALWAYS_OFF) == []


@pytest.mark.parametrize(
    "fields", [{"usage": 3}, {"usage": {"input_tokens": 2**80}}, {"name": 7}, {"name": "x" * 9999}]
)
def test_odd_fields_do_no_harm(fields: Any) -> None:
    [each] = forward(span(1, span_data={"type": "generation", **fields}))
    assert len(each.name) < 200
