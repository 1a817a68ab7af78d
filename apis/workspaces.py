"""Workspaces: containers with the work folder /workspace, which begin with what their owner has of them."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from apis.documents.files import Files
from apis.skills.skills import Skills
from apis.wire.tools import NetworkPolicy, SkillSource

WORKSPACE_PREFIX: Final = "cntr_env_"
"""Beginning of the id of a container that is a workspace."""
WORKSPACE_FOLDER: Final = "/workspace"
OUTPUTS_FOLDER: Final = "/workspace/outputs"

Restore = Callable[[str, str], Awaitable[bool]]
"""Takes the tenant and the id of a workspace that is gone, and returns True once there is one again."""


@dataclass(frozen=True, slots=True)
class WorkspaceRequest:
    """Request for a workspace, which ends `idle_minutes` after its last use. `variables` are those of its programs."""

    name: str
    idle_minutes: int
    network_policy: NetworkPolicy | None = None
    skills: Sequence[SkillSource] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class WorkspaceContents:
    """Contents of a new workspace: an archive that `pack` has returned, and then files, by their absolute paths.
    `notice` says what a restored
    one lacks, for the model."""

    archive: bytes = b""
    files: Sequence[tuple[str, bytes]] = ()
    notice: str = ""


@dataclass(frozen=True, slots=True)
class WorkspaceFile:
    """File of a workspace, by its absolute path."""

    path: str
    size_bytes: int


class Workspaces(ABC):
    """Workspaces by the id of their container, which the shell and the routes of containers take as well.

    A workspace exists with all of its contents or not at all. All methods that take an id raise NotFound, Unsupported
    and Overloaded as those of Containers do.
    """

    max_file_bytes: int
    """Largest size of a file that can be written and read."""
    files: Files | None
    """The uploads that can be copied into a workspace."""
    skills: Skills
    """The skills that a workspace can have."""

    @abstractmethod
    def restore_with(self, restore: Restore) -> None:
        """Call `restore` where a workspace is used that is gone, and then use it again."""

    @abstractmethod
    def open_hosts(self) -> Sequence[str]:
        """Return the domains that the run config opens at the usual ports."""

    @abstractmethod
    async def check(self, request: WorkspaceRequest, *, tenant: str) -> None:
        """Raise as `Containers.check` does, and InvalidRequest for a variable that no workspace can have; `param` is a
        field of the request: `network`, `skills` or `env`."""

    @abstractmethod
    async def create(
        self, workspace_id: str, request: WorkspaceRequest, contents: WorkspaceContents, *, tenant: str
    ) -> bool:
        """Create a workspace; return False where there is one already. Raise as `Containers.create` does, and
        InvalidRequest where the contents do not fit."""

    @abstractmethod
    async def update_secrets(self, workspace_id: str, policy: NetworkPolicy, *, tenant: str) -> None:
        """Take the policy's `domain_secrets` in place of those that the workspace has, for its next commands."""

    @abstractmethod
    async def end(self, workspace_id: str, *, tenant: str) -> None:
        """End a workspace and all that runs in it, if there is one."""

    @abstractmethod
    async def exists(self, workspace_id: str, *, tenant: str) -> bool:
        """Return whether the workspace is there, and restore none."""

    @abstractmethod
    async def pack(self, workspace_id: str, *, tenant: str) -> bytes:
        """Return an archive of the work folder. Raise InvalidRequest where it is too large."""

    @abstractmethod
    async def list_files(self, workspace_id: str, folder: str, *, tenant: str) -> Sequence[WorkspaceFile]:
        """Return the files of a folder and those below it, without hidden ones, at most 2,000."""

    @abstractmethod
    async def read_file(self, workspace_id: str, path: str, *, tenant: str) -> bytes:
        """Return the bytes of a file. Raise InvalidRequest where it is too large to be read."""

    @abstractmethod
    async def write_file(self, workspace_id: str, path: str, data: bytes, *, tenant: str) -> None:
        """Write a whole file, and the folders above it. Raise InvalidRequest where it cannot be written."""


def is_workspace_path(path: str) -> bool:
    """Return True for an absolute path of a file in the work folder."""
    name = path.removeprefix(f"{WORKSPACE_FOLDER}/")
    steps = name.split("/")
    return (
        name != path
        and name.isprintable()
        and "\\" not in name
        and len(name.encode(errors="replace")) <= 255
        and not any(step in ("", ".", "..") for step in steps)
    )
