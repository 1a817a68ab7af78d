"""From the text that names a model (`model:`, `--model`) to the files that it means."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from apis.errors import ConfigError
from providers.inference.model_files.catalogue import CATALOGUE, CatalogueModel, HubFile

HUB_PREFIX: Final = "hf:"
REFERENCE_FORMS: Final = (
    "Name a model of the catalogue (`stack models` lists them), a file of the Hugging Face hub as "
    "hf:OWNER/REPOSITORY/FILE.gguf, or the path of a GGUF file."
)
_HUB_REFERENCE: Final = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[^@]+\.gguf)(?:@(?P<revision>[\w./-]+))?", re.IGNORECASE
)
_PART: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS: Final = 99


@dataclass(frozen=True, slots=True)
class ModelReference:
    """Model that a text names: a `model` of the catalogue, `files` of the hub, or a `path` on this machine. `id` is the
    name under which it is served. `projector_path` is the user's own file through which the model sees images. With
    `draft_tokens` the engine speculates so many tokens ahead: by the model `draft`, or without one by repetition."""

    text: str
    id: str
    model: CatalogueModel | None = None
    files: tuple[HubFile, ...] = ()
    path: Path | None = None
    projector_path: Path | None = None
    draft_tokens: int = 0
    draft: "ModelReference | None" = None


def parse_reference(text: str) -> ModelReference:
    """Return the model that `text` names. Raises ConfigError with the forms that there are."""
    if text in CATALOGUE:
        model = CATALOGUE[text]
        return ModelReference(text, text, model, () if model.package else model.all_files)
    if text.startswith(HUB_PREFIX):
        return _parse_hub_reference(text)
    if text.endswith(".gguf") or "/" in text or "\\" in text or text.startswith("~"):
        path = Path(text).expanduser()
        return ModelReference(text, path.stem, path=path)
    hint = f" Did you mean {' or '.join(near)}?" if (near := _find_near_names(text)) else ""
    raise ConfigError(f"There is no model '{text}' in the catalogue: {', '.join(CATALOGUE)}.{hint} {REFERENCE_FORMS}")


def _find_near_names(text: str) -> list[str]:
    """Return the names of the catalogue that begin as the text does, or are nearly it."""
    name = text.strip().lower()[:64]
    beginning = [each for each in CATALOGUE if name and each.startswith(name)]
    return beginning[:3] or get_close_matches(name, CATALOGUE, n=2, cutoff=0.6)


def part_paths(path: Path) -> list[Path]:
    """Return all files of a model on this machine: one, or every part of a model that is split."""
    return [path.with_name(name) for name in _part_names(path.name)]


def _parse_hub_reference(text: str) -> ModelReference:
    match = _HUB_REFERENCE.fullmatch(text)
    # The hub's paths have no empty or relative parts, and neither has the cache's folder.
    if match is None or any(part in ("", ".", "..") for part in f"{match['repository']}/{match['file']}".split("/")):
        raise ConfigError(f"'{text}' does not name a GGUF file of the hub. {REFERENCE_FORMS}")
    folder, slash, name = match["file"].rpartition("/")
    files = tuple(
        HubFile(match["repository"], folder + slash + part, match["revision"] or "main") for part in _part_names(name)
    )
    part = _PART.fullmatch(name)
    return ModelReference(text, part["stem"] if part else Path(name).stem, files=files)


def _part_names(name: str) -> list[str]:
    part = _PART.fullmatch(name)
    if part is None or not 1 <= int(part["count"]) <= _MAX_PARTS:
        return [name]
    return [f"{part['stem']}-{number:05d}-of-{part['count']}.gguf" for number in range(1, int(part["count"]) + 1)]
