"""VLLM: models on vLLM, or on any other server with OpenAI's chat completions or embeddings API."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from apis.chat import ChatRequest
from apis.completions.completion import CompletionBatch, CompletionRequest
from apis.deltas import DeltaBatch
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ConfigError
from apis.imports import import_from_string, install_command
from apis.inference import ALL_CONSTRAINTS, Constraint, Inference, Modality, Model
from apis.provider import Provider
from apis.wire.base import Effort
from providers.inference.chat_completions.affinity import check_affinity_headers
from providers.inference.chat_completions.body import ChatDialect, UpstreamEngine
from providers.inference.chat_completions.embeddings import join_embeddings, split_request
from providers.inference.chat_completions.endpoint import ChatCompletions, EndpointLimits
from providers.inference.chat_completions.formatted_answers import chat_in_two_passes, needs_two_passes
from providers.inference.chat_completions.health import HealthWatch
from providers.inference.chat_completions.replicas import ReplicaPolicy, Upstreams
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.http.client import HttpClient, headers_to_bytes
from providers.inference.http.route import Proxy, ProxyRules

if TYPE_CHECKING:
    from providers.inference.harmony.completions import HarmonyTemplate


NO_PROXY: Final = "none"
"""Value of `proxy` for direct connections in spite of the environment."""


class VLLM(Inference):
    """Provider over one or more base URLs. Several URLs are replicas: the chats of one chain go to one of them, other
    requests rotate, and one that produced no output yet is retried on another replica."""

    class Config(Provider.Config):
        """`engine: openai` sends only fields of OpenAI's own API; `reasoning_field` is then `none` by default.
        `extra_body` is merged over every chat's body. A model that /models does not list does not exist, unless
        `lists_all_models` is false. Servers are checked every `health_interval_s`, one that does not answer each
        second; with 0 never. `modalities` lists the models' input kinds other than text, `enforces` the constraints
        that the server promises to hold (`json_schema`, `grammar`); by default vLLM holds schemas, and both with
        `template: harmony`, another server none.
        `template: harmony` is for gpt-oss on vLLM: prompts are rendered here with the options in `harmony` and sent as
        tokens. `grammars` then says that vLLM enforces them, as it does when started with --structured-outputs-config
        '{"backend": "guidance", "enable_in_reasoning": true}'. `proxy` is the URL of an HTTP proxy for all base
        URLs, such as http://user:password@host:port, or `none` for direct connections; without it HTTPS_PROXY,
        HTTP_PROXY, ALL_PROXY and NO_PROXY apply. `affinity_headers` names presets of AFFINITY_PRESETS and headers of
        any name, by which a router in front of the engines sends the chats of one chain to one of them. For the other
        fields see ChatDialect, EndpointLimits and ReplicaPolicy."""

        base_url: str | list[str] = "http://127.0.0.1:8000/v1"
        api_key: SecretStr | None = None
        proxy: SecretStr | None = None
        engine: UpstreamEngine = "vllm"
        template: Literal["chat", "harmony"] = "chat"
        harmony: HarmonyOptions = HarmonyOptions()
        grammars: bool = True
        developer_role: Literal["system", "developer"] = "system"
        reasoning_field: Literal["reasoning", "reasoning_content", "none"] | None = None
        neutralize_control_tokens: bool | None = None
        extra_body: dict[str, Any] = Field(default_factory=dict)
        lists_all_models: bool = True
        affinity_headers: str | list[str] = Field(default_factory=list[str])
        modalities: frozenset[Modality] | None = None
        enforces: frozenset[Constraint] | None = None
        connect_timeout_s: float = Field(default=5, gt=0)
        headers_timeout_s: float = Field(default=60, gt=0)
        first_token_timeout_s: float = Field(default=120, gt=0)
        token_gap_timeout_s: float = Field(default=60, gt=0)
        max_answer_bytes: int = Field(default=EndpointLimits().max_answer_bytes, ge=1024)
        max_retries: int = Field(default=2, ge=0, le=10)
        retry_delay_s: float = Field(default=0.5, ge=0)
        max_retry_delay_s: float = Field(default=8, ge=0)
        retry_budget: float = Field(default=0.1, ge=0, le=1)
        breaker_failures: int = Field(default=5, ge=1)
        breaker_window_s: float = Field(default=10, gt=0)
        health_interval_s: float = Field(default=15, ge=0)
        models_cache_s: float = Field(default=3, ge=0)

        @field_validator("base_url")
        @classmethod
        def _check_urls(cls, value: str | list[str]) -> str | list[str]:
            urls = [value] if isinstance(value, str) else value
            if not urls:
                raise ValueError("name at least one base_url")
            for url in urls:
                parts = urlsplit(url)
                if parts.scheme not in ("http", "https") or not parts.hostname:
                    raise ValueError("a base_url looks like http://host:port/v1")
                if parts.username is not None or parts.query or parts.fragment:
                    raise ValueError("a base_url holds no user, query or fragment; give the key as api_key")
            return value

        @field_validator("api_key")
        @classmethod
        def _check_key(cls, value: SecretStr | None) -> SecretStr | None:
            headers_to_bytes({"Authorization": value.get_secret_value() if value else ""})
            return value

        @field_validator("affinity_headers")
        @classmethod
        def _check_affinity_headers(cls, value: str | list[str]) -> list[str]:
            names = [value] if isinstance(value, str) else value
            check_affinity_headers(names)
            return names

        @field_validator("proxy")
        @classmethod
        def _check_proxy(cls, value: SecretStr | None) -> SecretStr | None:
            if value is not None and value.get_secret_value() not in ("", NO_PROXY):
                Proxy.parse(value.get_secret_value())
            return value

        @model_validator(mode="after")
        def _check_template(self) -> Self:
            if self.template == "harmony" and self.engine != "vllm":
                raise ValueError("template: harmony needs engine: vllm")
            return self

    def __init__(self, config: Config) -> None:
        self._config = config
        self._harmony_template: HarmonyTemplate | None = None
        self._http: HttpClient | None = None
        self._upstreams: Upstreams | None = None
        self._health_task: asyncio.Task[None] | None = None
        self._models_cache: tuple[float, Sequence[Model]] | None = None

    async def start(self) -> None:
        """Open the connection pool and begin to check the servers. Nothing waits for them: a server that is down now
        may be up when it is needed. Raises ConfigError for an invalid proxy in the environment."""
        config = self._config
        if config.template == "harmony":
            self._harmony_template = await _load_harmony_template(config)
        self._http = http = HttpClient(proxies=_build_proxy_rules(config))
        urls = [config.base_url] if isinstance(config.base_url, str) else config.base_url
        key = config.api_key if config.api_key and config.api_key.get_secret_value() else None
        dialect, template, limits = _build_dialect(config), self._harmony_template, _build_limits(config)
        try:
            endpoints = [
                ChatCompletions(url, http, api_key=key, dialect=dialect, template=template, limits=limits)
                for url in urls
            ]
        except ValueError as exc:
            raise ConfigError(f"The proxy that the environment sets for base_url is not valid: {exc}.") from exc
        self._upstreams = Upstreams(endpoints, _build_policy(config))
        if config.health_interval_s:
            watch = HealthWatch(self._upstreams.upstreams, config.health_interval_s)
            self._health_task = asyncio.create_task(watch.run())

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
        enforced, caches = _enforced_constraints(self._config), self._config.engine == "vllm"
        models = [replace(model, enforces=enforced, caches_prefixes=caches) for model in models]
        self._models_cache = (time.monotonic() + self._config.models_cache_s, models)
        return models

    def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`."""
        chat = self._get_upstreams().chat
        if self._config.engine == "vllm" and self._harmony_template is None and needs_two_passes(request):
            return chat_in_two_passes(chat, request)
        return chat(request)

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """Forward to the server's /completions. The prompt reaches the model as it is, also with a template here."""
        return self._get_upstreams().complete(request)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """Request vectors from the server's /embeddings, a few inputs at a time. `headers_timeout_s` applies to each
        part."""
        return join_embeddings([await self._get_upstreams().embed(part) for part in split_request(request)])

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
        return await self._get_upstreams().query_any(lambda endpoint: endpoint.count_tokens(request))

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


def _build_dialect(config: VLLM.Config) -> ChatDialect:
    return ChatDialect(
        engine=config.engine,
        developer_role=config.developer_role,
        reasoning_field=config.reasoning_field or ("reasoning" if config.engine == "vllm" else "none"),
        neutralize_control_tokens=config.neutralize_control_tokens,
        extra_body=config.extra_body,
        lists_all_models=config.lists_all_models,
        affinity_headers=tuple(config.affinity_headers),
    )


def _enforced_constraints(config: VLLM.Config) -> frozenset[Constraint]:
    """Return the constraints that the server holds; the others are checked when its text is complete."""
    if config.enforces is not None:
        return config.enforces
    if config.template == "harmony":
        return ALL_CONSTRAINTS if config.grammars else frozenset()
    return frozenset({"json_schema"}) if config.engine == "vllm" else frozenset()


def _build_limits(config: VLLM.Config) -> EndpointLimits:
    return EndpointLimits(
        connect_s=config.connect_timeout_s,
        headers_s=config.headers_timeout_s,
        first_token_s=config.first_token_timeout_s,
        token_gap_s=config.token_gap_timeout_s,
        max_answer_bytes=config.max_answer_bytes,
    )


def _build_proxy_rules(config: VLLM.Config) -> ProxyRules:
    url = config.proxy.get_secret_value() if config.proxy is not None else ""
    if not url:
        return ProxyRules.from_environment()
    return ProxyRules() if url == NO_PROXY else ProxyRules({"all": url})


def _build_policy(config: VLLM.Config) -> ReplicaPolicy:
    return ReplicaPolicy(
        max_retries=config.max_retries,
        retry_delay_s=config.retry_delay_s,
        max_retry_delay_s=config.max_retry_delay_s,
        budget=config.retry_budget,
        breaker_failures=config.breaker_failures,
        breaker_window_s=config.breaker_window_s,
    )
