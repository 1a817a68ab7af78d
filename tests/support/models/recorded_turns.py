"""A turn with a search and two functions, its events in a few words, and the laws held against them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseStreamEvent,
)

from apis.deltas import Finish, FinishReason, Usage
from apis.responses import CreateResponse
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime, ToolSpec
from apis.wire.tools import WebSearchTool
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import begin_response, end_response
from providers.responses.run.turn import TurnStream
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.registry import ToolBinding
from providers.responses.tools.tool_context import ToolContext
from providers.responses.tools.web_search.tool import WebSearch
from tests.support.laws.stream_laws import check_stream

FUNCTIONS = [{"type": "function", "name": name} for name in ("f", "g")]
REQUEST = CreateResponse.model_validate({"model": "m", "input": "hi", "tools": FUNCTIONS})


class Pages(ToolRuntime):
    """Searches nothing: no call of a turn is run by the turn."""

    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec("search", "Searches.", {"type": "object"})]

    async def call(self, call: ToolCall) -> ToolResult:
        raise NotImplementedError


DECLARED = WebSearchTool(type="web_search")
SEARCH = OfferedTools(REQUEST, [ToolBinding(DECLARED, WebSearch(DECLARED, ToolContext(REQUEST), Pages()))])


def finish(reason: FinishReason = "stop") -> Finish:
    return Finish(reason, Usage(1, 2))


def turn_of(sources: Mapping[int, Source] | None = None) -> tuple[TurnStream, ResponseOutput]:
    output = ResponseOutput(ResponseIds())
    output.sources.update(sources or {})
    return TurnStream(output, SEARCH), output


def line(event: Any) -> str:
    """An event in a few words: what it is, where, and what it carries."""
    name = event.type.removeprefix("response.")
    where = str(event.output_index)
    if hasattr(event, "content_index"):
        where += f".{event.content_index}"
    for key in ("delta", "text", "refusal", "arguments", "input"):
        if (value := getattr(event, key, None)) is not None:
            return f"{where} {name} {value!r}"
    if hasattr(event, "item"):
        phase = f" {event.item.phase}" if getattr(event.item, "phase", None) else ""
        return f"{where} {name} {event.item.type} {event.item.status}{phase}"
    if hasattr(event, "part"):
        text = event.part.refusal if event.part.type == "refusal" else event.part.text
        return f"{where} {name} {event.part.type} {text!r}"
    if hasattr(event, "annotation"):
        cited = event.annotation
        return f"{where} {name} {event.annotation_index}: {cited.url} {cited.start_index}-{cited.end_index}"
    return f"{where} {name}"


def check_laws(
    events: Sequence[ResponseStreamEvent], output: ResponseOutput, ending: Literal["completed", "incomplete", "failed"]
) -> None:
    """Hold the events against the laws of the stream, with a beginning and an end around them."""
    begun = begin_response(REQUEST, "resp_1", created_at=5)
    reason = "max_output_tokens" if ending == "incomplete" else None
    error = ResponseError(code="server_error", message="x") if ending == "failed" else None
    ended = end_response(begun, ending, output.finished_items(), Usage(1, 2), reason=reason, error=error)
    last: dict[str, Any] = {
        "completed": ResponseCompletedEvent,
        "incomplete": ResponseIncompleteEvent,
        "failed": ResponseFailedEvent,
    }
    whole = [
        ResponseCreatedEvent(type="response.created", response=begun, sequence_number=0),
        ResponseInProgressEvent(type="response.in_progress", response=begun, sequence_number=0),
        *events,
        last[ending](type=f"response.{ending}", response=ended, sequence_number=0),
    ]
    check_stream([event.model_copy(update={"sequence_number": number}) for number, event in enumerate(whole)])
