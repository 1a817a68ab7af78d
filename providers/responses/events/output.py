"""What one response has put out so far, over all its turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openai.types.responses import ResponseOutputItem

from apis.tool_runtime import Source
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord


class ResponseOutput:
    """The items of a response so far, and the sources that its conversation's tools have shown the model."""

    def __init__(
        self,
        ids: ResponseIds,
        max_tool_output_chars: int = 100_000,
        *,
        reasoning_sealer: Callable[[str], str] | None = None,
        tool_result_sealer: Callable[[ToolResultRecord], str] | None = None,
        is_json: bool = False,
        items: Sequence[ResponseOutputItem] = (),
    ) -> None:
        """The sealers encrypt what the client stores for this server; None where it stores nothing. `is_json` says
        that the text must be JSON; `items` are those of an earlier attempt, which this one resumes."""
        self.ids = ids
        self.reasoning_sealer = reasoning_sealer
        self.is_json = is_json
        self.items: list[ResponseOutputItem | None] = [*items]
        self.sources: dict[int, Source] = {}
        self.files: dict[str, ContainerFile] = {}
        """Files that programs wrote, by the paths that the model may link to."""
        self.turn = 0
        """Number of the model's turn that is running."""
        self._tool_result_sealer = tool_result_sealer
        self._max_chars = max_tool_output_chars

    def reserve_index(self) -> int:
        """A new item opens: its output_index."""
        self.items.append(None)
        return len(self.items) - 1

    def finished_items(self) -> list[ResponseOutputItem]:
        return [item for item in self.items if item is not None]

    def number_sources(self, sources: Sequence[Source]) -> Mapping[int, Source]:
        """Number sources on from those shown so far: each number means one of them for the whole conversation. To be
        asked for when the sources are there, never before: calls run side by side."""
        numbered = dict(enumerate(sources, max(self.sources, default=0) + 1))
        self.sources.update({number: replace(source, text="") for number, source in numbered.items()})
        return numbered

    def seal_tool_result(self, tool_result: ToolResultRecord) -> str | None:
        """What a client is given of it to keep for us; None where it is given nothing."""
        if self._tool_result_sealer is None:
            return None
        return self._tool_result_sealer(
            replace(tool_result, output=self.truncate_text(tool_result.output), turn=self.turn)
        )

    def truncate_text(self, text: str) -> str:
        """The text as a model may be told it: its beginning and its end, and a mark where it was cut."""
        if len(text) <= self._max_chars:
            return text
        mark = f"\n[… {len(text) - self._max_chars} characters left out …]\n"
        kept = max(0, self._max_chars - len(mark))
        return f"{text[: kept - kept // 4]}{mark}{text[len(text) - kept // 4 :]}"
