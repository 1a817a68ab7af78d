"""AgentSpanForwarder: spans that agents sent to the Traces API, as spans of OpenTelemetry with their own times and ids.

A trace keeps its 32 hexadecimal digits where there is one tenant, a span the first 16 of its 24; other ids are hashed.
No content is sent on: no
input, no output, no arguments. Names follow the conventions of `stack.telemetry`:
https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-agent-spans.md.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from apis.observation.traces import IngestedSpan, to_unix_ns

_SCOPE: Final = "responses-stack.agents"
_TRACE_ID: Final = re.compile(r"trace_([0-9a-f]{32})")
_SPAN_ID: Final = re.compile(r"span_([0-9a-f]{16})[0-9a-f]{8}")
_MAX_NAME_CHARS: Final = 128

Fields = Mapping[str, Any]


class AgentSpanForwarder:
    """The SpanForwarder of a process with an SDK's TracerProvider. Runs on the event loop's thread, and only appends to
    the queues of the provider's processors."""

    def __init__(self, tracers: TracerProvider, *, several_tenants: bool) -> None:
        """With `several_tenants`, the id of a trace is hashed with its tenant: else one could put spans under the trace
        of another, or of this server."""
        self._several_tenants = several_tenants
        self._tracer = cast("Tracer", tracers.get_tracer(_SCOPE))
        self._ids = _AgentIds()
        self._tracer.id_generator = self._ids

    def __call__(self, span: IngestedSpan, group_id: str | None, tenant: str) -> None:
        """Send an ended span on, if its trace is sampled: the whole trace is, or nothing of it."""
        if span.started_at is None or span.ended_at is None:
            return
        trace_id, name = to_trace_id(span.trace_id, tenant if self._several_tenants else None), _name_span(span)
        if not self._tracer.sampler.should_sample(None, trace_id, name).decision.is_sampled():
            return
        self._ids.trace_id, self._ids.span_id = trace_id, to_span_id(span.id)
        start_ns, end_ns = to_unix_ns(span.started_at), to_unix_ns(span.ended_at)
        forwarded = self._tracer.start_span(
            name,
            context=_parent_context(trace_id, span.parent_id),
            kind=SpanKind.CLIENT if span.span_data.type in ("response", "generation") else SpanKind.INTERNAL,
            attributes=_describe(span, group_id),
            start_time=start_ns,
        )
        if span.error is not None:
            forwarded.set_status(Status(StatusCode.ERROR))
        forwarded.end(max(start_ns, end_ns))


class _AgentIds(IdGenerator):
    """Returns the ids of the span that is being forwarded."""

    trace_id = 0
    span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


def to_trace_id(trace_id: str, tenant: str | None) -> int:
    """Return OpenTelemetry's id of an agents' trace, which is its own where there is one tenant."""
    match = _TRACE_ID.fullmatch(trace_id) if tenant is None else None
    number = int(match[1], 16) if match else 0
    named = trace_id if tenant is None else f"{tenant}\n{trace_id}"
    return number or int.from_bytes(hashlib.sha256(named.encode()).digest()[:16])


def to_span_id(span_id: str) -> int:
    """Return OpenTelemetry's id of an agents' span."""
    match = _SPAN_ID.fullmatch(span_id)
    number = int(match[1], 16) if match else 0
    return number or int.from_bytes(hashlib.sha256(span_id.encode()).digest()[:8])


def _parent_context(trace_id: int, parent_id: str | None) -> Context:
    if parent_id is None:
        return Context()
    parent = SpanContext(trace_id, to_span_id(parent_id), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    return value[:_MAX_NAME_CHARS] if isinstance(value, str) else ""


def _name_span(span: IngestedSpan) -> str:
    fields: Fields = span.span_data.model_extra or {}
    match span.span_data.type:
        case "agent":
            return f"invoke_agent {_text(fields, 'name')}".strip()
        case "function":
            return f"execute_tool {_text(fields, 'name')}".strip()
        case "response" | "generation":
            return f"chat {_text(fields, 'model')}".strip()
        case kind:
            return f"{kind} {_text(fields, 'name')}".strip()


_OPERATIONS: Final = {"agent": "invoke_agent", "function": "execute_tool", "response": "chat", "generation": "chat"}
_NAME_ATTRIBUTES: Final = {
    "agent": {"name": "gen_ai.agent.name"},
    "function": {"name": "gen_ai.tool.name"},
    "response": {"response_id": "gen_ai.response.id"},
    "generation": {"model": "gen_ai.request.model"},
    "handoff": {"from_agent": "openai.agents.handoff.from", "to_agent": "openai.agents.handoff.to"},
}


def _describe(span: IngestedSpan, group_id: str | None) -> dict[str, str | int]:
    fields: Fields = span.span_data.model_extra or {}
    kind = span.span_data.type
    attributes: dict[str, str | int] = {
        "openai.agents.span.type": kind,
        "openai.agents.span.id": span.id,
        "openai.agents.trace.id": span.trace_id,
    }
    if kind in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[kind]
    if group_id:
        attributes["gen_ai.conversation.id"] = group_id
    for name, attribute in _NAME_ATTRIBUTES.get(kind, {}).items():
        if text := _text(fields, name):
            attributes[attribute] = text
    usage = fields.get("usage")
    for name in ("input_tokens", "output_tokens"):
        tokens = cast("Fields", usage).get(name) if isinstance(usage, Mapping) else None
        if isinstance(tokens, int) and 0 <= tokens < 2**63:
            attributes[f"gen_ai.usage.{name}"] = tokens
    if span.error is not None:
        attributes["error.type"] = "_OTHER"
    return attributes
