"""RemoteEngineSettings: how a run config describes servers with OpenAI's chat completions API."""

from typing import Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from apis.inference import ALL_CONSTRAINTS, Constraint, Modality
from apis.provider import Provider
from providers.common.net.http.client import headers_to_bytes
from providers.common.net.http.route import Proxy, ProxyRules
from providers.inference.chat_completions.affinity import check_affinity_headers
from providers.inference.chat_completions.answer_stream import EndpointLimits
from providers.inference.chat_completions.body import ChatDialect, UpstreamEngine
from providers.inference.chat_completions.reasoning_tags import TagsOption
from providers.inference.chat_completions.replicas import ReplicaPolicy
from providers.inference.harmony.options import HarmonyOptions

_DEFAULT_LIMITS: Final = EndpointLimits()
NO_PROXY: Final = "none"
"""Value of `proxy` for direct connections in spite of the environment."""


class RemoteEngineSettings(Provider.Config):
    """`engine: openai` sends only fields of OpenAI's own API; `reasoning_field` is then `none` by default.
    `extra_body` is merged over every chat's body. A model that /models does not list does not exist, unless
    `lists_all_models` is false. Servers are checked every `health_interval_s`, one that does not answer each
    second; with 0 never. `modalities` lists the models' input kinds other than text, `enforces` the constraints
    that the server promises to hold (`json_schema`, `grammar`): both with `template: harmony`, by default none, and
    what is not promised is checked.
    `template: harmony` is for gpt-oss on vLLM: prompts are rendered here with the options in `harmony` and sent as
    tokens. `grammars` then says that vLLM enforces them, as it does when started with --structured-outputs-config
    '{"backend": "guidance", "enable_in_reasoning": true}'. `proxy` is the URL of an HTTP proxy for all base
    URLs, such as http://user:password@host:port, or `none` for direct connections; without it HTTPS_PROXY,
    HTTP_PROXY, ALL_PROXY and NO_PROXY apply. `affinity_headers` names presets of AFFINITY_PRESETS and headers of
    any name, by which a router in front of the engines sends the chats of one chain to one of them.
    `reasoning_tags` is for a server without a reasoning parser: its model's tags as a preset, `auto` for that of
    the model's name, or as ReasoningTags. For the other fields see ChatDialect, EndpointLimits and
    ReplicaPolicy."""

    base_url: str | list[str] = "http://127.0.0.1:8000/v1"
    api_key: SecretStr | None = None
    proxy: SecretStr | None = None
    engine: UpstreamEngine = "vllm"
    template: Literal["chat", "harmony"] = "chat"
    harmony: HarmonyOptions = HarmonyOptions()
    grammars: bool = True
    developer_role: Literal["system", "developer"] = "system"
    reasoning_field: Literal["reasoning", "reasoning_content", "none"] | None = None
    reasoning_tags: TagsOption | None = None
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
    max_answer_bytes: int = Field(default=_DEFAULT_LIMITS.max_answer_bytes, ge=1024)
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
        if self.template == "harmony" and self.reasoning_tags is not None:
            raise ValueError("template: harmony has no reasoning_tags: gpt-oss writes none")
        return self

    def build_dialect(self) -> ChatDialect:
        """Return how the server is spoken to."""
        return ChatDialect(
            engine=self.engine,
            developer_role=self.developer_role,
            reasoning_field=self.reasoning_field or ("reasoning" if self.engine == "vllm" else "none"),
            neutralize_control_tokens=self.neutralize_control_tokens,
            extra_body=self.extra_body,
            lists_all_models=self.lists_all_models,
            affinity_headers=tuple(self.affinity_headers),
        )

    def enforced_constraints(self) -> frozenset[Constraint]:
        """Return the constraints that the server holds; the others are checked when its text is complete. Versions and
        flags of a server that ought to hold schemas decide whether it does, so none is believed without its setting."""
        if self.enforces is not None:
            return self.enforces
        return ALL_CONSTRAINTS if self.template == "harmony" and self.grammars else frozenset()

    def build_limits(self) -> EndpointLimits:
        """Return the limits of one model call."""
        return EndpointLimits(
            connect_s=self.connect_timeout_s,
            headers_s=self.headers_timeout_s,
            first_token_s=self.first_token_timeout_s,
            token_gap_s=self.token_gap_timeout_s,
            max_answer_bytes=self.max_answer_bytes,
        )

    def build_proxy_rules(self) -> ProxyRules:
        """Return the proxies on the way to the servers. Raises ValueError for an invalid one in the environment."""
        url = self.proxy.get_secret_value() if self.proxy is not None else ""
        if not url:
            return ProxyRules.from_environment()
        return ProxyRules() if url == NO_PROXY else ProxyRules({"all": url})

    def build_policy(self) -> ReplicaPolicy:
        """Return when requests are repeated and servers are left alone."""
        return ReplicaPolicy(
            max_retries=self.max_retries,
            retry_delay_s=self.retry_delay_s,
            max_retry_delay_s=self.max_retry_delay_s,
            budget=self.retry_budget,
            breaker_failures=self.breaker_failures,
            breaker_window_s=self.breaker_window_s,
        )
