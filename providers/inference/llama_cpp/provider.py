"""LlamaCpp: a small model on this machine, installed as a wheel: the default that always works.

llama.cpp runs in a child process (engine.py) and is used as a chat-completions server on loopback.
"""

import asyncio
import importlib.util
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from pydantic import Field

from apis.chat import ChatJsonSchemaFormat, ChatRequest, refuse_engine_options, share_of_salt
from apis.completions.completion import CompletionBatch, CompletionRequest
from apis.deltas import DeltaBatch
from apis.errors import ConfigError, ModelNotFound, Unsupported, UpstreamError, UpstreamTimeout
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.imports import install_command
from apis.inference import ALL_CONSTRAINTS, Inference, Model
from apis.provider import Provider, UserPath
from apis.wire.text_format import JsonObjectFormat
from providers.inference.http.client import HttpClient
from providers.inference.llama_cpp.client import Constraint, EngineClient, schema_to_constraint
from providers.inference.llama_cpp.engine import LlamaCppEngine, LlamaCppSettings
from providers.inference.llama_cpp.model import MODEL_REMEDY, PACKAGED_MODELS, fetch_model, models_dir
from providers.inference.llama_cpp.prompts import (
    add_verbosity,
    build_answer_messages,
    build_decision_messages,
    check_text_only,
)
from providers.inference.llama_cpp.tools import ToolTurn, request_to_choices, tool_to_constraint


class LlamaCpp(Inference):
    """One text model. Tools work with any model: it first decides, then fills in the input that the tool's schema
    allows."""

    class Config(Provider.Config):
        """`model_path` is any GGUF file, served under `model` or the file's name; without it, `model` is fetched from
        the package index at the first start. `parallel` requests are served at once, each with `context_tokens` of its
        own, and others wait, in turn by tenant; memory grows with both. `threads` defaults to all cores but one.
        `max_output_tokens` applies to requests without a limit, `token_timeout_s` to the wait for each token."""

        model: str = Field("smollm2-135m-instruct", min_length=1, max_length=256)
        model_path: UserPath | None = None
        context_tokens: int = Field(8192, ge=256, le=2**20)
        parallel: int = Field(2, ge=1, le=64)
        threads: int | None = Field(None, ge=1, le=1024)
        max_output_tokens: int = Field(2048, ge=1)
        start_timeout_s: float = Field(120, gt=0)
        fetch_timeout_s: float = Field(1800, gt=0)
        token_timeout_s: float = Field(600, gt=0)

    def __init__(self, config: Config, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
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
        threads = config.threads or max((os.cpu_count() or 2) - 1, 1)
        settings = LlamaCppSettings(
            self._model.id, str(path), config.context_tokens, config.parallel, threads, sampling
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
        self._model = replace(self._model, context_tokens=context_tokens)

    async def close(self) -> None:
        """End the engine and every stream in progress."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def models(self) -> Sequence[Model]:
        """Return the one model. Raises UpstreamError while the engine is down."""
        self._get_client()
        return [self._model]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`. With tools there is at most one call per turn, and the usage includes the decision."""
        self._check_request(request)
        request = add_verbosity(request)
        with self._name_engine_in_errors(), await self._places.acquire(share_of_salt(request.cache_salt)):
            async with aclosing(self._generate(self._get_client(), request)) as batches:
                async for batch in batches:
                    yield batch

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """See `Inference.complete`. One completion of one prompt; with more than the context, it is refused."""
        self._check_model(request.model)
        refuse_engine_options(request)
        for name in ("n", "echo", "suffix", "logprobs", "stop_token_ids", "repetition_penalty"):
            if (value := getattr(request, name)) is not None and (name, value) not in (("n", 1), ("echo", False)):
                raise Unsupported(f"'{name}' is not supported by the local engine in text completions.", param=name)
        if request.prompt_count > 1:
            raise Unsupported("The local engine completes one prompt per request.", param="prompt")
        bound = self._config.max_output_tokens if request.max_tokens is None else request.max_tokens
        request = request.model_copy(update={"max_tokens": bound})
        with self._name_engine_in_errors(), await self._places.acquire(share_of_salt(request.cache_salt)):
            async with aclosing(self._get_client().complete(request)) as batches:
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
        return await self._get_client().count_tokens(request.model_copy(update={"messages": messages}))

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
        self._check_model(request.model)
        if request.stop_token_ids:
            raise Unsupported("'stop_token_ids' is not supported by the local engine.", param="stop_token_ids")
        refuse_engine_options(request, ("chat_template_kwargs",))
        check_text_only(request.messages)

    def _check_model(self, model: str) -> None:
        if model != self._model.id:
            raise ModelNotFound(model, [self._model.id])

    def _get_client(self) -> EngineClient:
        if self._engine is None or self._http is None:
            raise RuntimeError("LlamaCpp is used before start or after close")
        return EngineClient(self._engine.address(), self._http, self._config.token_timeout_s, self._verdicts)


def _model_id(config: LlamaCpp.Config) -> str:
    if config.model_path is None or "model" in config.model_fields_set:
        return config.model
    return config.model_path.stem


def _build_answer_constraint(request: ChatRequest) -> Constraint | None:
    match request.response_format:
        case ChatJsonSchemaFormat(json_schema=schema_format):
            return schema_to_constraint(schema_format.schema_, "text.format.schema", strict=bool(schema_format.strict))
        case JsonObjectFormat():
            return schema_to_constraint({"type": "object"}, "text.format", strict=False)
        case _:
            return None
