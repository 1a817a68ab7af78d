"""The output of one response so far, over all its turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseReasoningItem,
)

from apis.events import EventBatch
from apis.tool_runtime import Source
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord


class ResponseOutput:
    """The items of a response, and the sources and files that tools have shown the model in the conversation."""

    __slots__ = (
        "_max_chars",
        "_tool_result_sealer",
        "files",
        "has_readers",
        "hides_reasoning",
        "ids",
        "is_json",
        "items",
        "reasoning_sealer",
        "sources",
    )

    def __init__(
        self,
        ids: ResponseIds,
        max_tool_output_chars: int = 100_000,
        *,
        reasoning_sealer: Callable[[str], str] | None = None,
        tool_result_sealer: Callable[[ToolResultRecord], str] | None = None,
        is_json: bool = False,
        hides_reasoning: bool = False,
        items: Sequence[ResponseOutputItem] = (),
    ) -> None:
        """The sealers encrypt what the client stores for this server; None where it stores nothing. `is_json` says
        that the text must be JSON, and `hides_reasoning` that no event has the text of reasoning; `items` are those of
        an earlier attempt, which this one resumes."""
        self.ids = ids
        self.reasoning_sealer = reasoning_sealer
        self.is_json = is_json
        self.hides_reasoning = hides_reasoning
        self.items: list[ResponseOutputItem | None] = [*items]
        self.sources: dict[int, Source] = {}
        self.files: dict[str, ContainerFile] = {}
        """Files that programs wrote, by the paths that the model may link to."""
        self.has_readers = True
        """The events of the response are read as they come; otherwise only its end is."""
        self._tool_result_sealer = tool_result_sealer
        self._max_chars = max_tool_output_chars

    def reserve_index(self) -> int:
        """Return the `output_index` of a new item. The one place where it is assigned."""
        self.items.append(None)
        return len(self.items) - 1

    def record_done_items(self, events: EventBatch) -> bool:
        """Put the items that end with these events into the output; return whether there was one."""
        done_events = [event for event in events if isinstance(event, ResponseOutputItemDoneEvent)]
        for event in done_events:
            self.items[event.output_index] = event.item
        return bool(done_events)

    def finished_items(self) -> list[ResponseOutputItem]:
        return [item for item in self.items if item is not None]

    def number_sources(self, sources: Sequence[Source]) -> Mapping[int, Source]:
        """Number sources, continuing after those shown so far: a number means one source in the whole conversation.
        Call it only once the sources are known, because calls run concurrently."""
        numbered = dict(enumerate(sources, max(self.sources, default=0) + 1))
        self.sources.update({number: replace(source, text="") for number, source in numbered.items()})
        return numbered

    def seal_tool_result(self, tool_result: ToolResultRecord) -> str | None:
        """Return the sealed result for a client that stores the conversation; None if the client needs none."""
        if self._tool_result_sealer is None:
            return None
        return self._tool_result_sealer(
            replace(tool_result, output=self.truncate_text(tool_result.output), turn=self.ids.turn)
        )

    def truncate_text(self, text: str) -> str:
        """Return the text, shortened to the limit of tool outputs: its beginning, a mark and its end."""
        if len(text) <= self._max_chars:
            return text
        mark = f"\n[… {len(text) - self._max_chars} characters left out …]\n"
        size = max(0, self._max_chars - len(mark))
        return f"{text[: size - size // 4]}{mark}{text[len(text) - size // 4 :]}"


def count_chars(item: ResponseOutputItem | None) -> int:
    """Return the number of characters that a model has written for an item."""
    match item:
        case ResponseOutputMessage():
            parts = [part.refusal if isinstance(part, ResponseOutputRefusal) else part.text for part in item.content]
        case ResponseReasoningItem():
            parts = [part.text for part in item.content or ()]
        case ResponseFunctionToolCall():
            parts = [item.arguments]
        case ResponseCustomToolCall():
            parts = [item.input]
        case _:
            parts = []
    return sum(map(len, parts))
