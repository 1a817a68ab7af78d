"""Router: distributes requests over several Inference providers by model id."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from apis.chat import ChatRequest
from apis.completions.completion import CompletionBatch, CompletionRequest
from apis.deltas import DeltaBatch
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ModelNotFound, StackError, UpstreamError
from apis.inference import LOCAL_HOST, Inference, Model, ModelHost
from apis.provider import Provider
from apis.wire.base import Effort

_RoutedRequest = TypeVar("_RoutedRequest", ChatRequest, CompletionRequest, EmbeddingRequest)
Route = tuple[str, str]
"""Provider name and the provider's own model id."""


class Router(Inference):
    """Sends each request to the provider that lists its model; `provider/model` selects one explicitly.

    If several providers list an id, the first one serves it. A provider that is down makes only its own models
    unavailable.
    """

    class Config(Provider.Config):
        """`providers` are inference sections by name. `aliases` add further ids to a model; `default` names the model
        for unknown ids. `models` fixes a provider's list, public id -> the provider's own id; such a provider is not
        queried."""

        providers: dict[str, dict[str, Any]] = Field(min_length=1)
        models: dict[str, dict[str, str]] = Field(default_factory=dict)
        aliases: dict[str, str] = Field(default_factory=dict)
        default: str | None = None
        list_timeout_s: float = Field(default=5, gt=0)
        refresh_interval_s: float = Field(default=5, ge=0)

        @model_validator(mode="after")
        def _check_names(self) -> Self:
            if unknown := self.models.keys() - self.providers.keys():
                raise ValueError(f"models names providers that are not there: {', '.join(sorted(unknown))}")
            return self

    def __init__(self, config: Config, providers: Mapping[str, Inference]) -> None:
        self._config = config
        self._providers = providers
        self._models_by_provider: dict[str, Sequence[Model]] = {}
        self._routes: dict[str, Route] = {}
        self._silent_providers: set[str] = set()
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()

    async def models(self) -> Sequence[Model]:
        """Return all models of all providers that respond, and the aliases. An id that an earlier provider lists too
        appears as `provider/model`."""
        await self._refresh_routes(0)
        if len(self._silent_providers) == len(self._providers):
            raise UpstreamError("No inference server answered.")
        models: dict[str, Model] = {}
        for name in self._providers:
            for model in self._models_by_provider.get(name, ()):
                public = model.id if model.id not in models else f"{name}/{model.id}"
                models[public] = replace(model, id=public)
        for alias, target in self._config.aliases.items():
            if target in models and alias not in models:
                models[alias] = replace(models[target], id=alias)
        return list(models.values())

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Forward to the provider of the request's model."""
        provider, forwarded = await self._route_request(request)
        with _public_name(request.model):
            async with aclosing(provider.chat(forwarded)) as batches:
                async for batch in batches:
                    yield batch

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """Forward to the provider of the request's model."""
        provider, forwarded = await self._route_request(request)
        with _public_name(request.model):
            async with aclosing(provider.complete(forwarded)) as batches:
                async for batch in batches:
                    yield batch

    async def count_tokens(self, request: ChatRequest) -> int:
        """Forward to the provider of the request's model."""
        provider, forwarded = await self._route_request(request)
        with _public_name(request.model):
            return await provider.count_tokens(forwarded)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Forward to the provider of the request's model; None where there is none now, which `chat` reports."""
        try:
            provider, forwarded = await self._route_request(request)
        except StackError:
            return None
        return await provider.used_effort(forwarded)

    async def model_host(self, model: str) -> ModelHost:
        """Forward to the provider of the model; this process where there is none now, which `chat` reports."""
        try:
            route = await self._find_route(model)
        except StackError:
            route = None
        return LOCAL_HOST if route is None else await self._providers[route[0]].model_host(route[1])

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """Forward to the provider of the request's model."""
        provider, forwarded = await self._route_request(request)
        with _public_name(request.model):
            return await provider.embed(forwarded, tenant=tenant)

    async def _route_request(self, request: _RoutedRequest) -> tuple[Inference, _RoutedRequest]:
        route = await self._find_route(request.model)
        if route is None:
            raise ModelNotFound(request.model, self._routes)
        name, model = route
        return self._providers[name], request.model_copy(update={"model": model})

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

    def _lookup_route(self, model: str) -> Route | None:
        model = self._config.aliases.get(model, model)
        if model in self._routes:
            return self._routes[model]
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
            self._refreshed_at = time.monotonic()

    def _build_routes(self) -> dict[str, Route]:
        routes: dict[str, Route] = {}
        for name in self._providers:
            own_ids = self._config.models.get(name, {})
            for model in self._models_by_provider.get(name, ()):
                routes.setdefault(model.id, (name, own_ids.get(model.id, model.id)))
        return routes

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
def _public_name(model: str) -> Generator[None]:
    """Let the error of a model that its provider does not have name the model as the request does."""
    try:
        yield
    except ModelNotFound as exc:
        raise ModelNotFound(model) from exc
