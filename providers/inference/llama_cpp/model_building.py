"""build_model: from a model on this machine to its entry in the pool and the way it is used."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from apis.errors import ConfigError
from apis.fair_share import FairShare
from apis.imports import import_from_string, install_command
from apis.inference import Model
from providers.inference.chat_completions.reasoning_tags import TagsOption, find_tags
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.llama_cpp.decision_generation import DECISION_ENCODERS, DecisionGeneration
from providers.inference.llama_cpp.embedding_generation import EmbeddingGeneration
from providers.inference.llama_cpp.engine import DraftSettings, LlamaCppSettings
from providers.inference.llama_cpp.generation import Generation, GenerationSettings, TemplateGeneration
from providers.inference.llama_cpp.pool import PooledModel
from providers.inference.model_files.fit import ContextMemory
from providers.inference.model_files.resolve import LocalModel

HARMONY_ARCHITECTURE: Final = "gpt-oss"
"""`general.architecture` of the files whose models read and write Harmony."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of every model of a provider. The prompt cache of `memory` is 0 where there are several tenants: one
    cache for all slots would let them see by the time which prompts the others have sent."""

    memory: ContextMemory
    threads: int
    max_output_tokens: int
    harmony: HarmonyOptions
    reasoning_tags: TagsOption | None
    several_tenants: bool


async def build_model(local: LocalModel, settings: ModelSettings) -> tuple[PooledModel, Generation]:
    """Return the model's entry in the pool and its use. Raises ConfigError for gpt-oss without what it needs."""
    memory = settings.memory
    context_tokens = min(memory.context_tokens, local.size.trained_tokens or memory.context_tokens)
    generation = await _load_generation(local, context_tokens, settings)
    model = generation.describe(
        Model(id=local.id, owned_by="llama.cpp", context_tokens=context_tokens, caches_prefixes=True)
    )
    places = FairShare(
        "requests to the model",
        memory.parallel,
        tenant_places=max(1, memory.parallel - 1),
        several_tenants=settings.several_tenants,
    )
    pooled = PooledModel(
        _build_engine_settings(local, settings),
        local.size.needed_bytes(memory),
        model,
        places,
        find_tags(settings.reasoning_tags, local.id),
    )
    return pooled, generation


def _build_engine_settings(local: LocalModel, settings: ModelSettings) -> LlamaCppSettings:
    memory = settings.memory
    return LlamaCppSettings(
        local.id,
        str(local.path),
        memory.context_tokens,
        memory.parallel,
        settings.threads,
        local.sampling,
        prompt_cache_mib=0 if local.size.is_embedding else memory.prompt_cache_mib,
        projector_path=None if local.projector_path is None else str(local.projector_path),
        is_embedding=local.size.is_embedding,
        reads_at_once=local.size.is_embedding or local.decision_type in DECISION_ENCODERS,
        drafts=_build_drafts(local),
    )


def _build_drafts(local: LocalModel) -> DraftSettings | None:
    if local.draft_tokens == 0:
        return None
    return DraftSettings(local.draft_tokens, None if local.draft_path is None else str(local.draft_path))


async def _load_generation(local: LocalModel, context_tokens: int, settings: ModelSettings) -> Generation:
    if local.size.is_embedding:
        return EmbeddingGeneration(local.vector_dimensions, context_tokens)
    if local.decision_type:
        return DecisionGeneration()
    generation_settings = GenerationSettings(
        slots=settings.memory.parallel,
        context_tokens=context_tokens,
        max_output_tokens=settings.max_output_tokens,
        shares_cache=settings.memory.prompt_cache_mib > 0,
        takes_images=local.projector_path is not None,
        drafts=local.draft_tokens > 0,
        harmony=settings.harmony,
    )
    if local.architecture != HARMONY_ARCHITECTURE:
        return TemplateGeneration(generation_settings)
    try:
        harmony_type: Any = await asyncio.to_thread(
            import_from_string, "providers.inference.llama_cpp.harmony_generation:HarmonyGeneration"
        )
    except ModuleNotFoundError as exc:
        needed = f"gpt-oss needs the package {exc.name}, which is not installed."
        raise ConfigError(f"{needed} Run: {install_command('harmony')}") from exc
    generation: Generation = await harmony_type.load(generation_settings)
    return generation
