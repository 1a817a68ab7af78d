"""ToolRuntime: runs the stack's own tools for the agent loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from apis.provider import Provider

if TYPE_CHECKING:  # only the runtimes that have them load their modules
    from apis.containers import Containers
    from apis.workspaces import Workspaces


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model is offered it. `parameters` is the JSON schema of the arguments object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is the parsed object from the model; `options` come from the request's tool declaration,
    and the model cannot change them (the allowed domains of a search, for one). `session` names the state that a
    stateful tool shares between calls (a container, for one); it is a tenant's own."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tenant: str = ""
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A page or file that a result is based on. A file has a `file_id`, its name as `title`, and an empty URL. `text`
    is the part that the model was shown."""

    url: str
    title: str
    text: str = ""
    file_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFile:
    """A file that a call produced."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. `text` is sent to the model; `sources` are shown to clients that request them; `data` is
    for the program, in the form that the tool's docstring defines."""

    text: str
    sources: Sequence[Source] = ()
    files: Sequence[ToolFile] = ()
    data: Any = None


class ToolRuntime(Provider, ABC):
    """Tools by name. Implementations bound every call in time and every result in size."""

    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """Return the runtime's tools, which never change after `start`."""

    @abstractmethod
    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Raises ToolFailed with a text for the model, which never holds a secret.

        Cancelling the call stops the work it started.
        """

    def containers(self) -> "Containers | None":
        """Return the containers with the state of stateful tools, or None where the runtime has no such tools."""
        return None

    def workspaces(self) -> "Workspaces | None":
        """Return the workspaces of agents, or None where the runtime has none."""
        return None
