"""Containers: where a model's programs keep their variables and files from call to call."""

from abc import ABC, abstractmethod
from typing import Literal

from openai.types import ContainerRetrieveResponse as Container
from openai.types.containers import FileRetrieveResponse as ContainerFile
from pydantic import Field, JsonValue

from apis.files import Order
from apis.storage.pages import Page
from apis.wire.base import Wire
from apis.wire.tools import Id, NetworkPolicy

MemoryLimit = Literal["1g", "4g", "16g", "64g"]


class ContainerExpiry(Wire):
    """The container is gone when it was not used for `minutes`."""

    anchor: Literal["last_active_at"]
    minutes: int = Field(ge=1, le=1440)


class CreateContainer(Wire):
    """What is asked of a container that is to be made. `name` is a label: many may have the same."""

    name: str = Field(min_length=1, max_length=256)
    expires_after: ContainerExpiry | None = None
    file_ids: list[Id] | None = Field(default=None, max_length=50)
    memory_limit: MemoryLimit | None = None
    network_policy: NetworkPolicy | None = None
    skills: list[JsonValue] | None = Field(default=None, max_length=200)


class CopyFile(Wire):
    """An uploaded file that is to be put into a container."""

    file_id: Id


class ContainerListParams(Wire):
    """Which of a tenant's containers, or of a container's files, to list; `after` is the id of the last one seen."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=20, ge=1, le=100)
    order: Order = "desc"
    name: str | None = None


class Containers(ABC):
    """The containers of a ToolRuntime, by id, which is also the `session` of its calls. One tenant's id is unknown to
    another.

    A container lives in the memory of one server process, and every process of the same machine, user and store can
    use it. It ends with the process that keeps it (when workers are restarted one by one, each one's containers end
    with it), or earlier: by expiry, or where its place is needed for others. A program that goes past a limit takes the
    container's variables and files along, but not the container.

    All that name a container raise Unsupported (`container_elsewhere`) for one that another machine keeps, and
    Overloaded where its process does not answer or ends meanwhile.
    """

    max_file_bytes: int
    """The largest file that is taken and given out."""

    @abstractmethod
    async def check(self, request: CreateContainer, *, tenant: str) -> None:
        """Raises Unsupported, naming the field, for what no container here can have, NotFound for a file that does not
        exist, and InvalidRequest for one that is too large."""

    @abstractmethod
    async def create(self, request: CreateContainer, *, tenant: str, container_id: str | None = None) -> Container:
        """Make a container, under an id that was told before or a new one; one that there is already is found.

        Raises as `check` does, Overloaded where there is no room now, and StoreUnavailable where the other processes
        cannot be told.
        """

    @abstractmethod
    async def get(self, container_id: str, *, tenant: str) -> Container:
        """The container as it stands, without waiting. Raises NotFound."""

    @abstractmethod
    async def list(self, params: ContainerListParams, *, tenant: str) -> Page[Container]:
        """The tenant's containers on this machine, by the time they were made. Raises InvalidRequest for an `after`
        that is gone."""

    @abstractmethod
    async def delete(self, container_id: str, *, tenant: str) -> None:
        """End the container and all that runs in it. Raises NotFound."""

    @abstractmethod
    async def add_file(self, container_id: str, filename: str, data: bytes, *, tenant: str) -> ContainerFile:
        """Put a file where programs find it, named by the last step of `filename`; one of that name is replaced.

        Raises NotFound, and InvalidRequest for an impossible name or where the container is full.
        """

    @abstractmethod
    async def copy_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        """Put an uploaded file there likewise. Raises NotFound, and Unsupported where no files can be uploaded."""

    @abstractmethod
    async def list_files(self, container_id: str, params: ContainerListParams, *, tenant: str) -> Page[ContainerFile]:
        """The container's files by the time they were written last. Raises as `list` does."""

    @abstractmethod
    async def get_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        """Raises NotFound when there is no such container or file."""

    @abstractmethod
    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        """The file's bytes. Raises NotFound, and InvalidRequest where it is too large to be read."""

    @abstractmethod
    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        """Raises NotFound when there is no such container or file."""
