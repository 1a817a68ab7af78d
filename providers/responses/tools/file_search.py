"""The hosted file search: `file_search`, over the stack's vector stores.

The model is told the passages that fit best, each by a number that it may cite; a citation names the passage's file.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal, cast

from openai.types import VectorStoreSearchResponse
from openai.types.responses import (
    ResponseFileSearchCallCompletedEvent,
    ResponseFileSearchCallInProgressEvent,
    ResponseFileSearchCallSearchingEvent,
    ResponseFileSearchToolCall,
)
from openai.types.responses.response_file_search_tool_call import Result

from apis.chat import Function, FunctionTool
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, NotFound, StackError, ToolFailed
from apis.tool_runtime import Source
from apis.vector_stores import SearchStores, VectorStores
from apis.wire.tools import FileSearchTool
from providers.responses.context.replay import FILE_SEARCH
from providers.responses.events.output import Output
from providers.responses.tools.call import Events, HostedCall, TypedTool
from providers.responses.tools.tool_context import Setting
from providers.responses.tools.web_search.pages import one_line

Status = Literal["in_progress", "searching", "completed", "incomplete", "failed"]
_MAX_QUERIES: Final = 16
_MAX_QUERY_CHARS: Final = 4096
_MAX_TOLD_CHARS: Final = 60_000
FUNCTION: Final = FunctionTool(
    function=Function(
        name=FILE_SEARCH,
        description="Search the user's files. Gives the passages that fit best, each with a number. "
        "Cite a passage in the answer by its number in lenticular brackets, like 【1】.",
        parameters={
            "type": "object",
            "properties": {
                "queries": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "What to look for: one question, or several put in different words.",
                }
            },
            "required": ["queries"],
            "additionalProperties": False,
        },
    )
)


def make_file_search(declared: FileSearchTool, setting: Setting) -> TypedTool:
    """The search of a request, where vector stores are configured."""
    if setting.vector_stores is None:
        raise setting.missing("No file search is configured: give the run config a `vector_stores` section.")
    return FileSearch(declared, setting, setting.vector_stores)


class FileSearch(TypedTool):
    """The search as one request declared it."""

    def __init__(self, declared: FileSearchTool, setting: Setting, stores: VectorStores) -> None:
        self._store_ids = declared.vector_store_ids
        self._param = setting.param
        self._options = declared.model_dump(exclude={"type", "vector_store_ids"}, exclude_none=True)
        self._tenant = setting.tenant
        self._stores = stores
        self.shows_results = setting.includes("file_search_call.results")

    @property
    def offered(self) -> Sequence[FunctionTool]:
        return [FUNCTION]

    async def check(self) -> None:
        for at, store_id in enumerate(self._store_ids):
            try:
                await self._stores.check(store_id, tenant=self._tenant)
            except (NotFound, InvalidRequest) as exc:
                exc.param = f"{self._param}.vector_store_ids[{at}]"
                raise

    def begin(self, start: ToolCallStart) -> HostedCall:
        return FileSearchCall(self, start)

    async def search(self, queries: Sequence[str]) -> Sequence[VectorStoreSearchResponse]:
        """Raises ToolFailed for stores that are not there, for filters that are too much, and for an embedding model
        that fails."""
        request = SearchStores.model_validate({"query": [*queries], **self._options})
        try:
            return await self._stores.search(self._store_ids, request, tenant=self._tenant)
        except StackError as exc:
            raise ToolFailed(f"The files could not be searched: {exc.message}") from exc


class FileSearchCall(HostedCall):
    """One call, which may ask in several words at once."""

    prefix = "fs"

    def __init__(self, tool: FileSearch, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._queries: list[str] = []
        self._found: Sequence[VectorStoreSearchResponse] = ()

    def item(self, status: str) -> ResponseFileSearchToolCall:
        results = [_result(hit) for hit in self._found] if self._tool.shows_results and status == "completed" else None
        return ResponseFileSearchToolCall(
            id=self.id,
            type="file_search_call",
            status=cast(Status, status),
            queries=self._queries,
            results=results,
        )

    def open(self) -> Events:
        begun = ResponseFileSearchCallInProgressEvent(
            type="response.file_search_call.in_progress", item_id=self.id, output_index=self.index, sequence_number=0
        )
        return [*super().open(), begun]

    async def run(self, output: Output) -> AsyncGenerator[Events]:
        yield [
            ResponseFileSearchCallSearchingEvent(
                type="response.file_search_call.searching", item_id=self.id, output_index=self.index, sequence_number=0
            )
        ]
        self._queries = self._asked()
        self._found = await self._tool.search(self._queries)
        numbered = output.cite(passages_of(self._found))
        passages = [f"[{number}] {one_line(each.title)}\n{each.text}" for number, each in numbered.items()]
        self.tell("\n\n".join(passages) or "Nothing was found.", sources=numbered)
        completed = ResponseFileSearchCallCompletedEvent(
            type="response.file_search_call.completed", item_id=self.id, output_index=self.index, sequence_number=0
        )
        yield [completed, *self.close("completed")]

    def _asked(self) -> list[str]:
        arguments = self.arguments()
        given: Any = arguments.get("queries", arguments.get("query"))
        queries = cast(list[Any], given) if isinstance(given, list) else [given]
        fit = [each for each in queries if isinstance(each, str) and each.strip() and len(each) <= _MAX_QUERY_CHARS]
        if not fit or len(fit) < len(queries) or len(fit) > _MAX_QUERIES:
            raise ToolFailed(
                f"`{self.name}` needs `queries`: 1 to {_MAX_QUERIES} texts of 1 to {_MAX_QUERY_CHARS} characters."
            )
        return fit


def passages_of(found: Sequence[VectorStoreSearchResponse]) -> list[Source]:
    """The passages for the model, best first, until they are too much to read."""
    passages: list[Source] = []
    left = _MAX_TOLD_CHARS
    for hit in found:
        text = _text(hit)[:left]
        if text:
            passages.append(Source("", hit.filename, text, hit.file_id))
        left -= len(text)
    return passages


def _result(hit: VectorStoreSearchResponse) -> Result:
    return Result(
        attributes=hit.attributes, file_id=hit.file_id, filename=hit.filename, score=hit.score, text=_text(hit)
    )


def _text(hit: VectorStoreSearchResponse) -> str:
    return "\n".join(part.text for part in hit.content)
