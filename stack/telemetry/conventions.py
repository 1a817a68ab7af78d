"""Names of spans and metrics in OpenTelemetry's conventions for generative AI, HTTP and MCP, and those of v1.41.

Source: https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai at 024a4f9 (November 2026), and
https://github.com/open-telemetry/semantic-conventions v1.41.0 for the older names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from apis.telemetry import SpanType

PROVIDER_NAME: Final = "responses_stack"
"""`gen_ai.provider.name` of engines in this process, and of the loop itself in the older conventions."""

_MODEL_KEYS: Final = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "server.address",
    "server.port",
)
_HTTP_KEYS: Final = (
    "http.request.method",
    "url.scheme",
    "http.route",
    "http.response.status_code",
    "network.protocol.version",
    "error.type",
)


@dataclass(frozen=True, slots=True)
class SpanForm:
    """Form of a type of span: the first part of its name, its kind, the histogram that receives its duration in
    seconds, and the attributes that belong on its metrics."""

    name: str
    kind: Literal["SERVER", "CLIENT", "INTERNAL"]
    duration_metric: str = ""
    metric_keys: tuple[str, ...] = ()


SPAN_FORMS: Final[Mapping[SpanType, SpanForm]] = {
    SpanType.HTTP_REQUEST: SpanForm("", "SERVER", "http.server.request.duration", _HTTP_KEYS),
    SpanType.WEBSOCKET_CREATE: SpanForm("response.create", "SERVER"),
    SpanType.INVOKE_AGENT: SpanForm(
        "invoke_agent", "INTERNAL", "gen_ai.invoke_agent.duration", ("gen_ai.agent.name", "error.type")
    ),
    SpanType.CHAT: SpanForm("chat", "CLIENT", "gen_ai.client.inference.duration", _MODEL_KEYS),
    SpanType.LOCAL_CHAT: SpanForm("chat", "INTERNAL", "gen_ai.client.inference.duration", _MODEL_KEYS),
    SpanType.DECIDE: SpanForm("decide", "CLIENT", "gen_ai.client.inference.duration", _MODEL_KEYS),
    SpanType.LOCAL_DECIDE: SpanForm("decide", "INTERNAL", "gen_ai.client.inference.duration", _MODEL_KEYS),
    SpanType.EMBEDDINGS: SpanForm("embeddings", "CLIENT", "gen_ai.client.embeddings.duration", _MODEL_KEYS),
    SpanType.LOCAL_EMBEDDINGS: SpanForm("embeddings", "INTERNAL", "gen_ai.client.embeddings.duration", _MODEL_KEYS),
    SpanType.EXECUTE_TOOL: SpanForm(
        "execute_tool", "INTERNAL", "gen_ai.execute_tool.duration", ("gen_ai.tool.name", "error.type")
    ),
    SpanType.MCP_REQUEST: SpanForm(
        "",
        "CLIENT",
        "mcp.client.operation.duration",
        ("mcp.method.name", "gen_ai.tool.name", "server.address", "server.port", "network.transport", "error.type"),
    ),
    SpanType.RETRIEVAL: SpanForm("retrieval", "INTERNAL"),
    SpanType.STORE: SpanForm("store", "INTERNAL", "stack.store.duration", ("stack.store.operation", "error.type")),
    SpanType.WEBHOOK: SpanForm("", "CLIENT"),
    SpanType.QUEUE_WAIT: SpanForm("queue_wait", "INTERNAL"),
}

_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_HTTP_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120, 300)
_MCP_SECONDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_TOKENS: Final = tuple(4**power for power in range(14))
_CALLS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TOKEN_SECONDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)

HISTOGRAMS: Final[Mapping[str, tuple[str, Sequence[float]]]] = {
    "http.server.request.duration": ("s", _HTTP_SECONDS),
    "gen_ai.invoke_agent.duration": ("s", _SECONDS),
    "gen_ai.invoke_agent.inference_calls": ("{call}", _CALLS),
    "gen_ai.invoke_agent.tool_calls": ("{call}", _CALLS),
    "gen_ai.client.inference.duration": ("s", _SECONDS),
    "gen_ai.client.inference.time_to_first_chunk": ("s", _SECONDS),
    "gen_ai.client.inference.time_per_output_chunk": ("s", _SECONDS),
    "gen_ai.client.inference.operation.input_tokens": ("{token}", _TOKENS),
    "gen_ai.client.inference.operation.output_tokens": ("{token}", _TOKENS),
    "gen_ai.client.embeddings.duration": ("s", _SECONDS),
    "gen_ai.client.embeddings.operation.input_tokens": ("{token}", _TOKENS),
    "gen_ai.server.request.duration": ("s", _SECONDS),
    "gen_ai.server.time_to_first_token": ("s", _FIRST_TOKEN_SECONDS),
    "gen_ai.server.time_per_output_token": ("s", _TOKEN_SECONDS),
    "gen_ai.execute_tool.duration": ("s", _SECONDS),
    "mcp.client.operation.duration": ("s", _MCP_SECONDS),
    "stack.store.duration": ("s", _HTTP_SECONDS),
    "gen_ai.client.operation.duration": ("s", _SECONDS),
    "gen_ai.client.operation.time_to_first_chunk": ("s", _SECONDS),
    "gen_ai.client.operation.time_per_output_chunk": ("s", _SECONDS),
    "gen_ai.client.token.usage": ("{token}", _TOKENS),
}
"""Histograms by name, with their units and bounds; the last four are of v1.41."""
COUNTERS: Final[Mapping[str, str]] = {
    "gen_ai.client.inference.usage.input_tokens": "{token}",
    "gen_ai.client.inference.usage.output_tokens": "{token}",
    "gen_ai.client.inference.usage.cache_read.input_tokens": "{token}",
    "gen_ai.client.inference.usage.reasoning.output_tokens": "{token}",
    "stack.responses.queued": "{response}",
    "stack.responses.resumed": "{response}",
    "stack.responses.events_logged": "{event}",
}
"""Counters by name, with their units."""
UP_DOWN_COUNTERS: Final[Mapping[str, str]] = {
    "http.server.active_requests": "{request}",
    "stack.responses.leases": "{lease}",
}
"""Counts that go up and down, by name, with their units."""

CLIENT_KEYS: Final = frozenset(
    {"gen_ai.agent.name", "gen_ai.request.model", "gen_ai.response.model", "gen_ai.tool.name", "server.address"}
)
"""Attributes of metrics whose values a client or an upstream may choose."""
OTHER_VALUE: Final = "_OTHER"
"""The value of such an attribute once a metric has MAX_SERIES sets of values, and of a model that does not exist."""
MAX_SERIES: Final = 512

ERROR_METRICS: Final = frozenset(
    {"gen_ai.client.inference.duration", "gen_ai.client.embeddings.duration", "gen_ai.server.request.duration"}
)
"""Metrics of model calls that also have `error.type`."""

OLDER_METRICS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "gen_ai.client.inference.duration": ("gen_ai.client.operation.duration", {}),
    "gen_ai.client.embeddings.duration": ("gen_ai.client.operation.duration", {}),
    "gen_ai.client.inference.time_to_first_chunk": ("gen_ai.client.operation.time_to_first_chunk", {}),
    "gen_ai.client.inference.time_per_output_chunk": ("gen_ai.client.operation.time_per_output_chunk", {}),
    "gen_ai.client.inference.operation.input_tokens": ("gen_ai.client.token.usage", {"gen_ai.token.type": "input"}),
    "gen_ai.client.inference.operation.output_tokens": ("gen_ai.client.token.usage", {"gen_ai.token.type": "output"}),
    "gen_ai.client.embeddings.operation.input_tokens": ("gen_ai.client.token.usage", {"gen_ai.token.type": "input"}),
}
"""Names of v1.41 for metrics that were renamed since, and the attributes that they had."""
NEWER_METRICS: Final = frozenset(
    {
        *OLDER_METRICS,
        *(name for name in (*HISTOGRAMS, *COUNTERS) if name.startswith("gen_ai.client.inference.usage")),
        "gen_ai.invoke_agent.duration",
        "gen_ai.invoke_agent.inference_calls",
        "gen_ai.invoke_agent.tool_calls",
        "gen_ai.execute_tool.duration",
    }
)
"""Metrics that v1.41 has not, at least not by these names."""
OLDER_ATTRIBUTES: Final[Mapping[str, str]] = {"gen_ai.retrieval.top_k": "gen_ai.request.top_k"}
"""Names of v1.41 for attributes that were renamed since."""
NEWER_ATTRIBUTES: Final = frozenset(
    {"gen_ai.request.reasoning.level", "gen_ai.request.previous_response.id", "gen_ai.conversation.compacted"}
)
"""Attributes that v1.41 has not."""
