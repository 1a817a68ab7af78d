"""From the model that a run config names to files on this machine, fetched if need be, and what they need."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apis.errors import ConfigError
from providers.inference.llama_cpp.models.catalogue import CatalogueModel, Kind
from providers.inference.llama_cpp.models.fit import needed_bytes
from providers.inference.llama_cpp.models.gguf_header import read_header
from providers.inference.llama_cpp.models.hub import fetch_hub_file
from providers.inference.llama_cpp.models.packages import PACKAGED_MODELS, fetch_model, is_fetched, models_dir
from providers.inference.llama_cpp.models.references import ModelReference, part_paths


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Model whose files are on this machine. `path` is the first part of the weights; `kind` is None where only the
    file knows. `context_tokens` is the length that the model was trained for, 0 if that is unknown; `downloaded` says
    that it was fetched just now."""

    id: str
    path: Path
    size_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    projector_path: Path | None = None
    kind: Kind | None = None
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    downloaded: bool = False

    def needed_bytes(self, context_tokens: int, parallel: int) -> int:
        """Return the memory that the model takes with `parallel` contexts: an estimate."""
        tokens = min(context_tokens, self.context_tokens or context_tokens) * parallel
        return needed_bytes(self.size_bytes, self.kv_bytes_per_token, tokens)


async def resolve_model(
    reference: ModelReference, fetch_timeout_s: float, limit_bytes: int | None = None
) -> LocalModel:
    """Return the model that the reference names, after fetching and verifying what is missing; a file of more than
    `limit_bytes` is not fetched. Raises ConfigError."""
    model = reference.model
    if reference.path is not None:
        return await asyncio.to_thread(describe_file, reference.id, reference.path)
    if model is not None and model.package:
        return await _resolve_package(model, fetch_timeout_s)
    fetched = [await fetch_hub_file(file, fetch_timeout_s, limit_bytes) for file in reference.files]
    paths = [path for path, _ in fetched]
    downloaded = any(is_new for _, is_new in fetched)
    if model is None:
        return await asyncio.to_thread(describe_file, reference.id, paths[0], downloaded=downloaded)
    projector_path = paths[-1] if model.projector is not None else None
    return _describe_catalogue_model(model, paths[0], projector_path, downloaded=downloaded)


async def _resolve_package(model: CatalogueModel, fetch_timeout_s: float) -> LocalModel:
    packaged = PACKAGED_MODELS[model.package]
    downloaded = not await asyncio.to_thread(is_fetched, models_dir() / packaged.filename, packaged)
    path = await fetch_model(packaged, models_dir(), fetch_timeout_s)
    return _describe_catalogue_model(model, path, None, downloaded=downloaded)


def _describe_catalogue_model(
    model: CatalogueModel, path: Path, projector_path: Path | None, *, downloaded: bool
) -> LocalModel:
    return LocalModel(
        id=model.name,
        path=path,
        size_bytes=model.size_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        context_tokens=model.context_tokens,
        projector_path=projector_path,
        kind=model.kind,
        sampling=model.sampling,
        downloaded=downloaded,
    )


def describe_file(model_id: str, path: Path, *, downloaded: bool = False) -> LocalModel:
    """Return the model in a file of this machine, or in all parts of it. Raises ConfigError if one is not there."""
    parts = part_paths(path)
    for part in parts:
        if not part.is_file():
            raise ConfigError(f"The model '{model_id}' is not there: there is no file {part}.")
    header = read_header(path)
    return LocalModel(
        id=model_id,
        path=path,
        size_bytes=sum(part.stat().st_size for part in parts),
        kv_bytes_per_token=header.kv_bytes_per_token if header else 0,
        context_tokens=header.context_tokens if header else 0,
        downloaded=downloaded,
    )
