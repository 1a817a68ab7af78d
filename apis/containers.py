"""Containers, in which the variables and files of a model's programs live from call to call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from openai.types.container_retrieve_response import ContainerRetrieveResponse as Container
from openai.types.containers import FileRetrieveResponse as ContainerFile
from pydantic import Field

from apis.confinement.commands import CommandEvent, CommandsResult, ShellCommand
from apis.storage.pages import Page
from apis.wire.base import ListParams, Wire
from apis.wire.tools import Id, NetworkPolicy, SkillSource

MemoryLimit = Literal["1g", "4g", "16g", "64g"]


class ContainerExpiry(Wire):
    """Expiry of a container that was not used for `minutes`."""

    anchor: Literal["last_active_at"]
    minutes: int = Field(ge=1, le=1440)


class CreateContainer(Wire):
    """Request for a new container. `name` is a label: many containers may have the same."""

    name: str = Field(min_length=1, max_length=256)
    expires_after: ContainerExpiry | None = None
    file_ids: list[Id] | None = Field(default=None, max_length=50)
    memory_limit: MemoryLimit | None = None
    network_policy: NetworkPolicy | None = None
    skills: list[SkillSource] | None = Field(default=None, max_length=32)


class CopyFile(Wire):
    """Request to copy an uploaded file into a container."""

    file_id: Id


class ContainerListParams(ListParams):
    """Query of a listing of containers or of a container's files."""

    name: str | None = None


@dataclass(frozen=True, slots=True)
class MountedSkill:
    """Skill in a container: the folder `path` holds its files, SKILL.md among them, which programs cannot change."""

    name: str
    description: str
    path: str


class Containers(ABC):
    """Containers of a ToolRuntime by id, which is also the `session` of its calls. A tenant's id is unknown to others.

    A container lives in the memory of its machine, where every process of the same user, store and settings can use it.
    It outlives the process that created it and ends with the last of those processes, or earlier: by expiry, or when
    its place is needed for others. A program that crashes or exceeds a limit ends with the variables of
    the container's programs; the container and its files stay.

    All methods that take a container's id raise Unsupported (`container_elsewhere`) for one of another machine, and
    Overloaded where its process does not answer or ends meanwhile.
    """

    max_file_bytes: int
    """Largest size of a file that can be added and read."""

    @abstractmethod
    async def check(self, request: CreateContainer, *, tenant: str) -> None:
        """Raise Unsupported, naming the field, for a setting that no container here can have, NotFound for a file that
        does not exist, and InvalidRequest for one that is too large."""

    @abstractmethod
    async def list_skills(self, skills: Sequence[SkillSource], *, tenant: str) -> Sequence[MountedSkill]:
        """Return the skills of a request as its container has them. Raise as `Skills.load` does."""

    @abstractmethod
    async def create(self, request: CreateContainer, *, tenant: str, container_id: str | None = None) -> Container:
        """Create a container with this id or a new one; one that exists already is returned.

        Raise as `check` does, Overloaded where there is no room now, and StoreUnavailable where it cannot be recorded.
        """

    @abstractmethod
    async def get(self, container_id: str, *, tenant: str) -> Container:
        """Return the state of the container, without waiting. Raise NotFound."""

    @abstractmethod
    async def update_secrets(self, container_id: str, policy: NetworkPolicy, *, tenant: str) -> None:
        """Take the policy's `domain_secrets` in place of those that the container has: the values of the same names,
        and in a workspace others, too. Raise NotFound."""

    @abstractmethod
    async def list(self, params: ContainerListParams, *, tenant: str) -> Page[Container]:
        """Return the tenant's containers on this machine by their creation time. Raise InvalidRequest for an `after`
        that does not exist."""

    @abstractmethod
    async def delete(self, container_id: str, *, tenant: str) -> None:
        """End the container and all that runs in it. Raise NotFound."""

    @abstractmethod
    async def run_commands(
        self,
        container_id: str,
        commands: Sequence[ShellCommand],
        on_event: Callable[[CommandEvent], None],
        *,
        tenant: str,
    ) -> CommandsResult:
        """Run shell commands at the same time, in the work folder. `on_event` is called with what they write, bounded
        to the beginning and the end, and once with the end of each. Cancelling the call ends all that runs in the
        container. Raise NotFound."""

    @abstractmethod
    async def add_file(self, container_id: str, filename: str, data: bytes, *, tenant: str) -> ContainerFile:
        """Write a file into the work folder, named by the last part of `filename`; one of that name is replaced.

        Raise NotFound, and InvalidRequest for an impossible name or when the container is full.
        """

    @abstractmethod
    async def copy_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        """Write an uploaded file into the work folder, as `add_file` does. Raise NotFound, and Unsupported where no
        files can be uploaded."""

    @abstractmethod
    async def list_files(self, container_id: str, params: ContainerListParams, *, tenant: str) -> Page[ContainerFile]:
        """Return the container's files by the time of their last write. Raise NotFound, or as `list` does."""

    @abstractmethod
    async def get_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        """Return a file's metadata. Raise NotFound when there is no such container or file."""

    @abstractmethod
    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        """Return the file's bytes. Raise NotFound, and InvalidRequest where it is too large to be read."""

    @abstractmethod
    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        """Delete a file. Raise NotFound when there is no such container or file."""
