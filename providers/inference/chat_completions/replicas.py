"""Several equal servers as one: load balancing, retries and circuit breakers."""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import RateLimited, StackError, UpstreamError
from providers.inference.chat_completions.answer_limits import AnswerTooLarge
from providers.inference.chat_completions.endpoint import ChatCompletions, ConnectTimeout
from providers.inference.chat_completions.errors import UpstreamUnavailable

RETRYABLE: Final = (UpstreamUnavailable, ConnectTimeout, RateLimited)
JITTER: Final = 0.25
BUDGET_RESERVE: Final = 100.0
BUDGET_REFILL_PER_S: Final = 10.0

Clock = Callable[[], float]
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


class CircuitBreaker:
    """Health of one server. Closed: all requests pass. Open: none. Half open: one probe, whose success closes it."""

    def __init__(self, failures: int, window_s: float, clock: Clock = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._failure_times: deque[float] = deque(maxlen=failures)
        self._opened_at: float | None = None
        self._is_probing = False

    def allows_request(self) -> bool:
        """Return true if a request may be sent now."""
        if self._opened_at is None:
            return True
        return not self._is_probing and self._clock() - self._opened_at >= self._window_s

    def begin_request(self) -> bool:
        """Begin an allowed request; return true if it is the probe, which `end_request` must receive."""
        self._is_probing = self._opened_at is not None
        return self._is_probing

    def record_success(self) -> None:
        """Close the breaker."""
        self._failure_times.clear()
        self._opened_at = None
        self._is_probing = False

    def record_failure(self) -> None:
        """Count a failure, and open the breaker after too many."""
        now = self._clock()
        self._failure_times.append(now)
        full = len(self._failure_times) == self._failure_times.maxlen
        if self._opened_at is not None or (full and now - self._failure_times[0] <= self._window_s):
            self._opened_at = now

    def end_request(self, *, is_probe: bool) -> None:
        """End a request, also one without a result."""
        if is_probe:
            self._is_probing = False


class Upstream:
    """One server and its health."""

    def __init__(self, endpoint: ChatCompletions, policy: ReplicaPolicy) -> None:
        self.endpoint = endpoint
        self.breaker = CircuitBreaker(policy.breaker_failures, policy.breaker_window_s)
        self.is_healthy = True

    async def check_health(self, timeout_s: float) -> None:
        """Request the list of models and record if the server responded."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.endpoint.models()
        except (StackError, TimeoutError):
            self.is_healthy = False
        else:
            self.is_healthy = True


class Upstreams:
    """Round robin over the healthy servers. A request is retried only before its first output."""

    def __init__(self, endpoints: Sequence[ChatCompletions], policy: ReplicaPolicy) -> None:
        self._upstreams = [Upstream(endpoint, policy) for endpoint in endpoints]
        self._policy = policy
        self._budget = RetryBudget(policy.budget)
        self._rotation = itertools.count()

    def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`."""
        return self._stream_with_retries(lambda endpoint: endpoint.chat(request))

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """See `Inference.embed`; all inputs in one request."""

        async def embed_once(endpoint: ChatCompletions) -> AsyncGenerator[Embeddings]:
            yield await endpoint.embed(request)

        async with aclosing(self._stream_with_retries(embed_once)) as results:
            return await anext(results)

    async def _stream_with_retries(
        self, open_stream: Callable[[ChatCompletions], AsyncGenerator[T]]
    ) -> AsyncGenerator[T]:
        """Yield the stream of one server, or of another one if that failed before its first output."""
        self._budget.deposit()
        tried: list[Upstream] = []
        while True:
            upstream = self._choose_upstream(tried)
            has_output = False
            is_probe = upstream.breaker.begin_request()
            try:
                async with aclosing(open_stream(upstream.endpoint)) as batches:
                    async for batch in batches:
                        if not has_output:
                            has_output = True
                            upstream.breaker.record_success()
                        yield batch
                return
            except StackError as exc:
                if isinstance(exc, UpstreamError) and not isinstance(exc, AnswerTooLarge):
                    upstream.breaker.record_failure()
                tried.append(upstream)
                delay_s = None if has_output else self._retry_delay_s(exc, tried)
                if delay_s is None:
                    raise
            finally:
                upstream.breaker.end_request(is_probe=is_probe)
            await asyncio.sleep(delay_s)

    async def query_any(self, query: Callable[[ChatCompletions], Awaitable[T]]) -> T:
        """Return the result of the first server that responds. Raises the error of the last one when all fail."""
        error: UpstreamError | None = None
        for upstream in self._rotate_upstreams():
            try:
                return await query(upstream.endpoint)
            except UpstreamError as exc:
                error = exc
        assert error is not None  # there is at least one upstream
        raise error

    async def watch_health(self, interval_s: float) -> None:
        """Check all servers at every interval, for as long as the stack runs."""
        while True:
            await asyncio.gather(*(upstream.check_health(interval_s) for upstream in self._upstreams))
            await asyncio.sleep(interval_s)

    def _rotate_upstreams(self) -> list[Upstream]:
        at = next(self._rotation) % len(self._upstreams)
        return self._upstreams[at:] + self._upstreams[:at]

    def _choose_upstream(self, tried_upstreams: Sequence[Upstream]) -> Upstream:
        """Return an allowed server, preferring those not yet tried, then those that passed their last health check."""
        allowed = [upstream for upstream in self._rotate_upstreams() if upstream.breaker.allows_request()]
        if not allowed:
            raise UpstreamError("The inference server failed too often just now. Try again in a few seconds.")
        return min(allowed, key=lambda upstream: (upstream in tried_upstreams, not upstream.is_healthy))

    def _retry_delay_s(self, error: StackError, tried_upstreams: Sequence[Upstream]) -> float | None:
        """Return the seconds to wait before the next attempt; None when there must be none."""
        policy = self._policy
        if not isinstance(error, RETRYABLE) or len(tried_upstreams) > policy.max_retries:
            return None
        if (error.retry_after_s or 0) > policy.max_retry_delay_s and len(set(tried_upstreams)) == len(self._upstreams):
            return None
        if not self._budget.withdraw():
            return None
        if any(upstream not in tried_upstreams and upstream.breaker.allows_request() for upstream in self._upstreams):
            return 0.0
        backoff_s = min(policy.retry_delay_s * 2 ** (len(tried_upstreams) - 1), policy.max_retry_delay_s)
        jittered_s = backoff_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads load, guards nothing
        return max(error.retry_after_s or 0.0, jittered_s)
