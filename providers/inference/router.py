"""Router: distributes requests over several Inference providers by model id."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from apis.chat import ChatRequest
from apis.completion import CompletionBatch, CompletionDelta, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import (
    ContextLengthExceeded,
    ModelNotFound,
    RateLimited,
    StackError,
    Unsupported,
    UpstreamError,
    UpstreamTimeout,
)
from apis.inference import CALL_ATTEMPTS, LOCAL_HOST, DefaultSampling, Inference, Model, ModelHost, ModelNames
from apis.provider import Provider
from apis.sink import Sink, Stream, put_all
from apis.transcription import Transcript, TranscriptionRequest
from apis.wire.base import Effort
from providers.inference.attempts import Attempt, CircuitBreaker
from providers.inference.chat_completions.affinity import ServersByKey, affinity_key
from providers.inference.chat_completions.answer_limits import AnswerTooLarge
from providers.inference.chat_completions.errors import ConnectTimeout

T = TypeVar("T")
RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest, DecisionRequest, EmbeddingRequest, TranscriptionRequest)
_log = logging.getLogger(__name__)
Route = tuple[str, str]
"""Provider name and the provider's own model id."""


class Router(Inference):
    """Sends each request to the provider that lists its model; `provider/model` selects one explicitly.

    If several providers list an id, the first one serves it, and the next one where that fails before its first output;
    one that has just failed is asked last. With `share`, they share its requests as replicas do, by the same rules. A
    provider that is down makes only its own models unavailable.
    """

    class Config(Provider.Config):
        """`providers` are inference sections by name. `aliases` add further ids to a model; `default` names the model
        for unknown ids. `models` fixes a provider's list, public id -> the provider's own id; such a provider is not
        queried. A provider that fails `breaker_failures` times within `breaker_window_s` is tried again after the same
        time. Without `failover` only the first provider of an id serves it; with `share` all of them do, and a chain
        stays with the one that has its prefix."""

        providers: dict[str, dict[str, Any]] = Field(min_length=1)
        models: dict[str, dict[str, str]] = Field(default_factory=dict)
        aliases: dict[str, str] = Field(default_factory=dict)
        default: str | None = None
        list_timeout_s: float = Field(default=5, gt=0)
        refresh_interval_s: float = Field(default=5, ge=0)
        failover: bool = True
        share: bool = False
        breaker_failures: int = Field(default=3, ge=1)
        breaker_window_s: float = Field(default=10, gt=0)

        @model_validator(mode="after")
        def _check_names(self) -> Self:
            if unknown := self.models.keys() - self.providers.keys():
                raise ValueError(f"models names providers that are not there: {', '.join(sorted(unknown))}")
            if self.share and not self.failover:
                raise ValueError("share needs failover: true.")
            return self

    def __init__(self, config: Config, providers: Mapping[str, Inference]) -> None:
        self._config = config
        self._providers = providers
        self._models_by_provider: dict[str, Sequence[Model]] = {}
        self._routes: dict[str, list[Route]] = {}
        self._breakers = {name: CircuitBreaker(config.breaker_failures, config.breaker_window_s) for name in providers}
        self._names: dict[Route, ModelNames] = {}
        self._in_flight = dict.fromkeys(providers, 0)
        self._servers_by_key = ServersByKey(list(providers))
        self._rotation = itertools.count()
        self._silent_providers: set[str] = set()
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()

    async def models(self) -> Sequence[Model]:
        """Return all models of all providers that respond, and the aliases. An id that an earlier provider lists too
        appears as `provider/model`."""
        await self._refresh_routes(0)
        if len(self._silent_providers) == len(self._providers):
            raise UpstreamError("No inference server answered.")
        return list(self._public_models().values())

    def _public_models(self) -> dict[str, Model]:
        """Return the listed models and the aliases by their public ids."""
        models: dict[str, Model] = {}
        for name in self._providers:
            for model in self._models_by_provider.get(name, ()):
                public = model.id if model.id not in models else f"{name}/{model.id}"
                models[public] = replace(model, id=public)
        for alias, target in self._config.aliases.items():
            if target in models and alias not in models:
                models[alias] = replace(models[target], id=alias)
        return models

    async def find_names(self, model: str) -> ModelNames:
        """Return the ids, aliases and full names (`provider/model`) of the model, and the name that was asked for: the
        default model has any."""
        route = await self._find_route(model)
        if route is None:
            return ModelNames(model, frozenset({model}), is_listed=False)
        listed = await self._find_listed(route)
        if listed is None:  # it may be new at its provider
            await self._refresh_routes(self._config.refresh_interval_s)
            listed = await self._find_listed(route)
        if listed is not None:
            return listed if model in listed.names else replace(listed, names=listed.names | {model})
        provider, own = route
        full_name = f"{provider}/{own}"
        is_listed = False if provider in self._models_by_provider else None
        return ModelNames(full_name, frozenset({full_name, model}), is_listed=is_listed)

    async def _find_listed(self, route: Route) -> ModelNames | None:
        """Return the names of a model that its provider lists, under this id or another one that the provider knows."""
        provider, own = route
        if route in self._names:
            return self._names[route]
        own_ids = (await self._providers[provider].find_names(own)).names
        return next((self._names[provider, each] for each in sorted(own_ids) if (provider, each) in self._names), None)

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        """Forward to a provider of the request's model."""
        await self._forward(request, lambda provider, own, attempt: provider.stream(own, attempt.watch(sink)))

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """Forward to a provider of the request's model."""

        async def stream(sink: Sink[CompletionDelta | Usage]) -> None:
            await self._forward(
                request, lambda provider, own, attempt: put_all(provider.complete(own), attempt.watch(sink))
            )

        return Stream(stream)

    async def transcribe(self, request: TranscriptionRequest, sink: Sink[str]) -> Transcript:
        """Forward to a provider of the request's model."""
        return await self._forward(
            request, lambda provider, own, attempt: provider.transcribe(own, attempt.watch(sink))
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Forward to a provider of the request's model."""
        return await self._forward(request, lambda provider, own, _: provider.count_tokens(own))

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """Forward to a provider of the request's model."""
        return await self._forward(request, lambda provider, own, _: provider.embed(own, tenant=tenant))

    async def decide(self, request: DecisionRequest) -> Decisions:
        """Forward to a provider of the request's model."""
        return await self._forward(request, lambda provider, own, _: provider.decide(own))

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Forward to the provider of the request's model; None where there is none now, which `chat` reports."""
        try:
            name, model = (await self._find_candidates(request.model))[0]
        except StackError:
            return None
        return await self._providers[name].used_effort(request.model_copy(update={"model": model}))

    async def default_sampling(self, model: str) -> DefaultSampling | None:
        """Forward to the provider of the model; None where there is none now, which `chat` reports."""
        try:
            name, inner = (await self._find_candidates(model))[0]
        except StackError:
            return None
        return await self._providers[name].default_sampling(inner)

    async def model_host(self, model: str) -> ModelHost:
        """Forward to the provider of the model; this process where there is none now, which `chat` reports."""
        try:
            name, own = (await self._find_candidates(model))[0]
        except StackError:
            return LOCAL_HOST
        return await self._providers[name].model_host(own)

    async def _forward(self, request: RequestT, ask: Callable[[Inference, RequestT, Attempt], Awaitable[T]]) -> T:
        """Return the result of the first provider of the request's model that has an output. Raises the error of the
        last one that was asked, or of one before it that failed, where the last one cannot serve such a request."""
        tried: list[Route] = []
        failure: StackError | None = None
        while True:
            routes = await self._find_candidates(request.model, tried)
            is_shared = self._config.share and len(routes) + len(tried) > 1
            route = self._choose_route(routes, request) if is_shared else routes[0]
            tried.append(route)
            name, model = route
            breaker = self._breakers[name]
            attempt = Attempt(breaker)
            self._in_flight[name] += 1
            try:
                with self._public_name(request.model):
                    result = await ask(self._providers[name], request.model_copy(update={"model": model}), attempt)
                attempt.begin_output()
                return result
            except StackError as exc:
                is_unavailable = not attempt.has_output and _is_unavailable(exc)
                if is_unavailable and not isinstance(exc, ModelNotFound):
                    breaker.record_failure()
                earlier = failure if failure is not None and _hides(exc, failure) else None
                if not is_unavailable or not await self._has_other_provider(request.model, tried):
                    if earlier is not None:
                        raise earlier from exc
                    raise
                failure = earlier or exc
                _log.warning(
                    "%s does not serve %s now: %s Another provider is asked.", name, request.model, exc.message
                )
            finally:
                self._in_flight[name] -= 1
                attempt.end()
            if (attempts := CALL_ATTEMPTS.get()) is not None:
                attempts.has_failed = True

    async def _has_other_provider(self, model: str, tried: Sequence[Route]) -> bool:
        """Return true if there is a provider of the model that has not been tried, also one that was down before."""
        if not self._config.failover or not self._lookup_routes(model):
            return False
        if {*tried} >= {*self._lookup_routes(model)} and self._silent_providers:
            await self._refresh_routes(self._config.refresh_interval_s)
        return not {*tried} >= {*self._lookup_routes(model)}

    async def _find_candidates(self, model: str, tried: Sequence[Route] = ()) -> Sequence[Route]:
        """Return the routes of the model that have not been tried: in the order of the providers, those that have just
        failed last. Raises ModelNotFound where there is none."""
        route = await self._find_route(model)
        if route is None:
            raise ModelNotFound(model, self._public_models())
        routes = [each for each in self._lookup_routes(model) or [route] if each not in tried]
        if len(routes) == 1 or not self._config.failover:
            return routes
        return sorted(routes, key=lambda each: self._has_failed(each[0]))

    def _choose_route(self, routes: Sequence[Route], request: object) -> Route:
        """Return one of the routes that are as well as the first one: by the key of a chat, else in turn."""
        has_failed = self._has_failed(routes[0][0])
        equal = [each for each in routes if self._has_failed(each[0]) == has_failed]
        key = affinity_key(request) if isinstance(request, ChatRequest) else None
        if key is None:
            return equal[next(self._rotation) % len(equal)]
        names = list(self._providers)
        chosen = self._servers_by_key.choose(key, {names.index(name): self._in_flight[name] for name, _ in equal})
        return next(each for each in equal if each[0] == names[chosen])

    def _has_failed(self, name: str) -> bool:
        """Return true if the provider has failed too often just now, or has seen that none of its servers answers."""
        if not self._breakers[name].allows_request():
            return True
        servers = self._providers[name].upstreams()
        return bool(servers) and all(server.is_blocked or not server.is_healthy for server in servers)

    async def _find_route(self, model: str) -> Route | None:
        route = self._lookup_route(model)
        if route is None:
            await self._refresh_routes(self._config.refresh_interval_s)
            route = self._lookup_route(model)
        if route is None and self._config.default is not None:
            route = self._lookup_route(self._config.default)
        if route is None and self._silent_providers - self._models_by_provider.keys():
            raise UpstreamError("An inference server that may have this model does not answer.")
        return route

    def _lookup_routes(self, model: str) -> Sequence[Route]:
        """Return the routes of all providers that list this id, for a model whose route is known."""
        if self._lookup_route(model) is None and self._config.default is not None:
            model = self._config.default
        return self._routes.get(self._config.aliases.get(model, model), ())

    def _lookup_route(self, model: str) -> Route | None:
        model = self._config.aliases.get(model, model)
        if model in self._routes:
            return self._routes[model][0]
        name, _, own = model.partition("/")
        if name not in self._providers or not own:
            return None
        own_ids = self._config.models.get(name)
        if own_ids is None:
            return name, own
        return (name, own_ids[own]) if own in own_ids else None

    async def _refresh_routes(self, max_age_s: float) -> None:
        """Query the models of all providers, unless that was done within `max_age_s` or while waiting for the lock.
        While a provider does not respond, its former list stays: its models are down, not removed."""
        requested_at = time.monotonic()
        async with self._refresh_lock:
            if self._refreshed_at > requested_at - max_age_s:
                return
            listings = await asyncio.gather(*(self._list_models(name) for name in self._providers))
            self._silent_providers.clear()
            for name, listed in zip(self._providers, listings, strict=True):
                if listed is None:
                    self._silent_providers.add(name)
                else:
                    self._models_by_provider[name] = listed
            self._routes = self._build_routes()
            self._names = self._build_names(await self._find_own_names())
            self._refreshed_at = time.monotonic()

    def _build_routes(self) -> dict[str, list[Route]]:
        routes: dict[str, list[Route]] = {}
        for name in self._providers:
            own_ids = self._config.models.get(name, {})
            for model in self._models_by_provider.get(name, ()):
                routes.setdefault(model.id, []).append((name, own_ids.get(model.id, model.id)))
        return routes

    async def _find_own_names(self) -> dict[Route, frozenset[str]]:
        """Return the names that the providers themselves know of their models, where they were asked for a list."""
        return {
            (name, model.id): (await self._providers[name].find_names(model.id)).names
            for name, models in self._models_by_provider.items()
            if name not in self._config.models
            for model in models
        }

    def _build_names(self, own_names: Mapping[Route, frozenset[str]]) -> dict[Route, ModelNames]:
        """Return the names of all listed models: of each, those that lead to it and its provider's own names. Its ids
        that lead to another model are `shared`."""
        ids: dict[Route, set[str]] = {}
        names: dict[Route, set[str]] = {}
        for name in self._providers:
            own_ids = self._config.models.get(name, {})
            for model in self._models_by_provider.get(name, ()):
                route = name, own_ids.get(model.id, model.id)
                ids.setdefault(route, set()).update({model.id}, own_names.get(route, ()))
        for route, of_route in ids.items():
            full_names = {f"{route[0]}/{each}" for each in of_route}
            names[route] = full_names | {each for each in of_route if self._lookup_route(each) in (route, None)}
        for alias in self._config.aliases:
            if (target := self._lookup_route(alias)) in names:
                names[target].add(alias)
        public = self._public_models()
        return {
            route: ModelNames(
                next((each for each in public if each in names[route]), f"{route[0]}/{route[1]}"),
                frozenset(names[route]),
                frozenset(of_route - names[route]),
                is_listed=True,
            )
            for route, of_route in ids.items()
        }

    async def _list_models(self, name: str) -> Sequence[Model] | None:
        """Return the models of one provider; None when it does not respond."""
        if name in self._config.models:
            return [Model(id=model, owned_by=name) for model in self._config.models[name]]
        try:
            async with asyncio.timeout(self._config.list_timeout_s):
                return await self._providers[name].models()
        except (StackError, TimeoutError):
            return None

    @contextmanager
    def _public_name(self, model: str) -> Generator[None]:
        """Let the error of a model that its provider does not have name the models as requests do."""
        try:
            yield
        except ModelNotFound as exc:
            raise ModelNotFound(model, self._public_models()) from exc


def _hides(error: StackError, failure: StackError) -> bool:
    """Return true for the error of a provider that cannot serve such a request, after the failure of one that can."""
    is_lack = isinstance(error, Unsupported | ContextLengthExceeded | ModelNotFound)
    return is_lack and not isinstance(failure, ModelNotFound)


def _is_unavailable(error: StackError) -> bool:
    """Return true for the error of a provider that generated nothing, where another one may serve the request. One that
    took too long may still be generating."""
    if isinstance(error, UpstreamTimeout):
        return isinstance(error, ConnectTimeout)
    return isinstance(error, UpstreamError | RateLimited | ModelNotFound) and not isinstance(error, AnswerTooLarge)
