"""VLLM: models on vLLM, or on any other server with OpenAI's chat completions or embeddings API."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from apis.chat import ChatRequest
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ConfigError, StackError
from apis.imports import import_from_string, install_command
from apis.inference import Inference, Modality, Model, ModelHost, ModelNames
from apis.observation.background import UpstreamHealth
from apis.sink import Sink, Stream
from apis.transcription import Transcript, TranscriptionRequest
from apis.wire.base import Effort
from providers.common.net.http.client import HttpClient
from providers.inference.chat_completions.embeddings import join_embeddings, split_request
from providers.inference.chat_completions.endpoint import DEFAULT_TAG, LISTING_TIMEOUT_S, ChatCompletions
from providers.inference.chat_completions.first_token import FirstToken
from providers.inference.chat_completions.formatted_answers import needs_two_passes, stream_in_two_passes
from providers.inference.chat_completions.health import watch_health
from providers.inference.chat_completions.reasoning_tags import (
    OpeningModels,
    TagSink,
    find_tags,
    replay_reasoning,
)
from providers.inference.chat_completions.replicas import Upstreams
from providers.inference.chat_completions.settings import RemoteEngineSettings
from providers.inference.decisions.prompts import refuse_images

if TYPE_CHECKING:
    from providers.inference.chat_completions.decisions import RemoteDecisions
    from providers.inference.harmony.completions import HarmonyTemplate


class VLLM(Inference):
    """Provider over one or more base URLs. Several URLs are replicas: the chats of one chain go to one of them, other
    requests rotate, and one that produced no output yet is retried on another replica."""

    class Config(RemoteEngineSettings):
        """The fields of `RemoteEngineSettings`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._harmony_template: HarmonyTemplate | None = None
        self._http: HttpClient | None = None
        self._upstreams: Upstreams | None = None
        self._health_task: asyncio.Task[None] | None = None
        self._opening_models = OpeningModels()
        self._decisions: RemoteDecisions | None = None
        self._models_cache: tuple[float, Sequence[Model]] | None = None

    async def start(self) -> None:
        """Open the connection pool and begin to check the servers. Nothing waits for them: a server that is down now
        may be up when it is needed. Raises ConfigError for an invalid proxy in the environment."""
        config = self._config
        if config.template == "harmony":
            self._harmony_template = await _load_harmony_template(config)
        self._http = http = HttpClient(proxies=config.build_proxy_rules())
        urls = [config.base_url] if isinstance(config.base_url, str) else config.base_url
        key = config.api_key if config.api_key and config.api_key.get_secret_value() else None
        dialect, template, limits = config.build_dialect(), self._harmony_template, config.build_limits()
        try:
            endpoints = [
                ChatCompletions(url, http, api_key=key, dialect=dialect, template=template, limits=limits)
                for url in urls
            ]
        except ValueError as exc:
            raise ConfigError(f"The proxy that the environment sets for base_url is not valid: {exc}.") from exc
        self._upstreams = Upstreams(endpoints, config.build_policy())
        if config.health_interval_s:
            self._health_task = asyncio.create_task(watch_health(self._upstreams.upstreams, config.health_interval_s))

    async def close(self) -> None:
        """End every stream in progress."""
        if self._health_task is not None:
            self._health_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._health_task
        if self._http is not None:
            await self._http.close()
        self._http = self._upstreams = self._health_task = self._harmony_template = None

    async def models(self) -> Sequence[Model]:
        """Return the models that the server lists; the list is cached for a few seconds."""
        if self._models_cache is not None and time.monotonic() < self._models_cache[0]:
            return self._models_cache[1]
        models = await self._get_upstreams().query_any(lambda endpoint: endpoint.models(self._config.modalities))
        if self._harmony_template is not None:
            native, text = self._harmony_template.native_tools, frozenset[Modality]()
            models = [replace(model, modalities=text, native_tools=native) for model in models]
        enforced, caches = self._config.enforced_constraints(), self._config.engine == "vllm"
        shows_all = self._harmony_template is not None
        models = [
            replace(model, enforces=enforced, caches_prefixes=caches, shows_all_reasoning=shows_all) for model in models
        ]
        self._models_cache = (time.monotonic() + self._config.models_cache_s, models)
        return models

    async def find_names(self, model: str) -> ModelNames:
        """Return the model's id, and the one without its tag where that is Ollama's default tag."""
        if self._models_cache is None:
            with suppress(StackError, TimeoutError):
                async with asyncio.timeout(LISTING_TIMEOUT_S):
                    await self.models()
        listed = {each.id for each in self._models_cache[1]} if self._models_cache is not None else frozenset[str]()
        tagged = f"{model}{DEFAULT_TAG}"
        name = tagged if model not in listed and tagged in listed else model
        return ModelNames(name, frozenset({model, name, name.removesuffix(DEFAULT_TAG)}))

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        """See `Inference.stream`."""
        upstreams, tags = self._get_upstreams(), find_tags(self._config.reasoning_tags, request.model)
        if tags is not None:
            request = replay_reasoning(request, tags)
            is_certain = self._config.reasoning_tags != "auto"
            sink = TagSink(sink, request, tags, self._opening_models, is_certain=is_certain)
        is_vllm = self._config.engine == "vllm" and self._harmony_template is None
        if is_vllm and request.tools and needs_two_passes(request):
            await stream_in_two_passes(upstreams.stream, request, sink)
        else:
            await upstreams.stream(request, sink)

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """Forward to the server's /completions. The prompt reaches the model as it is, also with a template here."""
        return Stream(partial(self._get_upstreams().complete, request))

    async def transcribe(self, request: TranscriptionRequest, sink: Sink[str]) -> Transcript:
        """Forward to the server's /audio/transcriptions. `headers_timeout_s` bounds the wait for a transcript that is
        not streamed."""
        return await self._get_upstreams().transcribe(request, sink)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """Request vectors from the server's /embeddings, a few inputs at a time. `headers_timeout_s` applies to each
        part."""
        return join_embeddings([await self._get_upstreams().embed(part) for part in split_request(request)])

    async def decide(self, request: DecisionRequest) -> Decisions:
        """Return the decisions of the server's /systemone where the model is one for decisions, else those that the
        first token of a chat shows: between 20 options at most where the server cannot score chosen tokens."""
        upstreams, template = self._get_upstreams(), self._harmony_template
        modalities = self._config.modalities
        if template is not None or (modalities is not None and "image" not in modalities):
            refuse_images(request)
        if template is None:
            return await (await self._load_decisions()).decide(upstreams, request, upstreams.score_chat)

        async def score(chat: ChatRequest, scored_ids: Sequence[int]) -> FirstToken:
            return await upstreams.score_tokens(chat, await template.render_decision(chat), scored_ids)

        return await (await self._load_decisions()).decide(upstreams, request, score, template.labels)

    async def _load_decisions(self) -> "RemoteDecisions":
        """Return what makes decisions, whose modules are imported for the first ones."""
        if self._decisions is None:
            build: type[RemoteDecisions] = await asyncio.to_thread(
                import_from_string, "providers.inference.chat_completions.decisions:RemoteDecisions"
            )
            self._decisions = self._decisions or build(self._config.engine)
        return self._decisions

    async def model_host(self, model: str) -> ModelHost:
        """Return the server, by the name of its engine."""
        return ModelHost(self._config.engine, is_remote=True)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the effort of the system message that is rendered here."""
        return (
            self._config.harmony.used_effort(request.reasoning_effort) if self._harmony_template is not None else None
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the prompt: counted here if it is rendered here, otherwise by vLLM's /tokenize. Other
        engines raise CountingUnsupported."""
        if self._harmony_template is not None:
            return await self._harmony_template.count_tokens(request)
        if (tags := find_tags(self._config.reasoning_tags, request.model)) is not None:
            request = replay_reasoning(request, tags)
        return await self._get_upstreams().query_any(lambda endpoint: endpoint.count_tokens(request))

    def upstreams(self) -> Sequence[UpstreamHealth]:
        return () if self._upstreams is None else [upstream.summarize() for upstream in self._upstreams.upstreams]

    def _get_upstreams(self) -> Upstreams:
        if self._upstreams is None:
            raise RuntimeError("VLLM is used before start or after close")
        return self._upstreams


async def _load_harmony_template(config: VLLM.Config) -> "HarmonyTemplate":
    """Load the template. The import happens only where it is used, because it needs packages that nothing else here
    does."""
    try:
        template: type[HarmonyTemplate] = await asyncio.to_thread(
            import_from_string, "providers.inference.harmony.completions:HarmonyTemplate"
        )
    except ModuleNotFoundError as exc:
        needed = f"template: harmony needs the package {exc.name}, which is not installed."
        raise ConfigError(f"{needed} Run: {install_command('harmony')}") from exc
    return await template.load(config.harmony, grammars=config.grammars, extra_body=config.extra_body)
