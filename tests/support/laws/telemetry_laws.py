"""Holds received spans and metrics against the published tables of attributes, and traces against their own logic."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.servers.otlp_receiver import MetricPoint, OtlpReceiver, SentSpan

TABLES: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "spec" / "telemetry" / "conventions.json").read_text()
)
BOUNDS: Final = {
    "doubling": tuple(round(0.01 * 2**power, 2) for power in range(14)),
    "powers of 4": tuple(float(4**power) for power in range(14)),
}
_TYPES: Final = {"bool": bool, "int": int, "float": float, "list": list}
_TYPE_BY_NAME: Final = {name: _TYPES[kind] for kind, names in TABLES["types"].items() for name in names}
_CLOCK_SLACK_S: Final = 0.002


def table_of(span: SentSpan) -> str:
    """Return the name of the table that the span belongs to, by its operation."""
    match span.attributes.get("gen_ai.operation.name"), span.name.partition(" ")[0]:
        case "invoke_agent", _:
            return "gen_ai.invoke_agent.internal"
        case "chat", _:
            return "gen_ai.client.inference"
        case "decide", _:
            return "stack.decide"
        case "embeddings", _:
            return "gen_ai.client.embeddings"
        case "retrieval", _:
            return "gen_ai.retrieval.client"
        case _, "tools/call" | "tools/list":
            return "mcp.client"
        case "execute_tool", _:
            return "gen_ai.execute_tool.internal"
        case _, "response.create":
            return "stack.response.create"
        case _, "store" | "queue_wait" as name:
            return f"stack.{name}"
        case _:
            return "http.server" if span.kind == "SERVER" else "http.client"


def check_span(span: SentSpan, *, with_content: bool = False) -> None:
    """Raise AssertionError where the span breaks its table."""
    table = TABLES["spans"][table_of(span)]
    allowed = {name for level in ("required", "conditional", "recommended", "own") for name in table.get(level, ())}
    if with_content:
        allowed |= set(table["opt_in"])
    names = set(span.attributes)
    assert span.kind in table["kinds"], span
    assert set(table["required"]) <= names, (span, set(table["required"]) - names)
    assert names <= allowed, (span.name, names - allowed)
    assert span.is_error == ("error.type" in names), span
    assert ("server.address" in names) >= ("server.port" in names), span
    assert span.end_s >= span.start_s
    for name, value in span.attributes.items():
        assert isinstance(value, _TYPE_BY_NAME.get(name, str)), (span.name, name, value)
        assert not isinstance(value, str) or value, (span.name, name)
    check_name(span)


def check_name(span: SentSpan) -> None:
    """Raise AssertionError where the name is not made of the attributes that the conventions name."""
    parts = span.attributes
    match table_of(span):
        case "gen_ai.invoke_agent.internal":
            expected = f"invoke_agent {parts.get('gen_ai.agent.name', '')}"
        case "gen_ai.client.inference" | "gen_ai.client.embeddings" | "stack.decide":
            expected = f"{parts['gen_ai.operation.name']} {parts['gen_ai.request.model']}"
        case "gen_ai.execute_tool.internal":
            expected = f"execute_tool {parts['gen_ai.tool.name']}"
        case "mcp.client":
            expected = f"{parts['mcp.method.name']} {parts.get('gen_ai.tool.name', '')}"
        case "gen_ai.retrieval.client":
            expected = f"retrieval {parts['gen_ai.data_source.id']}"
        case "http.server":
            expected = f"{parts['http.request.method'].replace('_OTHER', 'HTTP')} {parts.get('http.route', '')}"
        case _:
            return
    assert span.name == expected.strip(), span


def check_traces(spans: Sequence[SentSpan], remote_ids: Sequence[str] = ()) -> None:
    """Raise AssertionError for a parent that never arrived or that began after its child, or for one id used twice."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        parent = by_id.get(span.parent_id)
        if not span.parent_id or span.parent_id in remote_ids:
            continue
        assert parent is not None, span
        assert parent.trace_id == span.trace_id
        assert parent.start_s <= span.start_s + _CLOCK_SLACK_S, (parent, span)


def check_metric(point: MetricPoint) -> None:
    """Raise AssertionError where a metric breaks its table."""
    table = TABLES["metrics"][point.name]
    names = set(point.attributes)
    assert point.unit == table["unit"], point
    assert set(table["required"]) <= names <= {*table["required"], *table["allowed"]}, point
    if "bounds" in table:
        assert point.bounds == BOUNDS[table["bounds"]], point


def check_all(receiver: OtlpReceiver, remote_ids: Sequence[str] = (), *, with_content: bool = False) -> None:
    """Hold all that was received against the tables."""
    assert receiver.spans
    for span in receiver.spans:
        check_span(span, with_content=with_content)
    check_traces(receiver.spans, remote_ids)
    for point in receiver.points.values():
        check_metric(point)
