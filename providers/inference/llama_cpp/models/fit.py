"""Decides by arithmetic which models a machine can run: files, memory of the contexts, and working memory."""

from typing import Final

from apis.errors import ConfigError
from providers.inference.llama_cpp.models.catalogue import CATALOGUE, CatalogueModel
from providers.inference.llama_cpp.models.machine import LocalMachine

_MIB: Final = 2**20
_MAX_WORK_BYTES: Final = 512 * _MIB
_MIN_WORK_BYTES: Final = 128 * _MIB
_CPU_READ_BYTES_PER_TOKEN: Final = 5_000_000_000
"""Weights that a CPU should read for a token, at most: memory of 30 GB/s then makes six tokens in a second."""


def needed_bytes(size_bytes: int, kv_bytes_per_token: int, tokens: int) -> int:
    """Return the memory that a model of that size takes with `tokens` of context in all its slots: an estimate."""
    work_bytes = min(_MAX_WORK_BYTES, _MIN_WORK_BYTES + size_bytes // 20)
    return size_bytes + kv_bytes_per_token * tokens + work_bytes


def catalogue_needed_bytes(model: CatalogueModel, context_tokens: int, parallel: int) -> int:
    """Return the memory that a model of the catalogue takes with `parallel` contexts."""
    tokens = min(context_tokens, model.context_tokens) * parallel
    return needed_bytes(model.size_bytes, model.kv_bytes_per_token, tokens)


def largest_fitting_model(machine: LocalMachine, context_tokens: int, parallel: int) -> CatalogueModel | None:
    """Return the largest chat model of the catalogue that fits the machine, and that a machine without an accelerator
    runs at a useful speed."""
    fitting = [
        model
        for model in CATALOGUE.values()
        if model.kind == "chat"
        and catalogue_needed_bytes(model, context_tokens, parallel) <= machine.model_bytes
        and not (machine.is_cpu_only and _read_bytes(model) > _CPU_READ_BYTES_PER_TOKEN)
    ]
    return max(fitting, key=lambda model: model.size_bytes, default=None)


def check_fit(name: str, needed: int, machine: LocalMachine, limit_bytes: int) -> None:
    """Raise ConfigError with the remedies if a model needs more memory than models may take."""
    if needed <= limit_bytes:
        return
    smaller = largest_fitting_model(machine, 4096, 1)
    instead = f"take a smaller model (`--model {smaller.name}` fits), " if smaller and smaller.name != name else ""
    raise ConfigError(
        f"The model '{name}' needs about {needed / 1e9:.1f} GB of memory, and models may take "
        f"{limit_bytes / 1e9:.1f} GB here ({machine}). To run it, {instead}lower context_tokens or parallel, end other "
        "programs, or raise memory_gb. To try all the same, set run_anyway: true."
    )


def suggestion_lines(machine: LocalMachine, served: str, context_tokens: int, parallel: int) -> list[str]:
    """Return lines for the operator: what the machine is, and the largest model of the catalogue that it runs."""
    lines = [f"This machine: {machine}."]
    largest = largest_fitting_model(machine, context_tokens, parallel)
    if largest is not None and largest.name != served:
        lines.append(
            f"The largest model of the catalogue that runs well here is {largest.name} "
            f"({largest.size_bytes / 1e9:.1f} GB): stack run local --model {largest.name}. All: stack models"
        )
    return lines


def _read_bytes(model: CatalogueModel) -> int:
    return model.read_bytes_per_token or model.size_bytes
