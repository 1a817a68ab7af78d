"""Several equal servers as one: affinity, load balancing, retries and circuit breakers."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from apis.chat import ChatRequest
from apis.completion import CompletionDelta, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import RateLimited, StackError, UpstreamError, UpstreamTimeout
from apis.inference import CALL_ATTEMPTS
from apis.observation.background import UpstreamHealth
from apis.sink import Sink
from apis.telemetry import REQUEST_ID
from apis.transcription import Transcript, TranscriptionRequest
from providers.inference.attempts import Attempt, CircuitBreaker, Clock
from providers.inference.chat_completions.affinity import ServersByKey, affinity_key
from providers.inference.chat_completions.answer_limits import AnswerTooLarge
from providers.inference.chat_completions.endpoint import ChatCompletions
from providers.inference.chat_completions.errors import ConnectTimeout, UpstreamUnavailable
from providers.inference.chat_completions.first_token import FirstToken

RETRYABLE: Final = (UpstreamUnavailable, ConnectTimeout, RateLimited)
TEMPORARY: Final = (UpstreamUnavailable, UpstreamTimeout)
"""Errors after which the same request may succeed in a while."""
MIN_RETRY_AFTER_S: Final = 1.0
JITTER: Final = 0.25
BUDGET_RESERVE: Final = 100.0
BUDGET_REFILL_PER_S: Final = 10.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """Retry and breaker settings. `budget` limits retries to that share of the requests, plus a few per second that are
    always allowed. A breaker opens after `breaker_failures` within `breaker_window_s`, and allows one probe after the
    same time again."""

    max_retries: int = 2
    retry_delay_s: float = 0.5
    max_retry_delay_s: float = 8
    budget: float = 0.1
    breaker_failures: int = 5
    breaker_window_s: float = 10


class RetryBudget:
    """Retry limit that keeps retries from doubling the load on failing servers."""

    def __init__(self, share: float, clock: Clock = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._balance = BUDGET_RESERVE
        self._refilled_at = clock()

    def deposit(self) -> None:
        """Count a new request."""
        self._balance += self._share

    def withdraw(self) -> bool:
        """Spend one retry; return false when none is available."""
        now = self._clock()
        self._balance = min(BUDGET_RESERVE, self._balance + (now - self._refilled_at) * BUDGET_REFILL_PER_S)
        self._refilled_at = now
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


class Upstream:
    """One server, its health and its requests in flight. `wakeup` is set by each failure, so that the server is checked
    at once. `has_recovered` says that it answered a check after its newest failure."""

    def __init__(self, endpoint: ChatCompletions, policy: ReplicaPolicy) -> None:
        self.endpoint = endpoint
        self.breaker = CircuitBreaker(policy.breaker_failures, policy.breaker_window_s)
        self.is_healthy = True
        self.has_recovered = False
        self.in_flight = 0
        self.wakeup = asyncio.Event()

    def record_failure(self) -> None:
        """Count a failed request."""
        self.breaker.record_failure()
        self.has_recovered = False
        self.wakeup.set()

    def record_health(self, *, is_healthy: bool) -> None:
        """Record the result of a check."""
        self.is_healthy = self.has_recovered = is_healthy

    def summarize(self) -> UpstreamHealth:
        """Return its health now, for operators."""
        is_blocked = not self.breaker.allows_request()
        return UpstreamHealth(self.endpoint.base_url, self.is_healthy, is_blocked, self.breaker.remaining_s())


class Upstreams:
    """Requests on the healthy servers. A chat with an affinity key goes to the first server of the key's order that is
    not busy beyond the others, and every other request to the next in turn. A chain that has moved stays where its
    prefix now is. A request is retried only before its first output."""

    def __init__(self, endpoints: Sequence[ChatCompletions], policy: ReplicaPolicy) -> None:
        self.upstreams = [Upstream(endpoint, policy) for endpoint in endpoints]
        self._policy = policy
        self._budget = RetryBudget(policy.budget)
        self._servers_by_key = ServersByKey([endpoint.base_url for endpoint in endpoints])
        self._rotation = itertools.count()

    def stream(self, request: ChatRequest, sink: Sink[Delta]) -> Coroutine[Any, Any, None]:
        """See `Inference.stream`."""
        return self._try(lambda endpoint, attempt: endpoint.stream(request, attempt.watch(sink)), request)

    def complete(self, request: CompletionRequest, sink: Sink[CompletionDelta | Usage]) -> Coroutine[Any, Any, None]:
        """See `ChatCompletions.complete`."""
        return self._try(lambda endpoint, attempt: endpoint.complete(request, attempt.watch(sink)))

    def transcribe(self, request: TranscriptionRequest, sink: Sink[str]) -> Coroutine[Any, Any, Transcript]:
        """See `Inference.transcribe`."""
        return self._try(lambda endpoint, attempt: endpoint.transcribe(request, attempt.watch(sink)))

    def embed(self, request: EmbeddingRequest) -> Coroutine[Any, Any, Embeddings]:
        """See `Inference.embed`; all inputs in one request."""
        return self._try(lambda endpoint, _: endpoint.embed(request))

    def score_chat(self, request: ChatRequest, scored_ids: Sequence[int]) -> Coroutine[Any, Any, FirstToken]:
        """See `ChatCompletions.score_chat`."""
        return self._try(lambda endpoint, _: endpoint.score_chat(request, scored_ids), request)

    def score_tokens(
        self, request: ChatRequest, token_ids: Sequence[int], scored_ids: Sequence[int]
    ) -> Coroutine[Any, Any, FirstToken]:
        """See `ChatCompletions.score_tokens`; the tokens are the prompt of the chat."""
        salt = request.cache_salt
        return self._try(lambda each, _: each.score_tokens(request.model, token_ids, salt, scored_ids), request)

    def decide(self, request: DecisionRequest, body: bytes) -> Coroutine[Any, Any, Decisions]:
        """See `ChatCompletions.decide`."""
        return self._try(lambda endpoint, _: endpoint.decide(request, body))

    async def _try(self, ask: Callable[[ChatCompletions, Attempt], Awaitable[T]], chat: ChatRequest | None = None) -> T:
        """Return the result of one server, the one that has the prefix of `chat`, or of another one if that failed
        before its output began."""
        key = affinity_key(chat) if chat is not None and len(self.upstreams) > 1 else None
        self._budget.deposit()
        tried: list[Upstream] = []
        while True:
            upstream = self._choose_upstream(tried, key)
            attempt = Attempt(upstream.breaker)
            upstream.in_flight += 1
            try:
                result = await ask(upstream.endpoint, attempt)
                attempt.begin_output()
                return result
            except StackError as exc:
                if exc.is_of_receiver:
                    raise
                if isinstance(exc, UpstreamError) and not isinstance(exc, AnswerTooLarge):
                    upstream.record_failure()
                tried.append(upstream)
                delay_s = None if attempt.has_output else self._retry_delay_s(exc, tried)
                _log_failure(upstream.endpoint.base_url, exc, is_repeated=delay_s is not None)
                if delay_s is None:
                    if not attempt.has_output and exc.retry_after_s is None and isinstance(exc, TEMPORARY):
                        exc.retry_after_s = max(self._breaker_wait_s(), MIN_RETRY_AFTER_S)
                    raise
                if (attempts := CALL_ATTEMPTS.get()) is not None:
                    attempts.has_failed = True
            finally:
                upstream.in_flight -= 1
                attempt.end()
            await asyncio.sleep(delay_s)

    async def query_any(self, query: Callable[[ChatCompletions], Awaitable[T]]) -> T:
        """Return the result of the first server that responds. Raises the error of the last one when all fail."""
        error: UpstreamError | None = None
        for upstream in self._rotate_upstreams():
            try:
                return await query(upstream.endpoint)
            except UpstreamError as exc:
                exc.add_note(upstream.endpoint.base_url)
                error = exc
        assert error is not None  # there is at least one upstream
        raise error

    def _rotate_upstreams(self) -> list[Upstream]:
        at = next(self._rotation) % len(self.upstreams)
        return self.upstreams[at:] + self.upstreams[:at]

    def _choose_upstream(self, tried_upstreams: Sequence[Upstream], key: str | None) -> Upstream:
        """Return an allowed server, preferring those not yet tried, then those that passed their last health check;
        among these the next in turn, or the first of the key's order whose load is within bounds. Where no breaker is
        closed, a server that answered a check since its newest failure is allowed."""
        if len(self.upstreams) == 1 and self.upstreams[0].breaker.allows_request():
            return self.upstreams[0]
        upstreams = self._rotate_upstreams()
        allowed = [upstream for upstream in upstreams if upstream.breaker.allows_request()]
        allowed = allowed or [upstream for upstream in upstreams if upstream.has_recovered]
        if not allowed:
            wait_s = max(self._breaker_wait_s(), MIN_RETRY_AFTER_S)
            error = UpstreamError(
                "The inference server failed too often just now. Try again in a few seconds.", retry_after_s=wait_s
            )
            _log_failure(" ".join(upstream.endpoint.base_url for upstream in upstreams), error, is_repeated=False)
            raise error
        order = [(upstream in tried_upstreams, not upstream.is_healthy) for upstream in allowed]
        best = [upstream for upstream, rank in zip(allowed, order, strict=True) if rank == min(order)]
        if key is None:
            return best[0]
        in_flight = {self.upstreams.index(upstream): upstream.in_flight for upstream in best}
        return self.upstreams[self._servers_by_key.choose(key, in_flight)]

    def _breaker_wait_s(self) -> float:
        """Return the seconds until the first breaker allows a request."""
        return min(upstream.breaker.remaining_s() for upstream in self.upstreams)

    def _retry_delay_s(self, error: StackError, tried_upstreams: Sequence[Upstream]) -> float | None:
        """Return the seconds to wait before the next attempt; None when there must be none."""
        policy = self._policy
        if not isinstance(error, RETRYABLE) or len(tried_upstreams) > policy.max_retries:
            return None
        if (error.retry_after_s or 0) > policy.max_retry_delay_s and len(set(tried_upstreams)) == len(self.upstreams):
            return None
        if not self._budget.withdraw():
            return None
        if any(upstream not in tried_upstreams and upstream.breaker.allows_request() for upstream in self.upstreams):
            return 0.0
        backoff_s = min(policy.retry_delay_s * 2 ** (len(tried_upstreams) - 1), policy.max_retry_delay_s)
        jittered_s = backoff_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads load, guards nothing
        return max(error.retry_after_s or 0.0, jittered_s)


def _log_failure(url: str, error: StackError, *, is_repeated: bool) -> None:
    """Log a failed attempt with the server's URL and its own words, which no client sees."""
    level = logging.WARNING if isinstance(error, UpstreamError | RateLimited) else logging.INFO
    outcome = "is tried again" if is_repeated else "failed"
    detail = " ".join([error.message, *getattr(error, "__notes__", ())])
    _log.log(level, "request %s %s at %s: %s", REQUEST_ID.get() or "-", outcome, url, detail)
