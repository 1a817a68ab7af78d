"""choose_models: all models of a run config, on this machine and fitting it, before any of them is loaded."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from apis.errors import ConfigError
from providers.common.machine import read_memory
from providers.inference.model_files.fit import ContextMemory, catalogue_needed_bytes, check_fit, suggestion_lines
from providers.inference.model_files.machine import LocalMachine, inspect_machine
from providers.inference.model_files.references import ModelReference
from providers.inference.model_files.resolve import LocalModel, resolve_model

_UNLIMITED: Final = 2**62


@dataclass(frozen=True, slots=True)
class ChosenModels:
    """The models, the memory that they may take together in bytes, and lines for the operator."""

    models: Sequence[LocalModel]
    memory_bytes: int
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Settings that decide how much memory a model takes, and may take."""

    memory: ContextMemory
    memory_gb: float | None = None
    run_anyway: bool = False


async def choose_models(
    references: Sequence[ModelReference], needs: ModelNeeds, fetch_timeout_s: float
) -> ChosenModels:
    """Return the models of the references, fetched and verified.

    A model that does not fit is not downloaded. When something was downloaded, the lines say what this machine is and
    the largest model of the catalogue that it runs. Raises ConfigError.
    """
    _check_ids(references)
    machine: LocalMachine | None = None
    limit_bytes = round(needs.memory_gb * 1e9) if needs.memory_gb is not None else None
    if limit_bytes is None and (len(references) > 1 or not await _fits_memory_alone(references[0], needs)):
        machine = await inspect_machine()
        limit_bytes = machine.model_bytes
    allowed_bytes = _UNLIMITED if needs.run_anyway else limit_bytes
    models: list[LocalModel] = []
    for reference in references:
        if reference.model is not None and allowed_bytes is not None:
            needed = catalogue_needed_bytes(reference.model, needs.memory)
            machine = await _check(reference.id, needed, machine, allowed_bytes)
        local = await resolve_model(reference, fetch_timeout_s, allowed_bytes)
        if allowed_bytes is not None:
            needed = local.size.needed_bytes(needs.memory)
            machine = await _check(reference.id, needed, machine, allowed_bytes)
        models.append(local)
    lines: list[str] = []
    if any(model.downloaded for model in models):
        machine = machine or await inspect_machine()
        lines = suggestion_lines(machine, models[0].id, needs.memory)
    return ChosenModels(models, limit_bytes if limit_bytes is not None else _UNLIMITED, lines)


async def _fits_memory_alone(reference: ModelReference, needs: ModelNeeds) -> bool:
    """Return true if the one model of the catalogue certainly fits, so that the devices need not be looked up."""
    if reference.model is None:
        return False
    memory = await asyncio.to_thread(read_memory)
    return catalogue_needed_bytes(reference.model, needs.memory) <= memory.free_bytes // 2


async def _check(name: str, needed: int, machine: LocalMachine | None, limit_bytes: int) -> LocalMachine | None:
    if needed > limit_bytes:
        machine = machine or await inspect_machine()
        check_fit(name, needed, machine, limit_bytes)
    return machine


def _check_ids(references: Sequence[ModelReference]) -> None:
    texts_by_id: dict[str, str] = {}
    for reference in references:
        if reference.id in texts_by_id:
            both = f"'{texts_by_id[reference.id]}' and '{reference.text}'"
            raise ConfigError(f"{both} would both be served as '{reference.id}'. Remove one.")
        texts_by_id[reference.id] = reference.text
