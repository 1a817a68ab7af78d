"""The hosted tool `file_search`, over the stack's vector stores.

The model receives the best passages, each with a number that it may cite; a citation names the passage's file.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import orjson
from openai.types.responses import (
    ResponseFileSearchToolCall,
)
from openai.types.responses.response_file_search_tool_call import Result
from openai.types.vector_store_search_response import VectorStoreSearchResponse

from apis.chat import ChatFunctionTool, FunctionDefinition, NativeToolName
from apis.deltas import ToolCallStart
from apis.documents.vector_store_requests import SearchStores
from apis.documents.vector_stores import VectorStores
from apis.errors import InvalidRequest, NotFound, StackError, ToolFailed
from apis.events import EventList
from apis.tool_runtime import Source
from apis.wire.tool_items import FileSearchCallItem
from apis.wire.tools import FileSearchTool
from providers.responses.events.citations import one_line
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import RESULT_UNAVAILABLE, Emit, HostedCall, ToolFunctions, TypedTool
from providers.responses.tools.tool_context import ToolContext

_FileSearchStatus = Literal["in_progress", "searching", "completed", "incomplete", "failed"]
_NAME: Final = "file_search"
_MAX_QUERIES: Final = 16
_MAX_QUERY_CHARS: Final = 4096
_MAX_OUTPUT_CHARS: Final = 60_000
FILE_SEARCH_FUNCTION: Final = ChatFunctionTool(
    function=FunctionDefinition(
        name=_NAME,
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


def _create_tool(declaration: FileSearchTool, context: ToolContext) -> TypedTool:
    if context.vector_stores is None:
        raise context.not_configured_error(
            "No file search is configured: give the run config a `vector_stores` section."
        )
    return FileSearch(declaration, context, context.vector_stores)


class FileSearch(TypedTool):
    """The search as one request declares it."""

    def __init__(self, declaration: FileSearchTool, context: ToolContext, stores: VectorStores) -> None:
        self._store_ids = declaration.vector_store_ids
        self._param = context.param
        self._options = declaration.model_dump(exclude={"type", "vector_store_ids"}, exclude_none=True)
        self._tenant = context.tenant
        self._stores = stores

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return [FILE_SEARCH_FUNCTION]

    async def check_declaration(self) -> None:
        for at, store_id in enumerate(self._store_ids):
            try:
                await self._stores.check(store_id, tenant=self._tenant)
            except (NotFound, InvalidRequest) as exc:
                exc.param = f"{self._param}.vector_store_ids[{at}]"
                raise

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return FileSearchCall(self, start)

    async def search(self, queries: Sequence[str]) -> Sequence[VectorStoreSearchResponse]:
        """Return the best passages. Raises ToolFailed for missing stores, too large filters and a failing embedding
        model."""
        request = SearchStores.model_validate({"query": [*queries], **self._options})
        try:
            return await self._stores.search(self._store_ids, request, tenant=self._tenant)
        except StackError as exc:
            raise ToolFailed(f"The files could not be searched: {exc.message}") from exc


class FileSearchCall(HostedCall):
    """One call, with one or more queries."""

    item_type = "file_search_call"

    def __init__(self, tool: FileSearch, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self._queries: list[str] = []
        self._search_results: Sequence[VectorStoreSearchResponse] = ()
        self._error: ToolFailed | None = None

    def item(self, status: str) -> ResponseFileSearchToolCall:
        results = [_result_to_wire(hit) for hit in self._search_results] if status == "completed" else None
        item = ResponseFileSearchToolCall(
            id=self.id,
            type="file_search_call",
            status=cast(_FileSearchStatus, status),
            queries=self._queries,
            results=results,
        )
        if self._error is None:
            return item
        # a field of ours, as an image that failed has it: the reason, which the model reads too
        error = {"type": "file_search_error", "code": self._error.code, "message": self._error.message}
        return item.model_copy(update={"error": error})

    def fail(self, error: ToolFailed) -> EventList:
        self._error = error
        return super().fail(error)

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        await emit([self.phase_event("searching")])
        self._queries = self._parse_queries()
        self._search_results = await self._tool.search(self._queries)
        numbered = output.number_sources(results_to_passages(self._search_results))
        passages = [f"[{number}] {one_line(source.title)}\n{source.text}" for number, source in numbered.items()]
        self.record_result("\n\n".join(passages) or "Nothing was found.", sources=numbered)

    def _parse_queries(self) -> list[str]:
        arguments = self.parse_arguments()
        value: Any = arguments.get("queries", arguments.get("query"))
        queries = cast(list[Any], value) if isinstance(value, list) else [value]
        valid = [text for text in queries if isinstance(text, str) and text.strip() and len(text) <= _MAX_QUERY_CHARS]
        if not valid or len(valid) < len(queries) or len(valid) > _MAX_QUERIES:
            raise ToolFailed(
                f"`{self.name}` needs `queries`: 1 to {_MAX_QUERIES} texts of 1 to {_MAX_QUERY_CHARS} characters."
            )
        return valid


def results_to_passages(results: Sequence[VectorStoreSearchResponse]) -> list[Source]:
    """Return the passages for the model, best first, up to 60,000 characters together."""
    passages: list[Source] = []
    available_chars = _MAX_OUTPUT_CHARS
    for hit in results:
        text = _result_text(hit)[:available_chars]
        if text:
            passages.append(Source("", hit.filename, text, hit.file_id))
        available_chars -= len(text)
    return passages


def _result_to_wire(result: VectorStoreSearchResponse) -> Result:
    return Result(
        attributes=result.attributes,
        file_id=result.file_id,
        filename=result.filename,
        score=result.score,
        text=_result_text(result),
    )


def _result_text(result: VectorStoreSearchResponse) -> str:
    return "\n".join(part.text for part in result.content)


def _call_from_item(item: FileSearchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    if not item.queries or item.status == "failed":
        return None
    text = "\n\n".join(f"{hit.filename or hit.file_id}\n{hit.text or ''}" for hit in item.results or ())
    output = RESULT_UNAVAILABLE if item.results is None else text or "Nothing was found."
    return ToolResultRecord(item.id or "", _NAME, orjson.dumps({"queries": item.queries}).decode(), output)


FILE_SEARCH: Final = ToolFunctions(_create_tool, _call_from_item)
