"""Engine: one thread plans and computes steps; the event loop's side submits requests and receives their tokens.

The two share an inbox of streams to look at, a queue of deliveries, and a few numbers that one side writes and the
other reads. A step's deliveries reach the event loop in one call, however many sequences there are.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

from apis.errors import ContextLengthExceeded, InvalidRequest, Overloaded, StackError, UpstreamError
from apis.sink import Sink, Stream
from providers.inference.gpt_oss.engine.runner import Runner, SampledRun
from providers.inference.gpt_oss.engine.sampling import SampledToken
from providers.inference.gpt_oss.engine.scheduler import ScheduledStep, Scheduler
from providers.inference.gpt_oss.engine.sequence import EngineFinishReason, EngineRequest, TokenSequence

MAX_UNREAD_TOKENS: Final = 1024
"""Tokens a reader may lag; beyond that its sequence leaves its slot until the reader has caught up."""
MAX_FAILURES: Final = 3
REFUSE_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`step_tokens` bounds a step, `max_waiting` the requests without a slot, `max_tenant_waiting` one tenant's."""

    step_tokens: int = 2048
    max_waiting: int = 512
    max_tenant_waiting: int = 256


@dataclass(frozen=True, slots=True)
class EngineStep:
    """New tokens of a request, a stop token included.

    `logprobs` has an entry for each of `ids` if the request wants logprobs, else it is empty. `cached_tokens` of the
    prompt came from shared prefixes. `finish_reason` is set once, in the last step.
    """

    ids: Sequence[int]
    logprobs: Sequence[SampledToken]
    finish_reason: EngineFinishReason | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Current sequences and pages; all other fields count since the start. `engine_s` is the steps' time outside of the
    runner."""

    running: int
    waiting: int
    pages: int
    pages_free: int
    steps: int
    rows: int
    computed_tokens: int
    generated_tokens: int
    hit_tokens: int
    pauses: int
    failures: int
    runner_s: float
    engine_s: float


class _Stream:
    """One request on its way out, into `sink`. The engine's thread writes `generated_count`, `is_registered` and
    `is_throttled`, the event loop all other attributes."""

    def __init__(self, sequence: TokenSequence, sink: Sink[EngineStep]) -> None:
        self.sequence = sequence
        self.is_sink_ready = True
        self._sink = sink
        self._failure: BaseException | None = None
        self.generated_count = 0
        self.is_registered = False
        self.is_throttled = False
        self.read_count = 0
        self.was_abandoned = False
        self.error: StackError | None = None
        self._finish_reason: EngineFinishReason | None = None
        self._new_tokens: list[SampledToken] = []
        self._waiter: asyncio.Future[None] | None = None

    def receive(
        self, new_tokens: Sequence[SampledToken], finish_reason: EngineFinishReason | None, error: StackError | None
    ) -> bool:
        """Keep what the thread has delivered; write it at once if it is waited for, and return true if it was."""
        self._new_tokens += new_tokens
        self._finish_reason = finish_reason or self._finish_reason
        self.error = error or self.error
        if self._waiter is None or self._waiter.done():
            return False
        is_written = self._finish_reason is None and self.error is None and bool(self._new_tokens)
        if is_written:
            try:
                self.is_sink_ready = self._sink.write([self.take_step()])
            except BaseException as exc:  # noqa: BLE001 - raised where the stream is waited for
                self._failure = exc
        if not is_written or not self.is_sink_ready or self._failure is not None:
            self._waiter.set_result(None)
        return is_written

    async def wait_for_control(self) -> None:
        """Wait, while steps are written into the sink, until it is not ready, or the last step has come. Raises the
        error that ends the stream, and the sink's."""
        while self.is_sink_ready and not self._new_tokens and self._finish_reason is None:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._failure is not None:
                raise self._failure

    def take_step(self) -> EngineStep:
        """Return all tokens since the last call."""
        new_tokens, self._new_tokens = self._new_tokens, []
        self.read_count += len(new_tokens)
        sequence = self.sequence
        logprobs = () if sequence.request.sampling.logprobs is None else new_tokens
        return EngineStep(
            [token.token for token in new_tokens], logprobs, self._finish_reason, sequence.cached_tokens or 0
        )


_DeliveryBatch = list[tuple[_Stream, Sequence[SampledToken], EngineFinishReason | None, StackError | None]]


class Engine:
    """Runs requests over a runner from `start` to `close`, all on one event loop."""

    def __init__(self, runner: Runner, settings: EngineSettings) -> None:
        """Raises ConfigError when the settings do not fit the runner."""
        self._runner = runner
        self._settings = settings
        self._scheduler = Scheduler(runner, settings.step_tokens)
        self._inbox = SimpleQueue[_Stream | None]()
        self._delivery_batches = deque[_DeliveryBatch]()
        self._delivery_scheduled = False
        self._thread: threading.Thread | None = None
        self._refuse_until = 0.0
        self._is_closing = False
        # Used by the event loop alone:
        self._open_streams: dict[_Stream, None] = {}
        self._tenant_stream_counts = Counter[str]()
        # Used by the thread alone:
        self._streams: dict[TokenSequence, _Stream] = {}
        self._pending_deliveries: _DeliveryBatch = []
        self._current_step: ScheduledStep | None = None
        self._consecutive_failures = 0
        self._failure_count = 0
        self._generated_tokens = 0
        self._runner_s = 0.0
        self._engine_s = 0.0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_ended = asyncio.Event()
        # A daemon: a computation that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run_thread, name="gpt-oss engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Fail every stream at once and end the thread after the step it is in. Safe when never started."""
        self._is_closing = True
        self._fail_open_streams()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(None)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._thread_ended.wait()
        except TimeoutError:
            logger.error("The engine's step did not end within %g s; its thread still runs.", CLOSE_TIMEOUT_S)
        else:
            await asyncio.to_thread(thread.join)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineStep]:
        """Yield the steps of `stream`; closing the generator stops the generation."""
        async with aclosing(Stream(partial(self.stream, request))) as batches:
            async for (step,) in batches:
                yield step

    async def stream(self, request: EngineRequest, sink: Sink[EngineStep]) -> None:
        """Generate into `sink`, one step at a time: each has tokens or a finish reason. Cancelling it stops the
        generation.

        Raises ContextLengthExceeded, InvalidRequest, Overloaded, UpstreamError when the engine failed or stops, and the
        errors of the sink.
        """
        stream = self._admit(request, sink)
        self._open_streams[stream] = None
        self._tenant_stream_counts[request.tenant] += 1
        self._inbox.put(stream)
        ended = False
        try:
            while not ended:
                await stream.wait_for_control()
                if not stream.is_sink_ready:
                    await sink.ready()
                    stream.is_sink_ready = True
                    continue
                step = stream.take_step()
                ended = step.finish_reason is not None
                if stream.is_throttled:
                    self._inbox.put(stream)
                await sink.put([step])
        finally:
            del self._open_streams[stream]
            self._tenant_stream_counts[request.tenant] -= 1
            if not self._tenant_stream_counts[request.tenant]:
                del self._tenant_stream_counts[request.tenant]
            if not ended:
                stream.was_abandoned = True
                self._inbox.put(stream)

    def metrics(self) -> EngineMetrics:
        """Return the current figures. May be called on any thread; they may be those of two neighbouring steps."""
        counts, scheduler = self._scheduler.counts, self._scheduler
        return EngineMetrics(
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            pages=self._runner.page_count,
            pages_free=scheduler.pages_free,
            steps=counts.steps,
            rows=counts.rows,
            computed_tokens=counts.computed_tokens,
            generated_tokens=self._generated_tokens,
            hit_tokens=counts.hit_tokens,
            pauses=counts.pauses,
            failures=self._failure_count,
            runner_s=self._runner_s,
            engine_s=self._engine_s,
        )

    def _admit(self, request: EngineRequest, sink: Sink[EngineStep]) -> _Stream:
        if self._is_closing or self._thread is None:
            raise _engine_stopped_error()
        wait_s = self._refuse_until - time.monotonic()
        if wait_s > 0:
            raise UpstreamError("The engine keeps failing. Try again later.", retry_after_s=round(wait_s) or 1)
        if not request.ids:
            raise InvalidRequest("The prompt is empty.", param="messages")
        limit = self._scheduler.limit
        if len(request.ids) >= limit:
            raise ContextLengthExceeded(
                f"The prompt has {len(request.ids)} tokens; with room for an answer at most {limit - 1} fit.",
                param="messages",
            )
        settings, slots = self._settings, self._runner.slots
        if len(self._open_streams) >= slots + settings.max_waiting:
            raise Overloaded("Too many requests are waiting for the engine. Try again shortly.", retry_after_s=1)
        if self._tenant_stream_counts[request.tenant] >= slots + settings.max_tenant_waiting:
            raise Overloaded("Too many of your requests are waiting for the engine.", retry_after_s=1)
        return _Stream(TokenSequence(request, limit), sink)

    def _fail_open_streams(self) -> None:
        for stream in self._open_streams:
            stream.receive((), None, _engine_stopped_error())

    def _on_thread_end(self) -> None:
        """Runs on the event loop when the thread has ended."""
        self._fail_open_streams()
        self._thread_ended.set()

    def _deliver(self) -> None:
        """Runs on the event loop. The flag is cleared first: a batch appended meanwhile is either seen here or
        scheduled again."""
        self._delivery_scheduled = False
        while self._delivery_batches:
            for stream, new_tokens, finish, error in self._delivery_batches.popleft():
                if stream.receive(new_tokens, finish, error) and stream.is_throttled:
                    self._inbox.put(stream)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        idle = True
        while not self._is_closing:
            try:
                self._drain_inbox(wait=idle)
                idle = not self._is_closing and not self._run_step()
            except Exception:
                logger.exception("A step of the engine failed.")
                self._recover()
                # Without a sequence to try, a runner that fails at closing its slots must not be called for ever.
                idle = not (self._scheduler.running_count or self._scheduler.waiting_count)
            self._schedule_delivery()
        self._call_on_loop(self._on_thread_end)

    def _drain_inbox(self, *, wait: bool) -> None:
        """Handle all streams in the inbox; wait for one when there is nothing else to do."""
        while wait or not self._inbox.empty():
            stream = self._inbox.get()
            if stream is None:
                return
            wait = False
            self._handle_stream(stream)

    def _handle_stream(self, stream: _Stream) -> None:
        """Register a new stream, remove an abandoned one, or resume one whose reader has caught up."""
        sequence = stream.sequence
        if stream.was_abandoned:
            self._remove_sequence(sequence)
        elif not stream.is_registered:
            stream.is_registered = True
            self._streams[sequence] = stream
            self._advance_stream(stream, None)
            if sequence in self._streams and not stream.is_throttled:
                self._scheduler.add(sequence)
        elif stream.is_throttled and sequence in self._streams:
            stream.is_throttled = False
            self._scheduler.add(sequence)

    def _run_step(self) -> bool:
        """Plan and compute one step and deliver its tokens; return False when there is nothing to do."""
        began = time.perf_counter()
        self._current_step = step = self._scheduler.plan()
        for slot in self._scheduler.take_closed_slots() if step is None else step.closed_slots:
            self._runner.close(slot)
        if step is None:
            return False
        for sequence in step.opened_sequences:
            prompt, generated = sequence.tokens[: sequence.prompt_tokens], sequence.tokens[sequence.prompt_tokens :]
            self._runner.open(sequence.slot, sequence.request.sampling, prompt, generated)
        masks = {sequence.slot: sequence.mask for sequence in step.sequences if sequence.mask is not None}
        runner_began = time.perf_counter()
        sampled = self._runner.step(step.plan, masks)
        runner_s = time.perf_counter() - runner_began
        self._scheduler.complete_step(step)
        for row, sequence in zip(step.plan.rows, step.sequences, strict=True):
            if row.needs_sample:
                self._advance_stream(self._streams[sequence], sampled[row.slot])
        self._current_step = None
        self._consecutive_failures = 0
        self._runner_s += runner_s
        self._engine_s += time.perf_counter() - began - runner_s
        return True

    def _advance_stream(self, stream: _Stream, sampled_token: SampledToken | None) -> None:
        """Append the token and those the grammar forces after it; deliver them; end or throttle the stream if due."""
        sequence = stream.sequence
        try:
            new_tokens = sequence.append_forced() if sampled_token is None else _append_sampled(sequence, sampled_token)
        except StackError as exc:
            self._fail_sequence(sequence, exc)
            return
        except BaseException:  # a panic of native code is no Exception, and a grammar's must cost its request alone
            logger.exception("A request's grammar failed.")
            self._fail_sequence(sequence, _engine_failed_error())
            return
        stream.generated_count += len(new_tokens)
        self._generated_tokens += len(new_tokens)
        if new_tokens or sequence.finish_reason is not None:
            self._pending_deliveries.append((stream, new_tokens, sequence.finish_reason, None))
        if sequence.finish_reason is not None:
            self._remove_sequence(sequence)
        elif stream.generated_count - stream.read_count > MAX_UNREAD_TOKENS:
            stream.is_throttled = True
            # The reader checks `is_throttled` after it has read; if it did so a moment ago, this would never wake.
            if stream.generated_count - stream.read_count > MAX_UNREAD_TOKENS:
                self._scheduler.remove(sequence)
            else:
                stream.is_throttled = False

    def _recover(self) -> None:
        """Fail the step's sequences, or all when no step was running, and have the rest computed again."""
        step, self._current_step = self._current_step, None
        self._failure_count += 1
        self._consecutive_failures += 1
        if self._consecutive_failures >= MAX_FAILURES:
            self._refuse_until = time.monotonic() + REFUSE_S
        self._scheduler.reset()
        for sequence in list(self._streams) if step is None else step.sequences:
            self._fail_sequence(sequence, _engine_failed_error())

    def _fail_sequence(self, sequence: TokenSequence, error: StackError) -> None:
        if stream := self._streams.get(sequence):
            self._pending_deliveries.append((stream, (), None, error))
            self._remove_sequence(sequence)

    def _remove_sequence(self, sequence: TokenSequence) -> None:
        self._streams.pop(sequence, None)
        self._scheduler.remove(sequence)

    def _schedule_delivery(self) -> None:
        if self._pending_deliveries:
            batch, self._pending_deliveries = self._pending_deliveries, []
            self._delivery_batches.append(batch)
            if not self._delivery_scheduled:
                self._delivery_scheduled = True
                self._call_on_loop(self._deliver)

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The event loop ended without closing the engine: no reader remains.
            self._is_closing = True


def _append_sampled(sequence: TokenSequence, sampled_token: SampledToken) -> list[SampledToken]:
    """Append the token, and those of a SampledRun that still fit before the sequence's end; return all of them."""
    new_tokens = sequence.append_sampled(sampled_token)
    for following_token in sampled_token.following_tokens if isinstance(sampled_token, SampledRun) else ():
        if sequence.finish_reason is None:
            new_tokens += sequence.append_sampled(following_token)
    return new_tokens


def _engine_failed_error() -> UpstreamError:
    return UpstreamError("The engine failed at this request. Try it again.")


def _engine_stopped_error() -> UpstreamError:
    return UpstreamError("The engine is stopped.")
