"""Engine: one thread that plans, computes and tells; the event loop's side hands in requests and reads what they make.

The two share an inbox of streams to look at, a queue of news, and a few numbers that one side writes and the other
reads. A step's news reach the event loop in one call, whatever the number of sequences.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from apis.errors import ContextLengthExceeded, InvalidRequest, Overloaded, StackError, UpstreamError
from providers.inference.gpt_oss.engine.runner import Run, Runner
from providers.inference.gpt_oss.engine.sampling import Sampled
from providers.inference.gpt_oss.engine.scheduler import Scheduler, Step
from providers.inference.gpt_oss.engine.sequence import EngineRequest, Finish, TokenSequence

MAX_UNREAD_TOKENS: Final = 1024
"""A sequence whose reader is this far behind leaves its place until it has caught up."""
MAX_FAILURES: Final = 3
REFUSE_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`step_tokens` bounds a step; `max_waiting` the requests without a slot, `max_tenant_waiting` one tenant's."""

    step_tokens: int = 2048
    max_waiting: int = 512
    max_tenant_waiting: int = 256


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Tokens that are new, a stop token included. `logprobs` goes with `ids` where they were asked for, else is empty.

    `cached_tokens` of the prompt were not computed anew. `finish` is set once, in the last.
    """

    ids: Sequence[int]
    logprobs: Sequence[Sampled]
    finish: Finish | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Now: sequences and pages. Since the start: all else; `engine_s` is the steps' time outside of the runner."""

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
    """One request on its way out. The engine's thread writes `made`, `known` and `held`, the event loop all else."""

    def __init__(self, sequence: TokenSequence) -> None:
        self.sequence = sequence
        self.made = 0
        self.known = False
        self.held = False
        self.read = 0
        self.left = False
        self.error: StackError | None = None
        self._finish: Finish | None = None
        self._fresh: list[Sampled] = []
        self._waiter: asyncio.Future[None] | None = None

    def receive(self, fresh: Sequence[Sampled], finish: Finish | None, error: StackError | None) -> None:
        self._fresh += fresh
        self._finish = finish or self._finish
        self.error = error or self.error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> EngineStep:
        """All that came since the last time, as soon as there is something. Raises the error it ends with."""
        while not self._fresh and self._finish is None:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        fresh, self._fresh = self._fresh, []
        self.read += len(fresh)
        sequence = self.sequence
        logprobs = () if sequence.request.sampling.logprobs is None else fresh
        return EngineStep([each.token for each in fresh], logprobs, self._finish, sequence.cached or 0)


_News = list[tuple[_Stream, Sequence[Sampled], Finish | None, StackError | None]]


class Engine:
    """Runs requests over a runner from `start` to `close`, all on one event loop."""

    def __init__(self, runner: Runner, settings: EngineSettings) -> None:
        """Raises ConfigError when the settings do not fit the runner."""
        self._runner = runner
        self._settings = settings
        self._scheduler = Scheduler(runner, settings.step_tokens)
        self._inbox = SimpleQueue[_Stream | None]()
        self._news = deque[_News]()
        self._told = False
        self._thread: threading.Thread | None = None
        self._refuse_until = 0.0
        self._closing = False
        # The event loop's own:
        self._open: dict[_Stream, None] = {}
        self._tenants = Counter[str]()
        # The thread's own:
        self._streams: dict[TokenSequence, _Stream] = {}
        self._made: _News = []
        self._step: Step | None = None
        self._failures_in_a_row = 0
        self._failures = 0
        self._generated = 0
        self._runner_s = 0.0
        self._engine_s = 0.0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        # A daemon: a computation that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="gpt-oss engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Every stream fails at once; then the thread ends, after the step it is in. Safe when never started."""
        self._closing = True
        self._fail_open()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(None)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            logger.error("The engine's step did not end within %g s; its thread is left behind.", CLOSE_TIMEOUT_S)
        else:
            thread.join()

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineStep]:
        """Generate. Steps are never empty of both tokens and a finish; closing the generator stops the generation.

        Raises ContextLengthExceeded, InvalidRequest, Overloaded, or UpstreamError when the engine failed or stops.
        """
        stream = self._admit(request)
        self._open[stream] = None
        self._tenants[request.tenant] += 1
        self._inbox.put(stream)
        ended = False
        try:
            while not ended:
                step = await stream.next()
                ended = step.finish is not None
                if stream.held:
                    self._inbox.put(stream)
                yield step
        finally:
            del self._open[stream]
            self._tenants[request.tenant] -= 1
            if not self._tenants[request.tenant]:
                del self._tenants[request.tenant]
            if not ended:
                stream.left = True
                self._inbox.put(stream)

    def metrics(self) -> EngineMetrics:
        """May be called anywhere; the figures may be those of two neighbouring steps."""
        counts, scheduler = self._scheduler.counts, self._scheduler
        return EngineMetrics(
            running=scheduler.running,
            waiting=scheduler.waiting,
            pages=self._runner.page_count,
            pages_free=scheduler.pages_free,
            steps=counts.steps,
            rows=counts.rows,
            computed_tokens=counts.computed_tokens,
            generated_tokens=self._generated,
            hit_tokens=counts.hit_tokens,
            pauses=counts.pauses,
            failures=self._failures,
            runner_s=self._runner_s,
            engine_s=self._engine_s,
        )

    def _admit(self, request: EngineRequest) -> _Stream:
        if self._closing or self._thread is None:
            raise _stopped()
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
        if len(self._open) >= slots + settings.max_waiting:
            raise Overloaded("Too many requests are waiting for the engine. Try again shortly.", retry_after_s=1)
        if self._tenants[request.tenant] >= slots + settings.max_tenant_waiting:
            raise Overloaded("Too many of your requests are waiting for the engine.", retry_after_s=1)
        return _Stream(TokenSequence(request, limit))

    def _fail_open(self) -> None:
        for stream in self._open:
            stream.receive((), None, _stopped())

    def _end(self) -> None:
        """On the event loop, when the thread has ended."""
        self._fail_open()
        self._ended.set()

    def _deliver(self) -> None:
        """On the event loop. The flag falls first: news that come meanwhile are either seen here or told anew."""
        self._told = False
        while self._news:
            for stream, fresh, finish, error in self._news.popleft():
                stream.receive(fresh, finish, error)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = True
        while not self._closing:
            try:
                self._look(wait=idle)
                idle = not self._closing and not self._work()
            except Exception:
                logger.exception("A step of the engine failed.")
                self._recover()
                # With nobody left to try, a runner that fails at closing its slots must not be asked for ever.
                idle = not (self._scheduler.running or self._scheduler.waiting)
            self._tell()
        self._call(self._end)

    def _look(self, *, wait: bool) -> None:
        """Heed what the event loop put in; wait for it when there is nothing else to do."""
        while wait or not self._inbox.empty():
            stream = self._inbox.get()
            if stream is None:
                return
            wait = False
            self._heed(stream)

    def _heed(self, stream: _Stream) -> None:
        """A stream that is new, that was left, or whose reader has caught up."""
        sequence = stream.sequence
        if stream.left:
            self._forget(sequence)
        elif not stream.known:
            stream.known = True
            self._streams[sequence] = stream
            self._advance(stream, None)
            if sequence in self._streams and not stream.held:
                self._scheduler.add(sequence)
        elif stream.held and sequence in self._streams:
            stream.held = False
            self._scheduler.add(sequence)

    def _work(self) -> bool:
        """Plan, compute and take in one step; False when there is nothing to do."""
        began = time.perf_counter()
        self._step = step = self._scheduler.plan()
        for slot in self._scheduler.take_closed() if step is None else step.closed:
            self._runner.close(slot)
        if step is None:
            return False
        for sequence in step.opened:
            prompt, generated = sequence.tokens[: sequence.prompt_tokens], sequence.tokens[sequence.prompt_tokens :]
            self._runner.open(sequence.slot, sequence.request.sampling, prompt, generated)
        masks = {sequence.slot: sequence.mask for sequence in step.sequences if sequence.mask is not None}
        runner_began = time.perf_counter()
        sampled = self._runner.step(step.plan, masks)
        runner_s = time.perf_counter() - runner_began
        self._scheduler.absorb(step)
        for row, sequence in zip(step.plan.rows, step.sequences, strict=True):
            if row.samples:
                self._advance(self._streams[sequence], sampled[row.slot])
        self._step = None
        self._failures_in_a_row = 0
        self._runner_s += runner_s
        self._engine_s += time.perf_counter() - began - runner_s
        return True

    def _advance(self, stream: _Stream, sampled: Sampled | None) -> None:
        """Append the token, and what the grammar forces behind it; tell, and end or hold what is to."""
        sequence = stream.sequence
        try:
            fresh = sequence.take_forced() if sampled is None else _taken(sequence, sampled)
        except StackError as exc:
            self._fail(sequence, exc)
            return
        except BaseException:  # a panic of native code is no Exception, and a grammar's must cost its request alone
            logger.exception("A request's grammar failed.")
            self._fail(sequence, _failed())
            return
        stream.made += len(fresh)
        self._generated += len(fresh)
        if fresh or sequence.finish is not None:
            self._made.append((stream, fresh, sequence.finish, None))
        if sequence.finish is not None:
            self._forget(sequence)
        elif stream.made - stream.read > MAX_UNREAD_TOKENS:
            stream.held = True
            # The reader looks at `held` after it has read; if it did so a moment ago, nobody would wake this again.
            if stream.made - stream.read > MAX_UNREAD_TOKENS:
                self._scheduler.remove(sequence)
            else:
                stream.held = False

    def _recover(self) -> None:
        """Fail what the step was about, all there is when there was none, and have the rest computed anew."""
        step, self._step = self._step, None
        self._failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES:
            self._refuse_until = time.monotonic() + REFUSE_S
        self._scheduler.reset()
        for sequence in list(self._streams) if step is None else step.sequences:
            self._fail(sequence, _failed())

    def _fail(self, sequence: TokenSequence, error: StackError) -> None:
        if stream := self._streams.get(sequence):
            self._made.append((stream, (), None, error))
            self._forget(sequence)

    def _forget(self, sequence: TokenSequence) -> None:
        self._streams.pop(sequence, None)
        self._scheduler.remove(sequence)

    def _tell(self) -> None:
        if self._made:
            news, self._made = self._made, []
            self._news.append(news)
            if not self._told:
                self._told = True
                self._call(self._deliver)

    def _call(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            # The event loop is gone, and nobody closed the engine: there is nobody to work for.
            self._closing = True


def _taken(sequence: TokenSequence, sampled: Sampled) -> list[Sampled]:
    """The token, and those of a run behind it that still have their place before the sequence's end."""
    fresh = sequence.take(sampled)
    for each in sampled.more if isinstance(sampled, Run) else ():
        if sequence.finish is None:
            fresh += sequence.take(each)
    return fresh


def _failed() -> UpstreamError:
    return UpstreamError("The engine failed at this request. Try it again.")


def _stopped() -> UpstreamError:
    return UpstreamError("The engine is stopped.")
