"""LlamaCpp: a small model on this machine, installed as a wheel: the default that always works.

llama.cpp runs in a child process (engine.py) and is used as a chat-completions server on loopback.
"""

import asyncio
import importlib.util
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from pydantic import Field

from apis.chat import ChatRequest, share_of_salt
from apis.deltas import DeltaBatch
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ConfigError, ModelNotFound, UpstreamError, UpstreamTimeout
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.imports import install_command
from apis.inference import ALL_CONSTRAINTS, Inference, Model
from apis.provider import Provider, UserPath
from apis.wire.base import Effort
from providers.inference.chat_completions.reasoning_tags import TagsOption, find_tags
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.http.client import HttpClient
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.embedding_generation import EMBEDDING_ARCHITECTURES, EmbeddingGeneration
from providers.inference.llama_cpp.engine import LlamaCppEngine, LlamaCppSettings
from providers.inference.llama_cpp.generation import Generation, GenerationSettings, load_generation
from providers.inference.llama_cpp.model import MODEL_REMEDY, PACKAGED_MODELS, fetch_model, models_dir
from providers.inference.llama_cpp.models.gguf_header import read_header


class LlamaCpp(Inference):
    """One text model. Tools work with any model: it first decides, then fills in the input that the tool's schema
    allows."""

    class Config(Provider.Config):
        """`model_path` is any GGUF file, served under `model` or the file's name; without it, `model` is fetched from
        the package index at the first start. `parallel` requests are served at once, each with `context_tokens` of its
        own, and others wait, in turn by tenant; memory grows with both. `threads` defaults to all cores but one.
        `max_output_tokens` applies to requests without a limit, `token_timeout_s` to the wait for each token.
        `prompt_cache_mib` is memory for the caches of conversations that are in no slot; several tenants have none.
        `harmony` is for gpt-oss, which is used in its own format. The engine finds a model's reasoning by its template;
        where it does not, `reasoning_tags` names the tags: see VLLM. `projector_path` is the GGUF file (mmproj) through
        which a vision model sees images."""

        model: str = Field("smollm2-135m-instruct", min_length=1, max_length=256)
        model_path: UserPath | None = None
        context_tokens: int = Field(8192, ge=256, le=2**20)
        parallel: int = Field(2, ge=1, le=64)
        threads: int | None = Field(None, ge=1, le=1024)
        max_output_tokens: int = Field(2048, ge=1)
        start_timeout_s: float = Field(120, gt=0)
        fetch_timeout_s: float = Field(1800, gt=0)
        token_timeout_s: float = Field(600, gt=0)
        prompt_cache_mib: int = Field(256, ge=0, le=2**20)
        harmony: HarmonyOptions = HarmonyOptions()
        reasoning_tags: TagsOption | None = None
        projector_path: UserPath | None = None

    def __init__(self, config: Config, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._tenants = tenants
        self._generation: Generation | None = None
        self._places = FairShare(
            "requests to the model",
            config.parallel,
            tenant_places=max(1, config.parallel - 1),
            several_tenants=tenants.are_several,
        )
        self._engine: LlamaCppEngine | None = None
        self._http: HttpClient | None = None
        self._verdicts = OrderedDict[bytes, bool]()
        self._model = Model(
            id=_model_id(config), owned_by="llama.cpp", modalities=frozenset(), enforces=ALL_CONSTRAINTS
        )

    async def start(self) -> None:
        """Fetch the model if needed, and return when it is loaded. Raises ConfigError when it is unavailable."""
        config = self._config
        if await asyncio.to_thread(importlib.util.find_spec, "xllamacpp") is None:
            raise ConfigError(f"The llama_cpp provider needs its engine: {install_command('local')}.")
        path, sampling = config.model_path, dict[str, float]()
        if path is None:
            packaged = PACKAGED_MODELS.get(config.model)
            if packaged is None:
                names = ", ".join(PACKAGED_MODELS)
                raise ConfigError(f"There is no model '{config.model}' to fetch, only: {names}. {MODEL_REMEDY}")
            path, sampling = await fetch_model(packaged, models_dir(), config.fetch_timeout_s), dict(packaged.sampling)
        elif not await asyncio.to_thread(path.is_file):
            raise ConfigError(f"model_path: there is no file {path}.")
        if config.projector_path is not None and not await asyncio.to_thread(config.projector_path.is_file):
            raise ConfigError(f"projector_path: there is no file {config.projector_path}.")
        header = await asyncio.to_thread(read_header, path)
        architecture = "" if header is None else header.architecture
        embedding = architecture in EMBEDDING_ARCHITECTURES
        threads = config.threads or max((os.cpu_count() or 2) - 1, 1)
        settings = LlamaCppSettings(
            self._model.id,
            str(path),
            config.context_tokens,
            config.parallel,
            threads,
            sampling,
            self._prompt_cache_mib(),
            None if config.projector_path is None else str(config.projector_path),
            embedding,
        )
        self._engine = LlamaCppEngine(settings, config.start_timeout_s)
        await self._engine.start()
        # The engine closes connections at any time, and a new one on this machine costs nothing.
        self._http = HttpClient(idle_s=0)
        try:
            context_tokens = await self._get_client().context_tokens()
        except UpstreamError as exc:
            await self.close()
            raise ConfigError(f"The local engine ended right after it had started: {exc.message}") from exc
        if embedding:
            self._generation = await EmbeddingGeneration.load(self._get_client(), self._model.id, context_tokens)
        else:
            self._generation = await self._load_generation(architecture, context_tokens)
        self._model = self._generation.describe(replace(self._model, context_tokens=context_tokens))

    async def close(self) -> None:
        """End the engine and every stream in progress."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()
        engine, self._engine = self._engine, None
        self._generation = None
        if engine is not None:
            await engine.close()

    async def _load_generation(self, architecture: str, context_tokens: int) -> Generation:
        config = self._config
        settings = GenerationSettings(
            slots=config.parallel,
            context_tokens=context_tokens,
            max_output_tokens=config.max_output_tokens,
            shares_cache=self._prompt_cache_mib() > 0,
            takes_images=config.projector_path is not None,
            harmony=config.harmony,
        )
        return await load_generation(architecture, settings)

    def _prompt_cache_mib(self) -> int:
        # One cache for all slots would let tenants see by the time which prompts the others have sent.
        return 0 if self._tenants.are_several else self._config.prompt_cache_mib

    async def models(self) -> Sequence[Model]:
        """Return the one model. Raises UpstreamError while the engine is down."""
        self._get_client()
        return [self._model]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`."""
        generation = self._require_generation(request)
        try:
            with await self._places.acquire(share_of_salt(request.cache_salt)):
                async with aclosing(generation.generate(self._get_client(), request)) as batches:
                    async for batch in batches:
                        yield batch
        except UpstreamTimeout as exc:
            limit = f"token_timeout_s ({self._config.token_timeout_s:g} s)"
            raise UpstreamTimeout(f"The local engine (llama.cpp) made no token within {limit}.") from exc
        except UpstreamError as exc:
            raise UpstreamError(f"The local engine (llama.cpp) failed: {exc.message}") from exc

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the first prompt that the model reads."""
        generation = self._require_generation(request)
        return await generation.count_tokens(self._get_client(), request)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the effort of gpt-oss's system message; None for other models, whose templates decide."""
        return None if self._generation is None else self._generation.used_effort(request)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """See `Inference.embed`."""
        generation = self._find_generation(request.model)
        if not isinstance(generation, EmbeddingGeneration):
            return await super().embed(request, tenant=tenant)
        with await self._places.acquire(tenant):
            return await generation.embed(self._get_client(), request)

    def _require_generation(self, request: ChatRequest) -> Generation:
        generation = self._find_generation(request.model)
        generation.check(request)
        return generation

    def _find_generation(self, model: str) -> Generation:
        if model != self._model.id:
            raise ModelNotFound(model, [self._model.id])
        if self._generation is None:
            raise RuntimeError("LlamaCpp is used before start or after close")
        return self._generation

    def _get_client(self) -> EngineClient:
        if self._engine is None or self._http is None:
            raise RuntimeError("LlamaCpp is used before start or after close")
        tags = find_tags(self._config.reasoning_tags, self._model.id)
        return EngineClient(self._engine.address(), self._http, self._config.token_timeout_s, self._verdicts, tags)


def _model_id(config: LlamaCpp.Config) -> str:
    if config.model_path is None or "model" in config.model_fields_set:
        return config.model
    return config.model_path.stem
