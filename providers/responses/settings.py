"""LoopSettings: the section `responses` of a run config."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, GetCoreSchemaHandler, SecretStr, Tag
from pydantic_core import CoreSchema, core_schema

from apis.provider import UserPath
from apis.responses import Responses
from apis.storage.kv_store import KVStore
from providers.responses.background.workers import BackgroundConfig
from providers.responses.prompts.library import PromptLibrary
from providers.responses.prompts.template import PromptId, StoredPrompt
from providers.responses.store.history import History


def _prompts_tag(value: Any) -> str:
    """Return the tag of the setting's form. Tags contain a space because they must not equal a key of the mapping."""
    return "a folder" if isinstance(value, str | Path) else "a mapping"


class _BuiltWhenUsed:
    """Metadata of a model that validates by itself, so that the schema is built with the first value. That of a prompt
    holds all tools: 14 ms of a start and 2 MB."""

    @classmethod
    def __get_pydantic_core_schema__(cls, model: type[BaseModel], _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(model.model_validate)


_Prompts = dict[PromptId, Annotated[StoredPrompt, _BuiltWhenUsed]]


class LoopSettings(Responses.Config):
    """Responses are deleted `retention_days` after their last use; `max_turns` bounds a chain, and `max_history_bytes`
    what one request loads of a chain or conversation and of items that it refers to. `cache_bytes` of the newest
    conversations stay in memory, and `session_bytes` of those that connections continue without storing them. One
    response may run `max_tool_calls` hosted calls, `parallel_tool_calls` of them at a time, each for `tool_timeout_s`;
    the model reads `max_tool_output_chars` of a result. `reasoning_keys` seal the reasoning that clients store: the
    first seals, all open; without any, the workers on one store share a key that is stored there. An MCP server that
    cannot list its tools fails the response before a model is called, unless `continue_without_mcp_servers`.
    `summary_model` writes the summaries of reasoning that requests ask for; without it they repeat the reasoning. With
    `hide_reasoning` no client reads the text of reasoning, but summaries by `summary_model` and encrypted reasoning.
    `prompts` are the templates that requests refer to by id: a mapping, or a folder of YAML files."""

    retention_days: float = Field(30, gt=0)
    sweep_interval_s: float = Field(600, gt=0)
    max_turns: int = Field(1000, ge=1)
    max_history_bytes: int = Field(64 * 1024 * 1024, ge=1024)
    cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
    session_bytes: int = Field(256 * 1024 * 1024, ge=0)
    max_tool_calls: int = Field(32, ge=1)
    parallel_tool_calls: int = Field(8, ge=1, le=64)
    tool_timeout_s: float = Field(60, gt=0)
    max_tool_output_chars: int = Field(100_000, ge=1000)
    response_timeout_s: float = Field(600, gt=0)
    continue_without_mcp_servers: bool = False
    summary_model: str | None = Field(None, min_length=1)
    hide_reasoning: bool = False
    reasoning_keys: tuple[Annotated[SecretStr, Field(min_length=32)], ...] = ()
    background: BackgroundConfig = BackgroundConfig()
    prompts: (
        Annotated[
            Annotated[UserPath, Tag("a folder")] | Annotated[_Prompts, Tag("a mapping")],
            Discriminator(_prompts_tag),
        ]
        | None
    ) = None

    def build_history(self, kv_store: KVStore) -> History:
        """Return the stored responses and conversations of `kv_store`, within these limits."""
        return History(
            kv_store,
            retention_s=self.retention_days * 86_400,
            max_turns=self.max_turns,
            cache_bytes=self.cache_bytes,
            max_bytes=self.max_history_bytes,
        )

    def prompt_library(self) -> PromptLibrary:
        """Return the library of `prompts`, which a folder's files are not loaded into yet."""
        return PromptLibrary(self.prompts)
