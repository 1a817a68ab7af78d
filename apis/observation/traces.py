"""The Traces API: spans that the OpenAI Agents SDKs record about their own runs, as their exporters send them.

`POST /v1/traces/ingest` has the body of openai-agents for Python (`agents.tracing.processors.BackendSpanExporter`) and
of @openai/agents for JavaScript (`OpenAITracingExporter`). Reading traces is an extension of OpenAI's API.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field

from apis.wire.base import ListParams, Wire

ID_PATTERN: Final = r"^[A-Za-z0-9_.:-]{1,128}$"
TraceId = Annotated[str, Field(pattern=ID_PATTERN)]
"""An id of a trace or a span. The SDKs make `trace_` and 32, `span_` and 24 hexadecimal digits; programs may set
others."""


_MAX_AGE_S: Final = 30 * 86_400
_MAX_AHEAD_S: Final = 86_400
"""Seconds by which the clock of a client may be fast. Times far from now cannot be sent on by every protocol."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def to_unix_ns(timestamp: str) -> int:
    """Return a time in ISO 8601 as nanoseconds since the epoch; without an offset it is UTC. Raises ValueError."""
    moment = datetime.fromisoformat(timestamp)
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1) * 1000


def _check_time(timestamp: str) -> str:
    try:
        age_s = time.time() - to_unix_ns(timestamp) / 1e9
    except (ValueError, OverflowError):
        raise ValueError("expected a time in ISO 8601, such as 2026-11-22T12:00:00.000Z") from None
    if not -_MAX_AHEAD_S <= age_s <= _MAX_AGE_S:
        raise ValueError("expected a time of the last 30 days, and no more than a day from now")
    return timestamp


Timestamp = Annotated[str, Field(max_length=64), AfterValidator(_check_time)]


class SpanData(Wire):
    """The subject of a span, by its `type` (agent, response, function, generation, handoff, guardrail, custom, ...).
    All fields are stored as they are."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(min_length=1, max_length=64)


class SpanFailure(Wire):
    """The error with which a span ended."""

    message: str
    data: dict[str, Any] | None = None


class IngestedTrace(Wire):
    """One run of a workflow; `group_id` joins several, such as those of one chat."""

    object: Literal["trace"]
    id: TraceId
    workflow_name: str | None = Field(None, max_length=1024)
    group_id: str | None = Field(None, max_length=1024)
    metadata: dict[str, Any] | None = None


class IngestedSpan(Wire):
    """One operation of a trace, sent when it has ended."""

    object: Literal["trace.span"]
    id: TraceId
    trace_id: TraceId
    parent_id: TraceId | None = None
    started_at: Timestamp | None = None
    ended_at: Timestamp | None = None
    span_data: SpanData
    error: SpanFailure | None = None
    metadata: dict[str, Any] | None = None


class IngestTraces(Wire):
    """The traces and spans that an exporter sends at a time."""

    data: list[Annotated[IngestedTrace | IngestedSpan, Field(discriminator="object")]] = Field(max_length=1000)


class TraceListParams(ListParams):
    """Query of a listing of traces."""

    after: TraceId | None = None
    group_id: str | None = Field(None, max_length=1024)
    workflow_name: str | None = Field(None, max_length=1024)
    response_id: str | None = Field(None, max_length=256)


@dataclass(frozen=True, slots=True)
class TraceDetail:
    """A trace as the API shows it, and the JSON of its spans, in the order of their starts."""

    trace: dict[str, Any]
    spans: Sequence[bytes]


SpanForwarder = Callable[[IngestedSpan, str | None, str], None]
"""Sends a span that was stored for the first time on to another system; the texts are the `group_id` of its trace and
its tenant."""


def _forward_nowhere(_span: IngestedSpan, _group_id: str | None, _tenant: str) -> None:
    pass


_forwarder: SpanForwarder = _forward_nowhere


def install_span_forwarder(forwarder: SpanForwarder | None) -> None:
    """Let all spans that this process stores for the first time be sent on by `forwarder`, which neither waits nor
    raises; None ends that."""
    global _forwarder  # noqa: PLW0603 - one for the process, as telemetry is
    _forwarder = forwarder or _forward_nowhere


def forward_span(span: IngestedSpan, group_id: str | None, tenant: str) -> None:
    """Send a span on, if a forwarder is installed."""
    _forwarder(span, group_id, tenant)
