"""Keys and records of stored traces.

TENANT/trace/ID                    the trace: names, counts, the ids of its responses
TENANT/trace_span/ID/SPAN          a span, as JSON
TENANT/trace_age/TIME/ID           the bytes of the trace; the order of listings
TENANT/trace_of/RESPONSE/ID        empty: the trace has a span of that response
TENANT/trace_usage                 the traces of the tenant and their bytes; may include expired ones
"""

from typing import Any, Final

import msgspec
import orjson

from apis.errors import InvalidRequest
from apis.observation.traces import IngestedSpan, IngestedTrace, to_unix_ns
from apis.storage.keys import id_to_key_part
from apis.storage.records import encode_record

MAX_FIELD_BYTES: Final = 100_000
"""Bytes of one value of `span_data`; longer ones are cut, as the SDKs' exporters do for OpenAI's own server."""
MAX_SPAN_BYTES: Final = 256 * 1024
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_RESPONSE_IDS: Final = 100
"""Responses that a trace names and can be found by."""
RECORD_BYTES: Final = 1024
"""Bytes that a trace counts for besides its spans and metadata."""
_TRUNCATION_SUFFIX: Final = "... [truncated]"
_PREVIEW_CHARS: Final = 4000


class TraceRecord(msgspec.Struct, omit_defaults=True):
    """A stored trace. `created_at` is when it first came, in Unix time; `started_at` and `ended_at` are those of its
    spans."""

    created_at: float
    workflow_name: str | None = None
    group_id: str | None = None
    metadata: msgspec.Raw = msgspec.Raw(b"null")
    started_at: str | None = None
    ended_at: str | None = None
    span_count: int = 0
    error_count: int = 0
    dropped_spans: int = 0
    size_bytes: int = RECORD_BYTES
    response_ids: list[str] = msgspec.field(default_factory=list[str])

    def set_trace(self, trace: IngestedTrace, metadata_json: bytes) -> None:
        """Take over the names of the trace, which may come before or after its spans."""
        self.size_bytes += len(metadata_json) - len(bytes(self.metadata))
        self.workflow_name = trace.workflow_name
        self.group_id = trace.group_id
        self.metadata = msgspec.Raw(metadata_json)

    def add_span(self, span: IngestedSpan, size_bytes: int) -> None:
        """Count a span that is stored for the first time."""
        self.span_count += 1
        self.size_bytes += size_bytes
        self._extend(span)

    def replace_span(self, span: IngestedSpan, size_bytes: int, stored: "StoredSpan", stored_bytes: int) -> None:
        """Count a span that has ended since it was stored."""
        self.error_count -= stored.error is not None
        self.size_bytes += size_bytes - stored_bytes
        self._extend(span)

    def _extend(self, span: IngestedSpan) -> None:
        self.error_count += span.error is not None
        if span.started_at and (not self.started_at or to_unix_ns(span.started_at) < to_unix_ns(self.started_at)):
            self.started_at = span.started_at
        if span.ended_at and (not self.ended_at or to_unix_ns(span.ended_at) > to_unix_ns(self.ended_at)):
            self.ended_at = span.ended_at
        response_id = response_id_of(span)
        if response_id and response_id not in self.response_ids and len(self.response_ids) < MAX_RESPONSE_IDS:
            self.response_ids.append(response_id)

    def to_fields(self, trace_id: str) -> dict[str, Any]:
        """Return the trace as the API shows it."""
        return {
            "id": trace_id,
            "object": "trace",
            "created_at": int(self.created_at),
            "workflow_name": self.workflow_name,
            "group_id": self.group_id,
            "metadata": orjson.loads(bytes(self.metadata)),
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "span_count": self.span_count,
            "error_count": self.error_count,
            "dropped_spans": self.dropped_spans,
            "response_ids": self.response_ids,
        }


class StoredSpan(msgspec.Struct):
    """The fields of a stored span that are read here; the others stay JSON."""

    id: str
    started_at: str | None = None
    ended_at: str | None = None
    error: dict[str, Any] | None = None


class TraceUsage(msgspec.Struct):
    """The traces of a tenant and their bytes."""

    traces: int = 0
    size_bytes: int = 0


def trace_key(tenant: str, trace_id: str) -> str:
    return f"{tenant}/trace/{trace_id}"


def span_key(tenant: str, trace_id: str, span_id: str = "") -> str:
    return f"{tenant}/trace_span/{trace_id}/{span_id}"


def age_key(tenant: str, created_at: float, trace_id: str) -> str:
    return f"{tenant}/trace_age/{int(created_at * 1000):013d}/{trace_id}"


def response_key(tenant: str, response_id: str, trace_id: str = "") -> str:
    return f"{tenant}/trace_of/{id_to_key_part(response_id).replace('/', ' ')}/{trace_id}"


def usage_key(tenant: str) -> str:
    return f"{tenant}/trace_usage"


def response_id_of(span: IngestedSpan) -> str | None:
    """Return the id of the response that a span of the type `response` is about."""
    response_id = (span.span_data.model_extra or {}).get("response_id")
    is_id = isinstance(response_id, str) and 0 < len(response_id) <= 256
    return response_id if is_id and span.span_data.type == "response" else None


def metadata_to_json(trace: IngestedTrace, position: int) -> bytes:
    """Return the metadata of a trace. Raises InvalidRequest if it is too large."""
    metadata_json = encode_record(trace.metadata)
    if len(metadata_json) > MAX_METADATA_BYTES:
        raise _too_large("The metadata of a trace", metadata_json, MAX_METADATA_BYTES, f"data[{position}].metadata")
    return metadata_json


def span_to_json(span: IngestedSpan, position: int) -> bytes:
    """Return a span as it is stored, its long values cut. Raises InvalidRequest if it is still too large."""
    fields = span.model_dump(exclude_none=False)
    if fields["metadata"] is None:
        del fields["metadata"]
    span_json = encode_record(fields)
    if len(span_json) > MAX_FIELD_BYTES:
        fields["span_data"] = {name: _truncate(value) for name, value in fields["span_data"].items()}
        span_json = encode_record(fields)
    if len(span_json) > MAX_SPAN_BYTES:
        raise _too_large("A span", span_json, MAX_SPAN_BYTES, f"data[{position}]")
    return span_json


def _too_large(name: str, value_json: bytes, limit_bytes: int, param: str) -> InvalidRequest:
    message = f"{name} has at most {limit_bytes} bytes, and this has {len(value_json)}."
    return InvalidRequest(message, param=param, code="string_above_max_length")


def _truncate(value: Any) -> Any:
    """Return a value of at most MAX_FIELD_BYTES as JSON: a text loses its end, another value becomes a preview."""
    value_json = encode_record(value)
    if len(value_json) <= MAX_FIELD_BYTES:
        return value
    if isinstance(value, str):
        room = MAX_FIELD_BYTES - len(_TRUNCATION_SUFFIX) - 2
        while len(encode_record(value)) > room + 2:
            value = value[: min(len(value) - 1, len(value) * room // len(encode_record(value)))]
        return value + _TRUNCATION_SUFFIX
    preview = value_json[: 4 * _PREVIEW_CHARS].decode(errors="ignore")[:_PREVIEW_CHARS]
    return {"truncated": True, "original_type": "array" if isinstance(value, list) else "object", "preview": preview}
