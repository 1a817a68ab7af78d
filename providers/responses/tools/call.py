"""The seam of tools with typed items: what such a tool must give to the loop.

A TypedTool makes a TypedCall for each call of the model's. There are two kinds of calls:

    HostedCall   run here: opens when the model begins it, runs when the turn is over, tells the model what came of it
    ClientCall   run by the client: opens and closes when the turn is over, if its arguments are good; then the
                 response ends. If they are not, the model is told, and the client sees nothing of it
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, cast

import orjson
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from apis.chat import ChatTool, NativeTool
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.tool_runtime import Source
from apis.wire.tool_choice import ChosenHostedTool, ChosenMcpTool
from providers.responses.events.open_items import item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord

EventList = list[ResponseStreamEvent]
_NATIVE_CALL_NAMES: Final = {"browser": ("browser.search", "browser.open", "browser.find"), "python": ("python",)}


class TypedCall(ABC):
    """A call with an item of its own type. `text` is what the model has written of its arguments so far."""

    prefix: str
    """Of the item's id."""
    id: str = ""
    index: int = -1
    tool_result: ToolResultRecord | None = None
    output: ResponseOutput | None = None
    """The output that it is placed in."""

    def __init__(self, start: ToolCallStart) -> None:
        self.call_id = start.id
        self.name = start.name
        self.is_custom = start.custom
        self._argument_chunks: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._argument_chunks)

    def place(self, output: ResponseOutput) -> None:
        """Take the item's id and its index in the output; the item opens next."""
        self.id = output.ids.new_item_id(self.prefix)
        self.index = output.reserve_index()
        self.output = output

    def open(self) -> EventList:
        """The item is added. It has its `id` and `index` by now."""
        return [item_added_event(self.index, self.item("in_progress"))]

    def append(self, text: str, events: EventList) -> None:
        """More of the arguments, as the model writes them; what there is to tell of it is added to `events`."""
        self._argument_chunks.append(text)

    def close(self, status: str) -> EventList:
        """The item is done: `completed`, or `failed` or `incomplete` where it was not run to its end."""
        return [item_done_event(self.index, self.item(status))]

    @abstractmethod
    def item(self, status: str) -> ResponseOutputItem:
        """The item as it stands."""

    def record_result(
        self,
        output: str,
        *,
        sources: Mapping[int, Source] | None = None,
        state: Any = None,
        files: Mapping[str, ContainerFile] | None = None,
    ) -> None:
        """What the model shall be told of this call."""
        bare = {number: replace(source, text="") for number, source in (sources or {}).items()}
        self.tool_result = ToolResultRecord(
            self.call_id, self.name, self.text, output, bare, self.is_custom, state=state, files=files or {}
        )

    def parse_arguments(self) -> dict[str, Any]:
        """The arguments as an object. Raises ToolFailed where the model wrote something else."""
        try:
            arguments: Any = orjson.loads(self.text or "{}")
        except orjson.JSONDecodeError as exc:
            raise ToolFailed(f"The arguments of `{self.name}` are not JSON: {exc}.") from exc
        if not isinstance(arguments, dict):
            raise ToolFailed(f"The arguments of `{self.name}` are not a JSON object.")
        return cast(dict[str, Any], arguments)


class HostedCall(TypedCall):
    """One call of a tool that runs here."""

    @abstractmethod
    def run(self, output: ResponseOutput) -> AsyncGenerator[EventList]:
        """Do the work once the arguments are whole; the last event is the item's done, and `tell` has been called.

        Raises ToolFailed where the work cannot be done. It may be cancelled at any time: the time-out is the loop's.
        """

    counts_toward_limit: bool = True
    """Whether it is one of the calls that a response is bounded in."""

    def close(self, status: str) -> EventList:
        """The same; where a client is to keep what the model was told, the item carries it."""
        item = self.item(status)
        if self.tool_result is not None and self.output is not None and status in ("completed", "failed"):
            sealed = self.output.seal_tool_result(self.tool_result)
            item = item if sealed is None else item.model_copy(update={"encrypted_content": sealed})
        return [item_done_event(self.index, item)]

    def fail(self, error: ToolFailed) -> EventList:
        """End a call that failed, took too long or may not run; the model is told the error's message."""
        if self.name:  # what the model has not called, it is not told of
            self.record_result(error.message)
        return self.close("failed")


class ClientCall(TypedCall):
    """One call of a tool that the client runs."""

    @abstractmethod
    def validate_arguments(self) -> None:
        """Read the arguments, which are whole. Raises ToolFailed with what the model did wrong."""


class TypedTool(ABC):
    """A tool as one request declared it."""

    is_hosted: ClassVar[bool] = True
    """Whether it is run here."""

    @property
    @abstractmethod
    def offered_tools(self) -> Sequence[ChatTool]:
        """What the model is given. It may be another after `before`."""

    @abstractmethod
    def create_call(self, start: ToolCallStart) -> HostedCall | ClientCall:
        """The model has begun to call one of `names`."""

    @property
    def call_names(self) -> Sequence[str]:
        """What its calls are named by the model."""
        return [
            name
            for tool in self.offered_tools
            for name in (_NATIVE_CALL_NAMES[tool.type] if isinstance(tool, NativeTool) else (tool.name,))
        ]

    def names_for_choice(self, choice: ChosenHostedTool | ChosenMcpTool) -> Sequence[str]:
        """The names, of those offered, that a tool choice of this tool means."""
        return [tool.name for tool in self.offered_tools]

    async def check_declaration(self) -> None:
        """Look up what the declaration names. Raises NotFound, or another refusal, naming the field."""
        return

    def calls_before_turn(self, turn_index: int) -> Iterable[HostedCall]:
        """Calls to be made here before the model's turn, which counts from 0, unasked by the model: listing an MCP
        server's tools, for one. Each is run to its end before the next is asked for; other tools' run beside it."""
        return ()
