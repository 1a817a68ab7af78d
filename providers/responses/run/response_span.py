"""ResponseSpan: the `invoke_agent` span of a response, within its request or in the background."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

from openai.types.responses import Response

from apis.telemetry import (
    CURRENT_AGENT,
    NO_SPAN,
    AgentCalls,
    AttributeValue,
    Span,
    SpanType,
    TraceHeaders,
    continued_trace,
    current_agent,
    error_type_of,
    telemetry,
)
from apis.wire.items import CompactionItem
from providers.responses.run.pending_response import PendingResponse

_AGENT_NAME_KEY: Final = "agent_name"
"""The key of a request's metadata whose value is the name of the agent in spans."""


class ResponseSpan:
    """The `invoke_agent` span of one response, while one worker runs it. Without telemetry its methods do nothing."""

    __slots__ = (
        "_before",
        "_calls",
        "_is_described",
        "_is_handed_over",
        "_span",
    )

    def __init__(self, pending: PendingResponse, links: Sequence[TraceHeaders] = (), attempt: int = 1) -> None:
        self._span: Span = NO_SPAN
        self._is_handed_over = self._is_described = False
        self._before = current_agent()
        if not telemetry().is_on:
            return
        request, loop = pending.request, pending.agent_loop
        name = (request.metadata or {}).get(_AGENT_NAME_KEY, "")
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.request.model": request.model,
            "gen_ai.response.id": pending.ids.response_id,
        }
        shared: dict[str, AttributeValue] = {}
        if name:
            attributes["gen_ai.agent.name"] = name
        if request.conversation_id is not None:
            attributes["gen_ai.conversation.id"] = shared["gen_ai.conversation.id"] = request.conversation_id
        if request.previous_response_id is not None:
            shared["gen_ai.request.previous_response.id"] = request.previous_response_id
        if any(isinstance(item, CompactionItem) for item in pending.conversation.items):
            shared["gen_ai.conversation.compacted"] = True
        if request.service_tier not in (None, "auto"):
            attributes["stack.request.service_tier"] = request.service_tier
        if attempt > 1:
            attributes["stack.run.attempt"] = attempt
        previous = {"traceparent": pending.previous_history.traceparent} if pending.previous_history.traceparent else {}
        attributes |= telemetry().describe_input(loop.chat)
        self._span = telemetry().open_span(SpanType.INVOKE_AGENT, name, attributes, links=[*links, previous])
        self._calls = AgentCalls(self._span.headers, shared)
        CURRENT_AGENT.set(self._calls)
        self._span.make_current()

    def describe(self, response: Response) -> None:
        """Record how the response ended."""
        self._is_described = True
        if self._span is NO_SPAN:
            return
        reason = response.incomplete_details.reason if response.incomplete_details else None
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.finish_reasons": [reason or response.status or ""],
            **telemetry().describe_output(response.output),
        }
        if response.service_tier is not None:
            attributes["stack.response.service_tier"] = response.service_tier
        if response.usage is not None:
            attributes["gen_ai.usage.input_tokens"] = response.usage.input_tokens
            attributes["gen_ai.usage.output_tokens"] = response.usage.output_tokens
        self._span.set(attributes)
        if response.status == "failed":
            self._span.fail(response.error.code if response.error is not None else "server_error")

    def fail(self, exc: BaseException) -> None:
        """Record the exception that ended the response, unless it had ended before."""
        if not (self._is_handed_over or self._is_described):
            self._span.fail(error_type_of(exc))

    def hand_over(self) -> None:
        """Record that another worker continues the response, which is no failure."""
        self._is_handed_over = True
        self._span.set({"stack.run.handed_over": True})

    def count_logged_events(self, count: int) -> None:
        """Count events that were written to the log."""
        telemetry().add("stack.responses.events_logged", count)

    def end(self) -> None:
        """End the span and record how many calls it took."""
        if self._span is NO_SPAN:
            return
        self._span.record(
            {
                "gen_ai.invoke_agent.inference_calls": self._calls.inference_calls,
                "gen_ai.invoke_agent.tool_calls": self._calls.tool_calls,
            }
        )
        self._span.end()
        CURRENT_AGENT.set(self._before)


@contextmanager
def background_span(pending: PendingResponse, creator: TraceHeaders, attempt: int) -> Generator[ResponseSpan]:
    """Open the span of a background response, linked to the request that created it, whose trace it is in."""
    span = ResponseSpan(pending, [creator], attempt)
    try:
        yield span
    except BaseException as exc:
        span.fail(exc)
        raise
    finally:
        span.end()


@contextmanager
def background_run(creator: TraceHeaders, queued_at_s: float | None) -> Generator[None]:
    """Work on a run whose lease this process holds, in the trace of the request that created it; `queued_at_s` is since
    when the run waited for a worker, None if it did not."""
    with continued_trace(creator):
        if queued_at_s is not None:
            telemetry().open_span(SpanType.QUEUE_WAIT, "", {}, started_at_s=queued_at_s).end()
        telemetry().add("stack.responses.leases", 1)
        try:
            yield
        finally:
            telemetry().add("stack.responses.leases", -1)


def count_resumed_run() -> None:
    """Count a run that this worker continues for another one."""
    telemetry().add("stack.responses.resumed", 1)
