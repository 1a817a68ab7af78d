"""ModelInstaller: fetches further models for an inference while it serves; the objects of the routes below
/v1/stack/models."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from apis.wire.base import Wire

PullStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


class PullModel(Wire):
    """POST /v1/stack/models/pull: the name of a model in the list."""

    name: str = Field(min_length=1, max_length=256)


@dataclass(frozen=True, slots=True)
class ModelPull:
    """The fetch of one model. `error` says why it failed and what to do; sizes are in bytes, times in Unix seconds."""

    model: str
    status: PullStatus
    total_bytes: int
    done_bytes: int
    created_at: float
    error: str | None


@dataclass(frozen=True, slots=True)
class InstallableModel:
    """A model that the server may fetch. `reason` says why this machine cannot run or hold it, None where it can;
    `is_suggested` marks the best one for this machine, `is_served` those that requests may name now."""

    name: str
    kind: str
    licence: str
    size_bytes: int
    memory_bytes: int
    reason: str | None
    is_suggested: bool
    is_served: bool


@dataclass(frozen=True, slots=True)
class ModelLibrary:
    """The models that the server may fetch, this machine in words, and what is free of it, in bytes."""

    models: Sequence[InstallableModel]
    machine: str
    memory_bytes: int
    disk_free_bytes: int


class ModelInstaller(ABC):
    """Fetches models of its catalogue to this machine, one at a time; its inference serves them from then on, also
    after a restart. A fetch survives the process that began it, and continues where it broke off."""

    @abstractmethod
    async def list_library(self) -> ModelLibrary:
        """Return the models of the catalogue. Raises UpstreamError where the machine cannot be inspected."""

    @abstractmethod
    async def begin_pull(self, name: str) -> ModelPull:
        """Begin to fetch a model. Raises InvalidRequest for one that the catalogue lacks, or that fits neither memory
        nor disk, and Conflict for one that is served, and while another one is fetched."""

    @abstractmethod
    async def find_pull(self) -> ModelPull | None:
        """Return the present fetch, else the last one, None where there was none."""

    @abstractmethod
    async def cancel_pull(self) -> ModelPull | None:
        """Cancel the present fetch, and return the last one; what was fetched stays on the disk, for the next one."""
