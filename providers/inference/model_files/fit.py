"""Decides by arithmetic which models a machine can run: files, memory of the contexts, and working memory."""

from dataclasses import dataclass
from typing import Final

from apis.errors import ConfigError
from providers.inference.model_files.catalogue import CATALOGUE, CatalogueModel
from providers.inference.model_files.machine import LocalMachine

_MIB: Final = 2**20
_MAX_WORK_BYTES: Final = 512 * _MIB
_MIN_WORK_BYTES: Final = 128 * _MIB
_CPU_READ_BYTES_PER_TOKEN: Final = 5_000_000_000
"""Weights that a CPU should read for a token, at most: memory of 30 GB/s then makes six tokens in a second."""


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """Settings of the memory that a model takes in addition to its files: `parallel` contexts of `context_tokens`, and
    `prompt_cache_mib` for the caches of prompts that are in no slot. The defaults are those of the run config."""

    context_tokens: int = 8192
    parallel: int = 2
    prompt_cache_mib: int = 256


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model. `trained_tokens` is the context that it was trained for, 0 if that is unknown; an embedding
    model has no prompt cache."""

    file_bytes: int
    kv_bytes_per_token: int
    trained_tokens: int
    is_embedding: bool = False

    def needed_bytes(self, memory: ContextMemory) -> int:
        """Return the memory that the model takes: an estimate."""
        tokens = min(memory.context_tokens, self.trained_tokens or memory.context_tokens) * memory.parallel
        work_bytes = min(_MAX_WORK_BYTES, _MIN_WORK_BYTES + self.file_bytes // 20)
        cache_bytes = 0 if self.is_embedding else memory.prompt_cache_mib * _MIB
        return self.file_bytes + self.kv_bytes_per_token * tokens + work_bytes + cache_bytes


_LEAST_MEMORY: Final = ContextMemory(context_tokens=4096, parallel=1, prompt_cache_mib=0)


def catalogue_size(model: CatalogueModel) -> ModelSize:
    """Return the sizes of a model of the catalogue."""
    return ModelSize(model.size_bytes, model.kv_bytes_per_token, model.context_tokens, model.kind == "embedding")


def catalogue_needed_bytes(model: CatalogueModel, memory: ContextMemory) -> int:
    """Return the memory that a model of the catalogue takes."""
    return catalogue_size(model).needed_bytes(memory)


def largest_fitting_model(machine: LocalMachine, memory: ContextMemory) -> CatalogueModel | None:
    """Return the largest chat model of the catalogue that fits the machine, and that a machine without an accelerator
    runs at a useful speed."""
    fitting = [
        model
        for model in CATALOGUE.values()
        if model.kind == "chat"
        and catalogue_needed_bytes(model, memory) <= machine.model_bytes
        and not (machine.is_cpu_only and _read_bytes(model) > _CPU_READ_BYTES_PER_TOKEN)
    ]
    return max(fitting, key=lambda model: model.size_bytes, default=None)


def check_fit(name: str, needed: int, machine: LocalMachine, limit_bytes: int) -> None:
    """Raise ConfigError with the remedies if a model needs more memory than models may take."""
    if needed <= limit_bytes:
        return
    smaller = largest_fitting_model(machine, _LEAST_MEMORY)
    instead = f"take a smaller model (`--model {smaller.name}` fits), " if smaller and smaller.name != name else ""
    raise ConfigError(
        f"The model '{name}' needs about {needed / 1e9:.1f} GB of memory, and models may take "
        f"{limit_bytes / 1e9:.1f} GB here ({machine}). To run it, {instead}lower context_tokens, parallel or "
        "prompt_cache_mib, end other programs, or raise memory_gb. To try all the same, set run_anyway: true."
    )


def suggestion_lines(machine: LocalMachine, served: str, memory: ContextMemory) -> list[str]:
    """Return lines for the operator: what the machine is, and the largest model of the catalogue that it runs."""
    lines = [f"This machine: {machine}."]
    largest = largest_fitting_model(machine, memory)
    if largest is not None and largest.name != served:
        lines.append(
            f"The largest model of the catalogue that runs well here is {largest.name} "
            f"({largest.size_bytes / 1e9:.1f} GB): stack run local --model {largest.name}. All: stack models"
        )
    return lines


def _read_bytes(model: CatalogueModel) -> int:
    return model.read_bytes_per_token or model.size_bytes
