"""The seam of hosted tools: what a tool type that the server runs itself must give to the loop."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from apis.inference import FunctionTool
from apis.tool_runtime import Source

Events = list[ResponseStreamEvent]


@dataclass(frozen=True, slots=True)
class Told:
    """A finished hosted call as the model knows it: what it called and what it was told. Kept beside the item, so that
    later turns can show the model the same again."""

    call_id: str
    name: str
    arguments: str
    output: str
    sources: Mapping[int, Source] = field(default_factory=dict[int, Source])
    """The pages it showed, by the numbers that the model may cite them by."""


class HostedCall(ABC):
    """One call of a hosted tool: its item, and its events while the model writes it and while it runs."""

    index: int
    id: str
    call_id: str
    told: Told | None = None

    @abstractmethod
    def open(self) -> Events:
        """The item is added; the call has begun."""

    @abstractmethod
    def append(self, text: str, events: Events) -> None:
        """More of the arguments, as the model writes them."""

    @abstractmethod
    def run(self, sources: Mapping[int, Source]) -> AsyncGenerator[Events]:
        """Do the work once the arguments are whole; the last event is the item's done.

        Afterwards `told` holds the outcome. A tool that fails is an outcome too: the model is told. `sources` are those
        shown so far in this conversation; new ones are numbered on from them.
        """

    @abstractmethod
    def close(self, status: str) -> Events:
        """End a call that will not run, because the model was cut off in it."""

    @abstractmethod
    def refuse(self, reason: str) -> Events:
        """End a call that may not run; the model is told the reason."""

    @abstractmethod
    def item(self, status: str) -> ResponseOutputItem:
        """The item as it stands."""


class HostedTool(ABC):
    """A hosted tool as one request declared it."""

    prefix: str
    """Of its items' ids."""

    @abstractmethod
    def functions(self) -> Mapping[str, FunctionTool]:
        """What the model is offered, by the name it calls."""

    @abstractmethod
    def begin(self, item_id: str, index: int, call_id: str, name: str) -> HostedCall:
        """The model has begun to call the function `name`."""
