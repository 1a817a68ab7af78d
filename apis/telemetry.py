"""Telemetry of requests: the facts that reach every layer, and spans in the terms of OpenTelemetry's conventions.

While telemetry is off, which is the default, every span is `NO_SPAN` and every method here returns at once; nothing of
OpenTelemetry is imported. `stack.telemetry` installs a Telemetry that records. A span covers a turn of a model, a tool,
a write or a delivery, never a token.
"""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Final, Self

from openai.types.responses import ResponseOutputItem

from apis.chat import ChatRequest
from apis.errors import StackError

TraceHeaders = Mapping[str, str]
"""The W3C headers `traceparent` and `tracestate`, by name; empty without a valid parent."""
AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

NO_TRACE: Final[TraceHeaders] = MappingProxyType({})
TRACE_HEADERS: Final[ContextVar[TraceHeaders]] = ContextVar("trace", default=NO_TRACE)
"""The trace headers that requests to upstreams carry: those of the current span, or without telemetry those of the
client. The tenant is not here: it is passed as an argument."""

REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""The id of the HTTP request in progress, for lines of the log; empty outside of a request."""

CANCELLED: Final = "cancelled"
"""The `error.type` of an operation that its client, or the end of the process, cut off."""


class SpanType(Enum):
    """The operations that have spans. The names and the metrics of each are in `stack.telemetry.conventions`."""

    HTTP_REQUEST = "http request"
    WEBSOCKET_CREATE = "response.create"
    INVOKE_AGENT = "invoke_agent"
    CHAT = "chat"
    LOCAL_CHAT = "chat of an engine in this process"
    DECIDE = "decide"
    LOCAL_DECIDE = "decide of an engine in this process"
    EMBEDDINGS = "embeddings"
    LOCAL_EMBEDDINGS = "embeddings of an engine in this process"
    EXECUTE_TOOL = "execute_tool"
    MCP_REQUEST = "mcp request"
    RETRIEVAL = "retrieval"
    STORE = "store"
    WEBHOOK = "webhook"
    QUEUE_WAIT = "queue_wait"


class Span:
    """One operation in progress. This class records nothing; as a context manager a span is current within the block,
    and the exception that leaves the block is its error."""

    __slots__ = ()

    @property
    def headers(self) -> TraceHeaders:
        """The trace headers by which other processes continue the trace from this span; empty if it is not traced."""
        return NO_TRACE

    def set(self, attributes: Attributes) -> None:
        """Add attributes; a later value replaces an earlier one."""

    def rename(self, target: str) -> None:
        """Replace the target, which is the second part of the span's name."""

    def fail(self, error_type: str) -> None:
        """Mark the operation as failed. `error_type` is one of few values and never holds text of a client."""

    def record(self, values: Mapping[str, float | Sequence[float]]) -> None:
        """Record values of metrics, one or several of each, with those of the span's attributes that belong on
        metrics."""

    def make_current(self) -> None:
        """Let spans that are opened from now on in this context be children of this one, until it ends."""

    def end(self) -> None:
        """End the span; further calls have no effect. The span that was current before is current again."""

    def __enter__(self) -> Self:
        self.make_current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            self.fail(error_type_of(exc))
        self.end()


NO_SPAN: Final = Span()
CURRENT_SPAN: Final[ContextVar[Span]] = ContextVar("span", default=NO_SPAN)
"""The innermost open span; NO_SPAN while telemetry is off."""


@dataclass(slots=True)
class AgentCalls:
    """The model calls and tools that one response has begun. `call_attributes` are those that the spans of its model
    calls share."""

    headers: TraceHeaders
    call_attributes: Attributes
    inference_calls: int = 0
    tool_calls: int = 0


CURRENT_AGENT: Final[ContextVar[AgentCalls | None]] = ContextVar("agent", default=None)
"""The calls of the response in progress; None outside of a response, and while telemetry is off."""


class Telemetry:
    """Opens spans and counts. This class records nothing."""

    is_on: bool = False
    captures_content: bool = False
    """True if the operator wants texts of prompts, answers and tools in spans or events."""

    def open_span(
        self,
        span_type: SpanType,
        target: str,
        attributes: Attributes,
        *,
        parent: TraceHeaders | None = None,
        links: Sequence[TraceHeaders] = (),
        started_at_s: float | None = None,
    ) -> Span:
        """Return a new span, a child of the current one, or of the remote `parent`; an empty `parent` begins a trace.

        `links` are the headers of related spans, of which empty ones are skipped; `started_at_s` is in seconds since
        the epoch, by default now.
        """
        return NO_SPAN

    def add(self, metric: str, value: int, attributes: Attributes = MappingProxyType({})) -> None:
        """Add to a counter."""

    def adopt_trace(self, headers: TraceHeaders) -> None:
        """Let spans that are opened from now on in this context be children of a span of another process."""

    def describe_input(self, chat: ChatRequest) -> Attributes:
        """Return the prompt of a chat as attributes; empty unless content is captured."""
        return {}

    def describe_output(self, items: Sequence[ResponseOutputItem]) -> Attributes:
        """Return the output of a response as attributes; empty unless content is captured."""
        return {}

    def describe_tool(self, arguments: str, result: str | None) -> Attributes:
        """Return a tool call as attributes; empty unless content is captured."""
        return {}

    def describe_retrieval(self, queries: Sequence[str], documents: Sequence[tuple[str, float]]) -> Attributes:
        """Return a search and its hits, as ids and scores, as attributes; empty unless content is captured."""
        return {}


NO_TELEMETRY: Final = Telemetry()
_installed: Telemetry = NO_TELEMETRY


def install_telemetry(instance: Telemetry) -> None:
    """Let all spans of this process be opened by `instance`; NO_TELEMETRY switches telemetry off."""
    global _installed  # noqa: PLW0603 - one for the process, as the loggers are
    _installed = instance


def telemetry() -> Telemetry:
    """Return the process' telemetry."""
    return _installed


def open_span(span_type: SpanType, target: str, attributes: Attributes = MappingProxyType({})) -> Span:
    """Return a new child of the current span."""
    return _installed.open_span(span_type, target, attributes)


def current_span() -> Span:
    """Return the innermost open span of this context."""
    return CURRENT_SPAN.get()


def current_agent() -> AgentCalls | None:
    """Return the calls of the response that this context works for."""
    return CURRENT_AGENT.get()


def agent_traceparent() -> str:
    """Return the `traceparent` of the response that this context works for; empty where there is none."""
    agent = CURRENT_AGENT.get()
    return "" if agent is None else agent.headers.get("traceparent", "")


@contextmanager
def continued_trace(headers: TraceHeaders) -> Generator[None]:
    """Work on behalf of the request that had these trace headers, also with telemetry off: upstreams receive them."""
    token = TRACE_HEADERS.set(headers)
    span_token = CURRENT_SPAN.set(NO_SPAN)
    _installed.adopt_trace(headers)
    try:
        yield
    finally:
        _installed.adopt_trace(NO_TRACE)
        CURRENT_SPAN.reset(span_token)
        TRACE_HEADERS.reset(token)


def error_type_of(exc: BaseException) -> str:
    """Return the `error.type` of an exception: OpenAI's error code, else the name of its class."""
    if isinstance(exc, asyncio.CancelledError | GeneratorExit):
        return CANCELLED
    return (exc.code if isinstance(exc, StackError) else None) or type(exc).__name__
