"""LlamaCpp: models on this machine, by name, by file: the default that always works.

llama.cpp runs in a child process for each loaded model (pool.py, engine.py) and is used as a server on loopback. How a
model is used: generation.py. Which files there are and where they come from: models/.
"""

import asyncio
import importlib.util
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Annotated, Final, Literal

from pydantic import Field

from apis.chat import ChatRequest, share_of_salt
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ConfigError, ModelNotFound, UpstreamError, UpstreamTimeout
from apis.fair_share import ONE_TENANT, Tenants
from apis.imports import install_command
from apis.inference import Inference, Model
from apis.provider import Provider, ProviderMetrics, UserPath
from apis.sink import Sink
from apis.storage.kv_store import KVStore
from apis.wire.base import Effort
from providers.inference.chat_completions.reasoning_tags import TagsOption
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.llama_cpp.embedding_generation import EmbeddingGeneration
from providers.inference.llama_cpp.generation import Generation
from providers.inference.llama_cpp.installation import CatalogueInstaller
from providers.inference.llama_cpp.model_building import ModelSettings, build_model
from providers.inference.llama_cpp.pool import ModelPool, PooledModel, PoolLimits
from providers.inference.llama_cpp.threads import default_threads
from providers.inference.model_files.catalogue import DEFAULT_MODEL
from providers.inference.model_files.choice import ChosenModels, ModelNeeds, choose_models
from providers.inference.model_files.fit import ContextMemory
from providers.inference.model_files.references import ModelReference, parse_reference
from providers.inference.model_files.resolve import LocalModel

NGRAM: Final = "ngram"
"""The `draft_model` that is no model."""
_DEFAULT_MEMORY = ContextMemory()


class LlamaCpp(Inference):
    """Models of the catalogue, of the Hugging Face hub, or in files: for chats, also with images, and embeddings. Tools
    work with any chat model: gpt-oss calls them in its own format; another model first decides, then fills in the
    input that the tool's schema allows."""

    class Config(Provider.Config):
        """`model` is a name of the catalogue (`stack models`), hf:OWNER/REPOSITORY/FILE.gguf or a path; it is fetched
        at the first start. `models` are further ones: the first is loaded at the start, the others when they are
        requested; together they take at most `memory_gb` (default: nine tenths of what is free at the start), for which
        the least recently used are unloaded. One that is in use stays for `min_loaded_s` at least. `run_anyway` loads a
        model that does not seem to fit. With `installs_models` the page and POST /v1/stack/models/pull fetch further
        models of the catalogue, where the key may; they are served from then on. `model_path` is a GGUF file, served
        under `model` or the file's name; `projector_path` is the GGUF file (mmproj) through which that model, or the
        one of `model`, sees images.

        `parallel` requests of a model are served at once, each with `context_tokens` of its own, and others wait, in
        turn by tenant. `prompt_cache_mib` is for the caches of conversations that are in no slot; several tenants have
        none. A model's memory grows with all three. `threads: auto` is one for each physical core, and leaves
        one of this process's cores to the server. `max_output_tokens` applies to requests without a limit,
        `token_timeout_s` to the wait for each token.

        `draft_model` makes `model` faster where most of `draft_tokens` are right: it is a smaller model of the same
        vocabulary, named as `model` is, or `ngram`, which drafts what followed the same words before. Greedy answers
        stay the same; log probabilities are refused.

        `harmony` is for gpt-oss, which is used in its own format. The engine finds a model's reasoning by its template;
        where it does not, `reasoning_tags` names the tags, for all models or, with `auto`, by their names: see VLLM."""

        model: str = Field(DEFAULT_MODEL, min_length=1, max_length=1024)
        models: list[str] = Field(default_factory=list, max_length=64)
        installs_models: bool = False
        model_path: UserPath | None = None
        projector_path: UserPath | None = None
        context_tokens: int = Field(_DEFAULT_MEMORY.context_tokens, ge=256, le=2**20)
        parallel: int = Field(_DEFAULT_MEMORY.parallel, ge=1, le=64)
        prompt_cache_mib: int = Field(_DEFAULT_MEMORY.prompt_cache_mib, ge=0, le=2**20)
        threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
        draft_model: str | None = Field(None, min_length=1, max_length=1024)
        draft_tokens: int = Field(4, ge=1, le=64)
        memory_gb: float | None = Field(None, gt=0)
        min_loaded_s: float = Field(5, ge=0)
        run_anyway: bool = False
        max_output_tokens: int = Field(2048, ge=1)
        start_timeout_s: float = Field(120, gt=0)
        fetch_timeout_s: float = Field(21_600, gt=0)
        token_timeout_s: float = Field(600, gt=0)
        harmony: HarmonyOptions = HarmonyOptions()
        reasoning_tags: TagsOption | None = None

    def __init__(self, config: Config, kv_store: KVStore | None, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._tenants = tenants
        self._generations: dict[str, Generation] = {}
        self._pool: ModelPool | None = None
        self._settings: ModelSettings | None = None
        self._installer: CatalogueInstaller | None = None
        if config.installs_models and kv_store is not None:
            self._installer = CatalogueInstaller(kv_store, self._generations.keys, self._add_model)

    async def start(self) -> None:
        """Fetch the models that are missing, and return when the first one is loaded. Raises ConfigError when a model
        is unavailable or does not fit this machine."""
        config = self._config
        if await asyncio.to_thread(importlib.util.find_spec, "xllamacpp") is None:
            raise ConfigError(f"The llama_cpp provider needs its engine: {install_command('local')}.")
        memory = ContextMemory(
            config.context_tokens, config.parallel, 0 if self._tenants.are_several else config.prompt_cache_mib
        )
        references = [_first_reference(config), *map(parse_reference, config.models)]
        needs = ModelNeeds(memory, config.memory_gb, config.run_anyway)
        chosen = await choose_models(references, needs, config.fetch_timeout_s)
        for line in chosen.lines:
            sys.stderr.write(f"{line}\n")
        self._pool = await self._build_pool(chosen, memory)
        await self._pool.start()
        if self._installer is not None:
            self._installer.start()

    async def close(self) -> None:
        """End the engines and every stream in progress. A fetch of a model goes on after the next start."""
        if self._installer is not None:
            await self._installer.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def models(self) -> Sequence[Model]:
        """Return all models, loaded or not. Raises UpstreamError while the engine of every loaded one is down."""
        pool = self._get_pool()
        if self._installer is not None:
            await self._installer.serve_installed()
        return pool.models()

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        """See `Inference.stream`."""
        generation = await self._find_generation(request.model)
        generation.check(request)
        with self._name_engine_in_errors():
            async with self._get_pool().use(request.model, share_of_salt(request.cache_salt)) as client:
                await generation.generate(client, request, sink)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """See `Inference.complete`. One completion of one prompt."""
        generation = await self._find_generation(request.model)
        generation.check_completion(request)
        with self._name_engine_in_errors():
            async with (
                self._get_pool().use(request.model, share_of_salt(request.cache_salt)) as client,
                aclosing(generation.complete(client, request)) as batches,
            ):
                async for batch in batches:
                    yield batch

    async def decide(self, request: DecisionRequest) -> Decisions:
        """See `Inference.decide`."""
        generation = await self._find_generation(request.model)
        generation.check_decision(request)
        with self._name_engine_in_errors():
            async with self._get_pool().use(request.model, share_of_salt(request.cache_salt)) as client:
                return await generation.decide(client, request)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the first prompt that the model reads; with tools, this may be the one for the
        decision."""
        generation = await self._find_generation(request.model)
        generation.check(request)
        pool, tenant = self._get_pool(), share_of_salt(request.cache_salt)
        return await generation.count_tokens(lambda: pool.use(request.model, tenant, generates=False), request)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the effort of gpt-oss's system message; None for other models, whose templates decide."""
        generation = self._generations.get(request.model)
        return None if generation is None else generation.used_effort(request)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """See `Inference.embed`."""
        generation = await self._find_generation(request.model)
        if not isinstance(generation, EmbeddingGeneration):
            return await super().embed(request, tenant=tenant)
        generation.check_embedding(request)
        with self._name_engine_in_errors():
            async with self._get_pool().use(request.model, tenant) as client:
                return await generation.embed(client, request)

    def installer(self) -> CatalogueInstaller | None:
        """See `Inference.installer`."""
        return self._installer

    def metrics(self) -> ProviderMetrics | None:
        """See `Provider.metrics`."""
        return None if self._pool is None else self._pool.metrics()

    @contextmanager
    def _name_engine_in_errors(self) -> Generator[None]:
        try:
            yield
        except UpstreamError as exc:
            if exc.is_of_receiver:
                raise
            if not isinstance(exc, UpstreamTimeout):
                raise UpstreamError(f"The local engine (llama.cpp) failed: {exc.message}") from exc
            limit = f"token_timeout_s ({self._config.token_timeout_s:g} s)"
            raise UpstreamTimeout(f"The local engine (llama.cpp) made no token within {limit}.") from exc

    async def _build_pool(self, chosen: ChosenModels, memory: ContextMemory) -> ModelPool:
        config, several_tenants = self._config, self._tenants.are_several
        threads = await asyncio.to_thread(default_threads) if config.threads == "auto" else config.threads
        settings = ModelSettings(
            memory, threads, config.max_output_tokens, config.harmony, config.reasoning_tags, several_tenants
        )
        pooled_models: list[PooledModel] = []
        self._settings = settings
        self._generations.clear()
        for local in chosen.models:
            pooled, self._generations[local.id] = await build_model(local, settings)
            pooled_models.append(pooled)
        limits = PoolLimits(chosen.memory_bytes, config.min_loaded_s, config.start_timeout_s, config.token_timeout_s)
        return ModelPool(pooled_models, limits, several_tenants=several_tenants)

    async def _find_generation(self, model: str) -> Generation:
        self._get_pool()
        if model not in self._generations and self._installer is not None:
            await self._installer.serve_installed()
        if model not in self._generations:
            raise ModelNotFound(model, self._generations)
        return self._generations[model]

    async def _add_model(self, local: LocalModel, free_bytes: int) -> None:
        """Serve one model more. Raises ConfigError."""
        assert self._settings is not None
        pooled, generation = await build_model(local, self._settings)
        self._get_pool().add(pooled, free_bytes)
        self._generations[local.id] = generation

    def _get_pool(self) -> ModelPool:
        if self._pool is None:
            raise RuntimeError("LlamaCpp is used before start or after close")
        return self._pool


def _first_reference(config: LlamaCpp.Config) -> ModelReference:
    path = config.model_path
    if path is None:
        reference = parse_reference(config.model)
    else:
        reference = ModelReference(
            str(path), config.model if "model" in config.model_fields_set else path.stem, path=path
        )
    draft = config.draft_model
    return replace(
        reference,
        projector_path=config.projector_path,
        draft_tokens=0 if draft is None else config.draft_tokens,
        draft=None if draft in (None, NGRAM) else parse_reference(draft),
    )
