"""The seam between the agent loop and the tools: the calls of a turn, and the tools whose calls have items of their own
type.

A type of tool of the registry creates a TypedTool for each declaration of a request, and the tool an ItemCall for each
call by the model. There are two kinds of them:

    HostedCall   run by this server at the end of the turn
    ClientCall   run by the client; it ends the response. If its arguments are invalid, the model receives the error and
                 the client sees no item
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Final, Literal, cast

import orjson
from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel

from apis.chat import ChatFunctionTool, ChatTool, NativeTool, NativeToolName
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList, ResponseStreamEvent
from apis.tool_runtime import Source
from apis.wire.item_types import ITEM_TYPES, ItemType
from apis.wire.tool_choice import ChosenHostedTool, ChosenMcpTool
from providers.responses.events.open_items import EMPTY_ARGUMENTS, GrowingText, item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_events import item_event
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord
from providers.responses.tools.tool_context import ToolContext

Emit = Callable[[EventList], Awaitable[None]]
"""Sends events to the client; it waits while the client reads slowly."""
RESULT_UNAVAILABLE: Final = "[What this gave is not known any more.]"
"""The output that a model sees of a hosted call whose stored result is gone and whose item shows none."""
_NATIVE_CALL_NAMES: Final = {"browser": ("browser.search", "browser.open", "browser.find"), "python": ("python",)}


class Call:
    """A call that the model has begun; its arguments grow. One with a `rejection` becomes no item: its result is the
    reason, which the model reads."""

    index: int = -1
    """Position of its item in the output; -1 until it is there."""
    rejection: str | None = None

    def __init__(self, start: ToolCallStart, rejection: str | None = None) -> None:
        self.call_id = start.id
        self.name = start.name
        self.is_custom = start.custom
        self._argument_text = GrowingText()
        if rejection is not None:
            self.rejection = rejection

    @property
    def text(self) -> str:
        """The arguments that the model has written so far."""
        return str(self._argument_text)

    def append(self, text: str, events: EventList) -> None:
        """Take more of the arguments, and add the events that show them, if any, to `events`."""
        self._argument_text.append(text)

    def end_arguments(self, events: EventList) -> None:
        """Complete the shown arguments, before the item of another call opens."""
        return

    @property
    def has_arguments(self) -> bool:
        """The arguments so far are a whole object."""
        with suppress(ToolFailed):
            self.parse_arguments()
            return bool(self.text.strip())
        return False

    def parse_arguments(self) -> dict[str, Any]:
        """Return the arguments as an object. Raises ToolFailed if the model wrote anything else."""
        try:
            arguments: Any = orjson.loads(self.text.strip() or EMPTY_ARGUMENTS)
        except orjson.JSONDecodeError as exc:
            raise ToolFailed(f"The arguments of `{self.name}` are not JSON: {exc}.") from exc
        if not isinstance(arguments, dict):
            raise ToolFailed(f"The arguments of `{self.name}` are not a JSON object.")
        return cast(dict[str, Any], arguments)


class ItemCall(Call, ABC):
    """A call with an item. `place` sets its `id`, `index` and `output`."""

    item_type: str
    opens: Literal["at once", "when complete", "when valid"] = "at once"
    """When its item opens: as the model begins the call, when it has written all arguments, so that the item shows them
    from its beginning, or at the end of the turn, if the arguments are valid."""
    id: str = ""
    tool_result: ToolResultRecord | None = None
    output: ResponseOutput | None = None
    """The output that it is placed in."""
    tool: "TypedTool | None" = None
    """The tool that it calls, once the turn has resolved its name."""

    @property
    def row(self) -> ItemType:
        """The facts of the type of its item."""
        return ITEM_TYPES[self.item_type]

    def phase_event(self, phase: str, **fields: Any) -> ResponseStreamEvent:
        """Return the event `response.ITEM_TYPE.PHASE` with these fields."""
        return item_event(f"response.{self.item_type}.{phase}", self.id, self.index, **fields)

    def text_event(self, suffix: Literal["delta", "done"], **fields: str) -> ResponseStreamEvent:
        """Return the event of the text that the type streams, `response.ITEM_TYPE_FIELD.SUFFIX`."""
        return item_event(f"{self.row.text_event}.{suffix}", self.id, self.index, **fields)

    def place(self, output: ResponseOutput) -> EventList:
        """Take the item's id and its index in the output, and return the events that open it."""
        self.id = output.ids.new_item_id(self.row.id_prefix)
        self.index = output.reserve_index()
        self.output = output
        return self.open()

    def open(self) -> EventList:
        """Return the events that add the placed item to the output."""
        added = item_added_event(self.index, self.item("in_progress"))
        return [added, self.phase_event("in_progress")] if self.row.has_phases else [added]

    def close(self, status: str) -> EventList:
        """Return the events that end the item: as `completed`, or as `failed` or `incomplete` if it did not finish."""
        return [item_done_event(self.index, self.item(status))]

    @abstractmethod
    def item(self, status: str) -> ResponseOutputItem:
        """Return the item with all that is known of the call now."""

    def record_result(
        self,
        output: str,
        *,
        sources: Mapping[int, Source] | None = None,
        state: Any = None,
        files: Mapping[str, ContainerFile] | None = None,
    ) -> None:
        """Set the result that the model receives for this call, and what later turns need of it."""
        bare = {number: replace(source, text="") for number, source in (sources or {}).items()}
        self.tool_result = ToolResultRecord(
            self.call_id, self.name, self.text, output, bare, self.is_custom, state=state, files=files or {}
        )


class HostedCall(ItemCall):
    """A call of a tool that runs on this server."""

    counts_toward_limit: bool = True
    """True if the call counts toward `max_tool_calls`."""
    timeout_s: float | None = None
    """Seconds that the call may take; None for the `tool_timeout_s` of the deployment."""
    result_index: int = -1
    """Index of the item with the result, which is added in the batch of events that ends the call's; -1 until then."""

    @property
    def last_index(self) -> int:
        """Index of the item with which the call ends; -1 until it is added."""
        return self.index if self.row.result_type is None else self.result_index

    def close_result(self, status: str) -> EventList:
        """Return the events that end the item with the result."""
        return []

    @abstractmethod
    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        """Run the call with its complete arguments, emit the events of its progress, and record its result.

        Raises ToolFailed if the work cannot be done. The loop applies the time-out and may cancel the run at any time.
        """

    def finish(self) -> EventList:
        """Return the events that end a call that has run."""
        return self.close("completed")

    def close(self, status: str) -> EventList:
        """Return the closing events; the item holds the sealed result for a client that stores the conversation."""
        item = self.item(status)
        if self.tool_result is not None and self.output is not None and status in ("completed", "failed"):
            sealed = self.output.seal_tool_result(self.tool_result)
            item = item if sealed is None else item.model_copy(update={"encrypted_content": sealed})
        phase = self.row.closing_phase(status)
        return [*([] if phase is None else [self.phase_event(phase)]), item_done_event(self.index, item)]

    def fail(self, error: ToolFailed) -> EventList:
        """End a call that failed, timed out or may not run; the model receives the error's message."""
        if self.name:  # a call by the server itself has no name, and the model never sees it
            self.record_result(error.message)
        return self.close("failed")


class ClientCall(ItemCall):
    """A call of a tool that the client runs. With one that `is_async` the response does not end."""

    opens = "when valid"
    is_async = False

    def validate_arguments(self) -> None:
        """Read the complete arguments. Raises ToolFailed with a message that says what the model did wrong."""


class TypedTool(ABC):
    """A tool as one request declares it."""

    is_hosted: ClassVar[bool] = True
    """True if the tool runs on this server."""

    @property
    @abstractmethod
    def offered_tools(self) -> Sequence[ChatTool]:
        """The tools that the model is offered. They may change after `calls_before_turn`."""

    def find_description(self, name: str) -> str:
        """Return the description by which the model is offered a tool; empty for one that it was trained on."""
        offered = next((tool for tool in self.offered_tools if tool.name == name), None)
        return (offered.function.description or "") if isinstance(offered, ChatFunctionTool) else ""

    @abstractmethod
    def create_call(self, start: ToolCallStart) -> HostedCall | ClientCall:
        """Return the call that the model has begun, of one of `call_names`."""

    @property
    def call_names(self) -> Sequence[str]:
        """The names by which the model calls the tool."""
        return [
            name
            for tool in self.offered_tools
            for name in (_NATIVE_CALL_NAMES[tool.type] if isinstance(tool, NativeTool) else (tool.name,))
        ]

    @property
    def loaded_names(self) -> Collection[str]:
        """The names of the client's deferred tools that the tool has found since the response began."""
        return ()

    def names_for_choice(self, choice: ChosenHostedTool | ChosenMcpTool) -> Sequence[str]:
        """Return the names of the offered tools that a tool choice of this tool selects."""
        return [tool.name for tool in self.offered_tools]

    async def check_declaration(self) -> None:
        """Look up the objects that the declaration names. Raises InvalidRequest or NotFound, naming the field."""
        return

    def calls_before_turn(self, turn_index: int) -> Iterable[HostedCall]:
        """Yield the calls that the server makes by itself before the model's turn `turn_index`, counted from 0, such as
        the listing of an MCP server's tools. Each runs to its end before the next is requested; those of different
        tools run concurrently."""
        return ()


@dataclass(frozen=True, slots=True)
class ToolFunctions:
    """The functions of a type of tool, which its file has: how its declarations become tools, and how the stored items
    of its calls become calls again."""

    create: Callable[[Any, ToolContext], TypedTool | None]
    """Return the tool of one declaration, or None for one that is ignored. Raises `context.not_configured_error(...)`
    if the server has no provider for it."""
    call_from_item: Callable[[Any, frozenset[NativeToolName]], ToolResultRecord | None]
    """Return the call and the output that an item of the tool's calls shows, in the words of a model with these native
    tools; None if the item shows too little. The output of a client's call is empty."""
    _: KW_ONLY
    call_for_model: Callable[[Any, ToolResultRecord, frozenset[NativeToolName]], ToolResultRecord] | None = None
    """Return the stored result of an item with the call rewritten in the words of a model with these native tools.
    None for a tool that all models call in the same way."""
    output_from_item: Callable[[Any, Mapping[str, str]], tuple[str, str] | None] = lambda item, call_ids: None
    """Return the call id and the text of a client's output item. `call_ids` maps item ids to call ids."""
    sum_usage: Callable[[Sequence[Any], Mapping[str, ToolResultRecord]], Mapping[str, BaseModel]] | None = None
    """Return the fields of a response's `tool_usage` for its items of this tool, with the results of all calls by item
    id. None for a tool that counts nothing there."""
