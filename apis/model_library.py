"""The library of model files on this machine: which models there are by name, what they need, fetching and removal."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


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


class ModelLibrary(ABC):
    """Model files of one engine. All methods raise ConfigError with a remedy."""

    @abstractmethod
    async def list_models(self) -> LibraryListing:
        """Return the models of the catalogue and every other model file that was fetched."""

    @abstractmethod
    async def pull(self, name: str) -> str:
        """Fetch and verify the model if it is not there, with progress on stderr; return its path."""

    @abstractmethod
    async def remove(self, name: str) -> int:
        """Remove the model's files; return the bytes that became free. A running server keeps the files it uses until
        it ends."""
