"""ObservedInference: the stack's inference, with telemetry of each model call, decision and embedding.

Telemetry wraps the one Inference of the stack instead of each provider: turns, compactions, summaries and the chat
completions of clients all pass here, and without telemetry nothing is wrapped.
"""

import time
from typing import Any, Final

from apis.chat import ChatRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, DeltaBatch, Finish, Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.inference import Inference, ModelHost
from apis.moderation import OutputBlocked
from apis.sink import ConvertedSink, Sink
from apis.telemetry import Attributes, AttributeValue, Span, SpanType, current_agent, error_type_of
from providers.common.wrapped_inference import WrappedInference
from stack.telemetry import messages
from stack.telemetry.recorder import SpanRecorder

_CHUNKS_PER_SAMPLE: Final = 32
"""One chunk in so many is timed: the SDK takes 4 to 8 us to record one, a quarter of what a streamed token costs."""


class _ChunkSampling:
    """Goes round through the chunks of all calls, so that short answers are in the sample as often as long ones."""

    offset = 0
    """Chunks since the last one that was timed."""


class ObservedInference(WrappedInference):
    """Forwards every call to `inference`. The span of a call is current while the provider sends its request."""

    def __init__(self, inference: Inference, recorder: SpanRecorder) -> None:
        super().__init__(inference)
        self._recorder = recorder
        self._sampling = _ChunkSampling()

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        host = await self._inference.model_host(request.model)
        call = _ModelCall(self._recorder, host, request, self._sampling)
        call.span.make_current()
        try:
            await self._inference.stream(request, ConvertedSink(sink, call.observe))
        except BaseException as exc:
            call.hides_output = isinstance(exc, OutputBlocked)
            if call.finish is None:
                call.span.fail(error_type_of(exc))
            raise
        finally:
            call.end()

    async def decide(self, request: DecisionRequest) -> Decisions:
        host = await self._inference.model_host(request.model)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "decide",
            "gen_ai.provider.name": host.provider_name,
            "gen_ai.request.model": request.model,
            "stack.decision.questions": len(request.questions),
        }
        span_type = SpanType.DECIDE if host.is_remote else SpanType.LOCAL_DECIDE
        with self._recorder.open_span(span_type, request.model, attributes) as span:
            decisions = await self._inference.decide(request)
            span.set(_usage_attributes(decisions.usage))
            if decisions.option_mass is not None:
                span.set({"stack.decision.option_mass": decisions.option_mass})
        return decisions

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        host = await self._inference.model_host(request.model)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": host.provider_name,
            "gen_ai.request.model": request.model,
        }
        if request.encoding_format is not None:
            attributes["gen_ai.request.encoding_formats"] = [request.encoding_format]
        span_type = SpanType.EMBEDDINGS if host.is_remote else SpanType.LOCAL_EMBEDDINGS
        with self._recorder.open_span(span_type, request.model, attributes) as span:
            embeddings = await self._inference.embed(request, tenant=tenant)
            span.set(
                {
                    "gen_ai.usage.input_tokens": embeddings.input_tokens,
                    "gen_ai.embeddings.dimension.count": len(embeddings.vectors[0]),
                }
            )
            span.record({"gen_ai.client.embeddings.operation.input_tokens": embeddings.input_tokens})
        return embeddings


class _ModelCall:
    """One call of a chat model. `batches` collects the deltas where content is captured, and is None otherwise."""

    def __init__(self, recorder: SpanRecorder, host: ModelHost, request: ChatRequest, sampling: _ChunkSampling) -> None:
        self._recorder = recorder
        self._host = host
        self._request = request
        self._attributes: dict[str, AttributeValue] = _request_attributes(request, host)
        if (agent := current_agent()) is not None:
            agent.inference_calls += 1
            self._attributes |= agent.call_attributes
        span_type = SpanType.CHAT if host.is_remote else SpanType.LOCAL_CHAT
        self.span: Span = recorder.open_span(span_type, request.model, self._attributes)
        self.batches: list[DeltaBatch] | None = [] if recorder.captures_content else None
        self.batch_count = 0
        self.finish: Finish | None = None
        self.hides_output = False
        """True of output that was blocked: no telemetry holds it."""
        self.first_batch_at = self._started_at = time.perf_counter()
        self._sampling = sampling
        # the first chunk ends no gap; the one before a timed chunk is where its gap begins
        self._chunks_left = _CHUNKS_PER_SAMPLE - sampling.offset + 1
        self._gap_began_at = 0.0
        self._gaps_s: list[float] = []

    def observe(self, batch: DeltaBatch) -> DeltaBatch:
        """Count a batch, time it if it is in the sample, collect it where content is captured, and return it."""
        if not self.batch_count:
            self.first_batch_at = time.perf_counter()
        self.batch_count += 1
        self._chunks_left -= 1
        if self._chunks_left <= 1:
            now = time.perf_counter()
            if not self._chunks_left:
                self._gaps_s.append(now - self._gap_began_at)
                self._chunks_left = _CHUNKS_PER_SAMPLE
            self._gap_began_at = now
        if self.batches is not None:
            self.batches.append(batch)
        if isinstance(last := batch[-1], Finish):
            self.finish = last
        return batch

    def end(self) -> None:
        """Record the result and end the span."""
        finish = self.finish
        now = time.perf_counter()
        result: dict[str, AttributeValue] = {}
        if self.batch_count:
            result["gen_ai.response.time_to_first_chunk"] = self.first_batch_at - self._started_at
        if finish is not None:
            result |= {"gen_ai.response.finish_reasons": [finish.reason], **_usage_attributes(finish.usage)}
            if not self._host.is_remote:
                result["gen_ai.response.model"] = self._request.model
        self.span.set(result)
        self.span.record(self._measure(finish, now))
        if self._gaps_s:
            self.span.record({"gen_ai.client.inference.time_per_output_chunk": self._gaps_s})
        if self.batch_count:
            self._sampling.offset = (_CHUNKS_PER_SAMPLE - self._chunks_left) % _CHUNKS_PER_SAMPLE
        if self.batches is not None:
            batches = [] if self.hides_output else self.batches
            content = messages.input_content(self._request) | messages.output_content(batches)
            if self._recorder.switches.content_in_spans:
                self.span.set(messages.to_json(content))
            self._recorder.emit_details({**self._attributes, **result}, content)
        self.span.end()

    def _measure(self, finish: Finish | None, now: float) -> dict[str, float]:
        """Return the values of the call's metrics but its duration."""
        values: dict[str, float] = {}
        first_s, rest_s = self.first_batch_at - self._started_at, now - self.first_batch_at
        if self.batch_count:
            values["gen_ai.client.inference.time_to_first_chunk"] = first_s
        if not self._host.is_remote:
            values["gen_ai.server.request.duration"] = now - self._started_at
            if self.batch_count and finish is not None:
                values["gen_ai.server.time_to_first_token"] = first_s
            if finish is not None and finish.usage.output_tokens > 1:
                values["gen_ai.server.time_per_output_token"] = rest_s / (finish.usage.output_tokens - 1)
        if finish is not None:
            usage = finish.usage
            values["gen_ai.client.inference.operation.input_tokens"] = usage.input_tokens
            values["gen_ai.client.inference.operation.output_tokens"] = usage.output_tokens
            counts = {
                "input_tokens": usage.input_tokens,
                "output_tokens": usage.output_tokens,
                "cache_read.input_tokens": usage.cached_tokens,
                "reasoning.output_tokens": usage.reasoning_tokens,
            }
            values |= {f"gen_ai.client.inference.usage.{name}": count for name, count in counts.items() if count}
        return values


def _request_attributes(request: ChatRequest, host: ModelHost) -> dict[str, AttributeValue]:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    values: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": host.provider_name,
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.max_tokens": request.max_completion_tokens,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.presence_penalty": request.presence_penalty,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.stop_sequences": stop or None,
        "gen_ai.request.reasoning.level": request.reasoning_effort,
    }
    if request.response_format is not None:
        values["gen_ai.output.type"] = "text" if request.response_format.type == "text" else "json"
    if host.provider_name == "openai":
        values["openai.api.type"] = "chat_completions"
    return {name: value for name, value in values.items() if value is not None}


def _usage_attributes(usage: Usage) -> Attributes:
    counts = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    if usage.cached_tokens:
        counts["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if usage.reasoning_tokens:
        counts["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return counts
