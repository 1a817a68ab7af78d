"""LlamaCpp: models on this machine, by name, by file: the default that always works.

llama.cpp runs in a child process for each loaded model (pool.py, engine.py) and is used as a chat-completions server on
loopback. Which files there are and where they come from: models/.
"""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager

from pydantic import Field

from apis.chat import ChatJsonSchemaFormat, ChatRequest, refuse_engine_options, share_of_salt
from apis.completions.completion import CompletionBatch, CompletionRequest
from apis.deltas import DeltaBatch
from apis.errors import ConfigError, Unsupported, UpstreamError, UpstreamTimeout
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.imports import install_command
from apis.inference import ALL_CONSTRAINTS, Inference, Model
from apis.provider import Provider, UserPath
from apis.wire.text_format import JsonObjectFormat
from providers.inference.llama_cpp.client import Constraint, EngineClient, schema_to_constraint
from providers.inference.llama_cpp.engine import LlamaCppSettings
from providers.inference.llama_cpp.models.catalogue import DEFAULT_MODEL
from providers.inference.llama_cpp.models.choice import ChosenModels, ModelNeeds, choose_models
from providers.inference.llama_cpp.models.references import ModelReference, parse_reference
from providers.inference.llama_cpp.models.resolve import LocalModel
from providers.inference.llama_cpp.pool import ModelPool, PooledModel, PoolLimits
from providers.inference.llama_cpp.prompts import (
    add_verbosity,
    build_answer_messages,
    build_decision_messages,
    check_text_only,
)
from providers.inference.llama_cpp.tools import ToolTurn, request_to_choices, tool_to_constraint


class LlamaCpp(Inference):
    """Models of the catalogue, of the Hugging Face hub, or in files. Tools work with any chat model: it first decides,
    then fills in the input that the tool's schema allows."""

    class Config(Provider.Config):
        """`model` is a name of the catalogue (`stack models`), hf:OWNER/REPOSITORY/FILE.gguf or a path; it is fetched
        at the first start. `models` are further ones: the first is loaded at the start, the others when they are
        requested; together they take at most `memory_gb` (default: nine tenths of what is free at the start), for which
        the least recently used are unloaded. One that is in use stays for `min_loaded_s` at least. `run_anyway` loads a
        model that does not seem to fit. `model_path` is a GGUF file, served under `model` or the file's name.
        `parallel` requests of a model are served at once, each with `context_tokens` of its own, and others wait, in
        turn by tenant; memory grows with both. `threads` defaults to all cores but one. `max_output_tokens` applies to
        requests without a limit, `token_timeout_s` to the wait for each token."""

        model: str = Field(DEFAULT_MODEL, min_length=1, max_length=1024)
        models: list[str] = Field(default_factory=list, max_length=64)
        model_path: UserPath | None = None
        context_tokens: int = Field(8192, ge=256, le=2**20)
        parallel: int = Field(2, ge=1, le=64)
        threads: int | None = Field(None, ge=1, le=1024)
        memory_gb: float | None = Field(None, gt=0)
        min_loaded_s: float = Field(5, ge=0)
        run_anyway: bool = False
        max_output_tokens: int = Field(2048, ge=1)
        start_timeout_s: float = Field(120, gt=0)
        fetch_timeout_s: float = Field(21_600, gt=0)
        token_timeout_s: float = Field(600, gt=0)

    def __init__(self, config: Config, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._tenants = tenants
        self._pool: ModelPool | None = None

    async def start(self) -> None:
        """Fetch the models that are missing, and return when the first one is loaded. Raises ConfigError when a model
        is unavailable or does not fit this machine."""
        config = self._config
        if await asyncio.to_thread(importlib.util.find_spec, "xllamacpp") is None:
            raise ConfigError(f"The llama_cpp provider needs its engine: {install_command('local')}.")
        needs = ModelNeeds(config.context_tokens, config.parallel, config.memory_gb, config.run_anyway)
        references = [_first_reference(config), *map(parse_reference, config.models)]
        chosen = await choose_models(references, needs, config.fetch_timeout_s)
        for line in chosen.lines:
            sys.stderr.write(f"{line}\n")
        self._pool = self._build_pool(chosen)
        await self._pool.start()

    async def close(self) -> None:
        """End the engines and every stream in progress."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def models(self) -> Sequence[Model]:
        """Return all models, loaded or not. Raises UpstreamError while the engine of every loaded one is down."""
        return self._get_pool().models()

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`. With tools there is at most one call per turn, and the usage includes the decision."""
        self._check_request(request)
        request = add_verbosity(request)
        with self._name_engine_in_errors():
            async with (
                self._get_pool().use(request.model, share_of_salt(request.cache_salt)) as client,
                aclosing(self._generate(client, request)) as batches,
            ):
                async for batch in batches:
                    yield batch

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """See `Inference.complete`. One completion of one prompt; with more than the context, it is refused."""
        refuse_engine_options(request)
        for name in ("n", "echo", "suffix", "logprobs", "stop_token_ids", "repetition_penalty"):
            if (value := getattr(request, name)) is not None and (name, value) not in (("n", 1), ("echo", False)):
                raise Unsupported(f"'{name}' is not supported by the local engine in text completions.", param=name)
        if request.prompt_count > 1:
            raise Unsupported("The local engine completes one prompt per request.", param="prompt")
        bound = self._config.max_output_tokens if request.max_tokens is None else request.max_tokens
        request = request.model_copy(update={"max_tokens": bound})
        with self._name_engine_in_errors():
            async with (
                self._get_pool().use(request.model, share_of_salt(request.cache_salt)) as client,
                aclosing(client.complete(request)) as batches,
            ):
                async for batch in batches:
                    yield batch

    @contextmanager
    def _name_engine_in_errors(self) -> Generator[None]:
        try:
            yield
        except UpstreamTimeout as exc:
            limit = f"token_timeout_s ({self._config.token_timeout_s:g} s)"
            raise UpstreamTimeout(f"The local engine (llama.cpp) made no token within {limit}.") from exc
        except UpstreamError as exc:
            raise UpstreamError(f"The local engine (llama.cpp) failed: {exc.message}") from exc

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the first prompt that the model reads; with tools, the one for the decision."""
        self._check_request(request)
        request = add_verbosity(request)
        choices = request_to_choices(request)
        if choices.tools:
            messages = build_decision_messages(request.messages, choices.tools, may_answer=choices.may_answer)
        else:
            messages = build_answer_messages(request.messages)
        request = request.model_copy(update={"messages": messages})
        tenant = share_of_salt(request.cache_salt)
        async with self._get_pool().use(request.model, tenant, generates=False) as client:
            return await client.count_tokens(request)

    async def _generate(self, client: EngineClient, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        choices = request_to_choices(request)
        named = {tool: f"tools[{index}]" for index, tool in enumerate(tool.name for tool in request.tools or ())}
        constraints = {tool.name: tool_to_constraint(tool, named[tool.name]) for tool in choices.tools}
        answer_constraint = _build_answer_constraint(request)
        await client.check_constraints([one for one in (*constraints.values(), answer_constraint) if one is not None])
        bound = min(request.max_completion_tokens or self._config.max_output_tokens, 2**31 - 1)
        request = request.model_copy(update={"max_completion_tokens": bound})
        if choices.tools:
            batches = ToolTurn(client, request, choices, constraints).generate(answer_constraint)
        else:
            batches = client.chat(
                request.model_copy(update={"messages": build_answer_messages(request.messages)}), answer_constraint
            )
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    def _check_request(self, request: ChatRequest) -> None:
        if request.stop_token_ids:
            raise Unsupported("'stop_token_ids' is not supported by the local engine.", param="stop_token_ids")
        refuse_engine_options(request, ("chat_template_kwargs",))
        check_text_only(request.messages)

    def _build_pool(self, chosen: ChosenModels) -> ModelPool:
        config = self._config
        limits = PoolLimits(chosen.memory_bytes, config.min_loaded_s, config.start_timeout_s, config.token_timeout_s)
        models = [self._build_model(local) for local in chosen.models]
        return ModelPool(models, limits, several_tenants=self._tenants.are_several)

    def _build_model(self, local: LocalModel) -> PooledModel:
        config = self._config
        threads = config.threads or max((os.cpu_count() or 2) - 1, 1)
        settings = LlamaCppSettings(
            local.id,
            str(local.path),
            config.context_tokens,
            config.parallel,
            threads,
            local.sampling,
            str(local.projector_path or ""),
        )
        places = FairShare(
            "requests to the model",
            config.parallel,
            tenant_places=max(1, config.parallel - 1),
            several_tenants=self._tenants.are_several,
        )
        context_tokens = min(config.context_tokens, local.context_tokens or config.context_tokens)
        model = Model(
            id=local.id,
            owned_by="llama.cpp",
            context_tokens=context_tokens,
            modalities=frozenset(),
            enforces=ALL_CONSTRAINTS,
            caches_prefixes=True,
        )
        needed_bytes = local.needed_bytes(config.context_tokens, config.parallel)
        return PooledModel(settings, needed_bytes, model, places)

    def _get_pool(self) -> ModelPool:
        if self._pool is None:
            raise RuntimeError("LlamaCpp is used before start or after close")
        return self._pool


def _first_reference(config: LlamaCpp.Config) -> ModelReference:
    path = config.model_path
    if path is None:
        return parse_reference(config.model)
    return ModelReference(str(path), config.model if "model" in config.model_fields_set else path.stem, path=path)


def _build_answer_constraint(request: ChatRequest) -> Constraint | None:
    match request.response_format:
        case ChatJsonSchemaFormat(json_schema=schema_format):
            return schema_to_constraint(schema_format.schema_, "text.format.schema", strict=bool(schema_format.strict))
        case JsonObjectFormat():
            return schema_to_constraint({"type": "object"}, "text.format", strict=False)
        case _:
            return None
