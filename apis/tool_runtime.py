"""ToolRuntime: runs tools on the server's side for the agent loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apis.containers import Containers
from apis.provider import Provider


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model is told of it. `parameters` is a JSON schema of the arguments object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call to run. `arguments` is the parsed object; `options` is what the request's tool declaration sets and
    the model may not change (a search's allowed domains, for one). `session` names the state that a stateful tool
    keeps between calls (a container, for one); one tenant's name never reaches another's state."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tenant: str = ""
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A page that a result draws on, or a file: that has a `file_id`, its name as `title`, and no URL. `text` is the
    part of it that the model was shown."""

    url: str
    title: str
    text: str = ""
    file_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFile:
    """A file that a call made."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave. `text` is told to the model; `sources` are shown to the client where it asks for them; `data`
    is what a program makes of the outcome, in the form that the tool's own docstring says."""

    text: str
    sources: Sequence[Source] = ()
    files: Sequence[ToolFile] = ()
    data: Any = None


class ToolRuntime(Provider, ABC):
    """Tools by name. Implementations bound every call in time and every result in size."""

    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """The tools this runtime has. Constant after `start`."""

    @abstractmethod
    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Raises ToolFailed with a text for the model, which never holds a secret.

        Cancelling the call stops the work it started.
        """

    def containers(self) -> Containers | None:
        """Where the state of its stateful tools is kept; None where it has no such tools."""
        return None
