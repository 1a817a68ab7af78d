"""The models of one stack: loaded when they are needed, unloaded when others need their memory, one child process each.

A request first takes a place of its model (`parallel` of them, in turn by tenant), then waits until it is loaded.
Loading is one at a time, again in turn by tenant. To make room, idle models are unloaded first, the least recently used
before others; if that is not enough, models in use take no further requests until those in progress have ended. So no
request is ever cut off for another model, and no model keeps others waiting for longer than its requests run.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from apis.errors import ConfigError, ModelNotFound, UpstreamError
from apis.fair_share import FairShare, Place
from apis.inference import Model
from providers.common.net.http.client import HttpClient
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.reasoning_tags import ReasoningTags
from providers.inference.chat_completions.refusals import ChatForms
from providers.inference.llama_cpp.client import MAX_CONSTRAINT_VERDICTS, EngineClient
from providers.inference.llama_cpp.drafts import DraftCounts, LlamaCppMetrics
from providers.inference.llama_cpp.engine import LlamaCppEngine, LlamaCppSettings

RETRY_FAILED_AFTER_S: Final = 10.0
"""Seconds for which a model that could not be loaded is not tried again: each attempt may cost a minute."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`memory_bytes` is what all loaded models may take together. `min_loaded_s` is how long a model that is in use
    stays before it makes room for another one."""

    memory_bytes: int
    min_loaded_s: float
    start_timeout_s: float
    token_timeout_s: float


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model of the pool: how it is loaded, the memory it takes, and the places for its requests.
    `reasoning_tags` are those that the engine does not know by the model's template."""

    settings: LlamaCppSettings
    needed_bytes: int
    model: Model
    places: FairShare
    reasoning_tags: ReasoningTags | None = None
    engine: LlamaCppEngine | None = None
    users: int = 0
    is_draining: bool = False
    last_use: int = 0
    loaded_at: float = 0.0
    failure: str = ""
    failed_at: float = 0.0
    verdicts: RecentEntries[bytes, bool] = field(default_factory=lambda: RecentEntries(MAX_CONSTRAINT_VERDICTS))
    forms: ChatForms = field(default_factory=ChatForms)
    draft_counts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def is_running(self) -> bool:
        """True while an engine of the model serves."""
        return self.engine is not None and self.engine.is_running

    @property
    def is_ready(self) -> bool:
        """True if a request may start: the model is loaded and is not about to be unloaded."""
        return self.engine is not None and not self.is_draining


class ModelPool:
    """Models by id. `start` loads the first one, `use` whichever is needed; `close` ends all."""

    def __init__(self, models: Sequence[PooledModel], limits: PoolLimits, *, several_tenants: bool) -> None:
        self._models = {pooled.model.id: pooled for pooled in models}
        self._limits = limits
        self._turns = FairShare("requests that wait for a model", 1, several_tenants=several_tenants)
        self._http: HttpClient | None = None
        self._loading: asyncio.Task[None] | None = None
        self._change = asyncio.Event()
        self._uses = 0

    async def start(self) -> None:
        """Load the first model. Raises ConfigError if it is the only one and cannot be loaded; where there are others,
        the failure is logged and they are served."""
        # The engine closes connections at any time, and a new one on this machine costs nothing.
        self._http = HttpClient(idle_s=0)
        first = next(iter(self._models.values()))
        try:
            await self._load(first)
        except UpstreamError as exc:
            if len(self._models) == 1:
                await self.close()
                raise ConfigError(exc.message) from exc
            _log.error("%s The other models are served.", exc.message)

    async def close(self) -> None:
        """End all engines and every stream in progress."""
        http, self._http = self._http, None
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if http is not None:
            await http.close()
        await asyncio.gather(*(self._unload(pooled) for pooled in self._models.values()))

    def add(self, pooled: PooledModel, free_bytes: int) -> None:
        """Serve one model more. `free_bytes` are those that further models may take now: a pool that had one model and
        no limit gets one."""
        loaded_bytes = sum(each.needed_bytes for each in self._models.values() if each.engine is not None)
        self._limits = replace(self._limits, memory_bytes=min(self._limits.memory_bytes, free_bytes + loaded_bytes))
        self._models[pooled.model.id] = pooled

    def models(self) -> list[Model]:
        """Return all models, loaded or not. Raises UpstreamError while every loaded one is down."""
        loaded = [pooled.engine for pooled in self._models.values() if pooled.engine is not None]
        if loaded and all(not engine.is_running for engine in loaded):
            loaded[0].address()
        return [pooled.model for pooled in self._models.values()]

    def metrics(self) -> LlamaCppMetrics:
        """Return the figures of all models."""
        models = self._models.values()
        return LlamaCppMetrics(
            models_loaded=sum(pooled.is_running for pooled in models),
            requests_running=sum(pooled.users for pooled in models),
            drafted_tokens=sum(pooled.draft_counts.drafted for pooled in models),
            accepted_draft_tokens=sum(pooled.draft_counts.accepted for pooled in models),
        )

    @contextlib.asynccontextmanager
    async def use(self, model: str, tenant: str, *, generates: bool = True) -> AsyncGenerator[EngineClient]:
        """Load the model if need be and lend a client of it; the model stays loaded until the block ends.

        `generates` takes one of the model's places, for which tenants take turns. Raises ModelNotFound, and
        UpstreamError if the model cannot be loaded or its engine is being started again.
        """
        pooled = self._models.get(model)
        if pooled is None:
            raise ModelNotFound(model, self._models)
        with contextlib.ExitStack() as place:
            if generates:
                place.enter_context(await pooled.places.acquire(tenant))
            # A request that generates nothing is short, and may belong to a response that is in progress.
            if pooled.is_ready or (pooled.engine is not None and not generates):
                pooled.users += 1
            else:
                await self._wait_until_loaded(pooled, tenant)
            try:
                yield self._client(pooled)
            finally:
                pooled.users -= 1
                self._uses += 1
                pooled.last_use = self._uses
                if pooled.settings.drafts is not None and pooled.is_running:
                    pooled.draft_counts.read_soon(self._client(pooled))
                self._change.set()

    async def _wait_until_loaded(self, pooled: PooledModel, tenant: str) -> None:
        """Count the caller among the model's users, once the model is loaded."""
        turn = await self._turns.acquire(tenant)
        try:
            if not pooled.is_ready:
                # The caller may leave at any time; the load goes on, or one that takes longer than clients wait would
                # never end.
                self._loading = asyncio.create_task(self._load(pooled))
                await asyncio.shield(self._loading)
            pooled.users += 1
        finally:
            self._end_turn(turn)

    def _end_turn(self, turn: Place) -> None:
        loading = self._loading
        if loading is None or loading.done():
            turn.release()
        else:
            loading.add_done_callback(lambda task: (task.cancelled() or task.exception(), turn.release()))

    async def _load(self, pooled: PooledModel) -> None:
        """Make room and load the model. Raises UpstreamError, for a while also without another attempt."""
        now = asyncio.get_running_loop().time
        if self._http is None:
            raise UpstreamError("The local engine was stopped.")
        if pooled.failure and now() - pooled.failed_at < RETRY_FAILED_AFTER_S:
            raise UpstreamError(pooled.failure)
        try:
            await self._make_room(pooled)
        finally:
            for other in self._models.values():
                other.is_draining = False
        try:
            await self._start_engine(pooled)
        except ConfigError as exc:
            await self._unload(pooled)
            pooled.failure, pooled.failed_at = str(exc), now()
            raise UpstreamError(pooled.failure) from exc
        self._uses += 1
        pooled.last_use, pooled.loaded_at, pooled.failure = self._uses, now(), ""

    async def _start_engine(self, pooled: PooledModel) -> None:
        engine = LlamaCppEngine(pooled.settings, self._limits.start_timeout_s)
        await engine.start()
        pooled.engine = engine
        try:
            client = self._client(pooled)
            context_tokens = await client.context_tokens()
            if pooled.settings.drafts is not None and not await client.is_drafting():
                raise ConfigError(
                    f"draft_model: the engine does not speculate with it for the model {pooled.model.id}; a model that "
                    "drafts must have the same vocabulary. Take a smaller one of the same family, or `ngram`."
                )
        except UpstreamError as exc:
            raise ConfigError(f"The local engine ended right after it had started: {exc.message}") from exc
        pooled.model = replace(pooled.model, context_tokens=context_tokens)

    async def _make_room(self, pooled: PooledModel) -> None:
        """Unload other models until the model fits, waiting for those that are in use.

        The wait has a limit: a response that uses two models at once would otherwise wait for itself.
        """
        try:
            async with asyncio.timeout(self._limits.token_timeout_s):
                await self._unload_others(pooled)
        except TimeoutError as exc:
            limit = f"token_timeout_s ({self._limits.token_timeout_s:g} s)"
            raise UpstreamError(
                f"There was no memory for the model {pooled.model.id} within {limit}: others are in use."
            ) from exc

    async def _unload_others(self, pooled: PooledModel) -> None:
        loop = asyncio.get_running_loop()
        while True:
            others = [other for other in self._models.values() if other.engine is not None and other is not pooled]
            missing = pooled.needed_bytes + sum(other.needed_bytes for other in others) - self._limits.memory_bytes
            if missing <= 0 or not others:
                return
            others.sort(key=lambda other: other.last_use)
            idle = next((other for other in others if other.users == 0), None)
            if idle is not None:
                await self._unload(idle)
                continue
            wait_s = None
            for other in others:
                loaded_for_s = loop.time() - other.loaded_at
                if loaded_for_s < self._limits.min_loaded_s:
                    remaining_s = self._limits.min_loaded_s - loaded_for_s
                    wait_s = remaining_s if wait_s is None else min(wait_s, remaining_s)
                elif missing > 0:
                    other.is_draining = True
                    missing -= other.needed_bytes
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._change.wait()

    async def _unload(self, pooled: PooledModel) -> None:
        engine, pooled.engine = pooled.engine, None
        await pooled.draft_counts.close()
        if engine is not None:
            await engine.close()
            if self._http is not None:
                _log.info("The model %s was unloaded.", pooled.model.id)

    def _client(self, pooled: PooledModel) -> EngineClient:
        if pooled.engine is None or self._http is None:
            raise RuntimeError("LlamaCpp is used before start or after close")
        timeout_s = self._limits.token_timeout_s
        return EngineClient(
            pooled.engine.address(), self._http, timeout_s, pooled.verdicts, pooled.forms, pooled.reasoning_tags
        )
