"""GgufLibrary: the models of the catalogue and the GGUF files of the caches, for the command `stack models`."""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from apis.errors import ConfigError
from providers.inference.model_files.catalogue import CATALOGUE, CatalogueModel, HubFile
from providers.inference.model_files.fit import (
    ContextMemory,
    ModelSize,
    catalogue_needed_bytes,
    largest_fitting_model,
)
from providers.inference.model_files.gguf_header import read_header
from providers.inference.model_files.hub import (
    CachedFile,
    list_hub_cache,
    remove_cached_file,
)
from providers.inference.model_files.machine import LocalMachine, inspect_machine
from providers.inference.model_files.packages import PACKAGED_MODELS, is_fetched, models_dir, remove_model
from providers.inference.model_files.references import HUB_PREFIX, ModelReference, parse_reference
from providers.inference.model_files.resolve import resolve_model

_DEFAULT_MEMORY: Final = ContextMemory()
_FETCH_TIMEOUT_S: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """Model that a run config may name. `memory_bytes` is an estimate with the default context, None where only the
    file knows, and so is `fits`. `disk_bytes` are taken by its files now: 0 if it is not there."""

    name: str
    kind: str
    size_bytes: int
    memory_bytes: int | None
    context_tokens: int | None
    licence: str
    source: str
    fits: bool | None
    is_suggested: bool
    disk_bytes: int
    path: str | None


@dataclass(frozen=True, slots=True)
class LibraryListing:
    """All models, this machine in words, the memory that models may take, and the disk that holds them. Sizes are in
    bytes."""

    models: Sequence[LibraryModel]
    machine: str
    memory_bytes: int
    folders: Sequence[str]
    disk_free_bytes: int


class GgufLibrary:
    """The GGUF files of this machine. Packaged models lie in this project's own cache folder, all others in the cache
    that tools of the hub share. All methods raise ConfigError with a remedy."""

    async def list_models(self) -> LibraryListing:
        """Return the models of the catalogue and every other model file that was fetched."""
        inspection = asyncio.create_task(inspect_machine())
        try:
            cache = await list_hub_cache()
        finally:
            machine = await inspection  # no child process of it outlives this call
        largest = largest_fitting_model(machine, _DEFAULT_MEMORY)
        rows = await asyncio.to_thread(_build_rows, machine, largest, cache.files)
        folders = [models_dir(), cache.folder]
        free_bytes = await asyncio.to_thread(_free_bytes, cache.folder)
        return LibraryListing(rows, str(machine), machine.model_bytes, [str(folder) for folder in folders], free_bytes)

    async def pull(self, name: str, on_progress: Callable[[int], None] | None = None) -> str:
        """Fetch and verify the model if it is not there; return its path. Progress is shown on stderr, or `on_progress`
        gets the bytes that are there."""
        reference = _fetched_reference(name)
        return str((await resolve_model(reference, _FETCH_TIMEOUT_S, on_progress=on_progress)).path)

    async def is_on_disk(self, name: str) -> bool:
        """Return True if all files of a model of the catalogue are there."""
        return any(
            model.name == name and model.disk_bytes >= model.size_bytes for model in (await self.list_models()).models
        )

    async def remove(self, name: str) -> int:
        """Remove the model's files; return the bytes that became free. A running server keeps the files it uses until
        it ends."""
        reference = _fetched_reference(name)
        if reference.model is not None and reference.model.package:
            return await asyncio.to_thread(remove_model, PACKAGED_MODELS[reference.model.package], models_dir())
        cached = {(row.repository, row.file) for row in (await list_hub_cache()).files}
        files = [file for file in reference.files if (file.repository, file.file) in cached]
        if not files:
            raise ConfigError(f"The model '{name}' is not on this machine. See: stack models")
        return sum([await remove_cached_file(file.repository, file.file) for file in files])


def _fetched_reference(name: str) -> ModelReference:
    reference = parse_reference(name)
    if reference.path is not None:
        raise ConfigError(f"{name} is a file of your own: it is neither fetched nor removed by this command.")
    return reference


def _build_rows(
    machine: LocalMachine, largest: CatalogueModel | None, cached: Sequence[CachedFile]
) -> list[LibraryModel]:
    rows = [_row_of_catalogue(model, machine, largest, cached) for model in CATALOGUE.values()]
    return [*rows, *_rows_of_others(cached, machine)]


def _row_of_catalogue(
    model: CatalogueModel, machine: LocalMachine, largest: CatalogueModel | None, cached: Iterable[CachedFile]
) -> LibraryModel:
    if model.package:
        packaged = PACKAGED_MODELS[model.package]
        path = models_dir() / packaged.filename
        on_disk = [(packaged.size_bytes, str(path))] if is_fetched(path, packaged) else []
        source = f"package {packaged.requirement}"
    else:
        on_disk = [(row.size_bytes, row.path) for file in model.all_files for row in cached if _is_file(row, file)]
        source = _source(model.files[0])
    memory_bytes = catalogue_needed_bytes(model, _DEFAULT_MEMORY)
    return LibraryModel(
        name=model.name,
        kind=model.kind if model.projector is None else f"{model.kind}, vision",
        size_bytes=model.size_bytes,
        memory_bytes=memory_bytes,
        context_tokens=model.context_tokens,
        licence=model.licence,
        source=source,
        fits=memory_bytes <= machine.model_bytes,
        is_suggested=model is largest,
        disk_bytes=sum(size_bytes for size_bytes, _ in on_disk),
        path=on_disk[0][1] if on_disk else None,
    )


def _rows_of_others(cached: Iterable[CachedFile], machine: LocalMachine) -> Iterator[LibraryModel]:
    files = [file for model in CATALOGUE.values() for file in model.all_files]
    for row in cached:
        if any(_is_file(row, file) for file in files):
            continue
        header = read_header(Path(row.path))
        memory_bytes = context_tokens = None
        if header is not None and header.context_tokens:
            context_tokens = header.context_tokens
            size = ModelSize(row.size_bytes, header.kv_bytes_per_token, context_tokens, header.is_embedding)
            memory_bytes = size.needed_bytes(_DEFAULT_MEMORY)
        yield LibraryModel(
            name=f"{HUB_PREFIX}{row.repository}/{row.file}",
            kind="",
            size_bytes=row.size_bytes,
            memory_bytes=memory_bytes,
            context_tokens=context_tokens,
            licence="",
            source=f"{HUB_PREFIX}{row.repository}/{row.file}",
            fits=None if memory_bytes is None else memory_bytes <= machine.model_bytes,
            is_suggested=False,
            disk_bytes=row.size_bytes,
            path=row.path,
        )


def _source(file: HubFile) -> str:
    return f"{HUB_PREFIX}{file.repository}/{file.file}@{file.revision}"


def _is_file(row: CachedFile, file: HubFile) -> bool:
    return (row.repository, row.file) == (file.repository, file.file)


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free
