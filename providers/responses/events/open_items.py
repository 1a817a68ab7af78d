"""Items while they are being made: each opens once, grows by deltas, and closes once, and tells so in typed events.

Every event is made with `sequence_number=0`; the number is given where the stream leaves (loop.py).
"""

from collections.abc import Callable, Hashable, Sequence
from pathlib import PurePosixPath
from typing import Final, Literal, Protocol

from openai.types.responses import (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCustomToolCall,
    ResponseCustomToolCallInputDoneEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseOutputTextAnnotationAddedEvent,
    ResponseReasoningItem,
    ResponseReasoningTextDoneEvent,
    ResponseRefusalDeltaEvent,
    ResponseRefusalDoneEvent,
    ResponseStreamEvent,
    ResponseTextDoneEvent,
)
from openai.types.responses.response_content_part_added_event import PartReasoningText
from openai.types.responses.response_content_part_done_event import PartReasoningText as DonePartReasoningText
from openai.types.responses.response_output_text import (
    AnnotationContainerFileCitation,
    AnnotationFileCitation,
    AnnotationURLCitation,
)
from openai.types.responses.response_reasoning_item import Content

from apis.deltas import RefusalDelta, TextDelta, TokenLogprob
from apis.events import EventList
from apis.wire.base import Phase
from providers.responses.events.citations import CitationScanner, CitationTarget
from providers.responses.events.token_events import (
    arguments_delta_event,
    input_delta_event,
    reasoning_delta_event,
    text_delta_event,
)

FinalItemStatus = Literal["completed", "incomplete"]
Citation = AnnotationURLCitation | AnnotationFileCitation | AnnotationContainerFileCitation
_MAX_CITATIONS: Final = 2000
"""Of one part: a model that goes round in circles must not make an item that takes long to tell. The links go on."""


class OpenItem(Protocol):
    """An item between its `output_item.added` and its `output_item.done`."""

    index: int

    def open(self) -> EventList: ...

    def close(self, status: FinalItemStatus) -> EventList: ...

    def item(self, status: FinalItemStatus) -> ResponseOutputItem: ...


def item_added_event(index: int, item: ResponseOutputItem) -> ResponseOutputItemAddedEvent:
    return ResponseOutputItemAddedEvent(
        type="response.output_item.added", output_index=index, item=item, sequence_number=0
    )


def item_done_event(index: int, item: ResponseOutputItem) -> ResponseOutputItemDoneEvent:
    return ResponseOutputItemDoneEvent(
        type="response.output_item.done", output_index=index, item=item, sequence_number=0
    )


class OpenMessage:
    """An assistant message: parts of text and refusal, one after the other."""

    def __init__(self, item_id: str, index: int, phase: Phase | None, citation_scanner: CitationScanner | None) -> None:
        self.id = item_id
        self.index = index
        self.phase: Phase | None = phase
        self._citation_scanner = citation_scanner
        self._parts: list[ResponseOutputText | ResponseOutputRefusal] = []
        self._part_kind: type[TextDelta | RefusalDelta] | None = None
        self._pieces: list[str] = []
        self._text_length = 0
        self._annotations: dict[Hashable, Citation] = {}
        self._logprobs: list[TokenLogprob] = []

    def item(self, status: Literal["in_progress"] | FinalItemStatus) -> ResponseOutputMessage:
        message = ResponseOutputMessage(
            id=self.id, type="message", role="assistant", status=status, content=[*self._parts]
        )
        if self.phase is not None:
            message.phase = self.phase
        return message

    def open(self) -> EventList:
        return [item_added_event(self.index, self.item("in_progress"))]

    def append(self, delta: TextDelta | RefusalDelta, events: EventList) -> None:
        """Add the events of one more delta to `events`."""
        if self._part_kind is not type(delta):
            self._close_part(events)
            self._open_part(type(delta), events)
        if isinstance(delta, RefusalDelta):
            self._pieces.append(delta.text)
            events.append(
                ResponseRefusalDeltaEvent(
                    type="response.refusal.delta",
                    item_id=self.id,
                    output_index=self.index,
                    content_index=len(self._parts),
                    delta=delta.text,
                    sequence_number=0,
                )
            )
        elif self._citation_scanner is None:
            self._append_text(delta.text, delta.logprobs, events)
        else:
            self._logprobs.extend(delta.logprobs)
            self._append_cited_text(self._citation_scanner, self._citation_scanner.feed(delta.text), events)

    def close(self, status: FinalItemStatus) -> EventList:
        events: EventList = []
        if self._part_kind is None and not self._parts:
            self._open_part(TextDelta, events)
        self._close_part(events)
        events.append(item_done_event(self.index, self.item(status)))
        return events

    def _append_text(self, text: str, logprobs: Sequence[TokenLogprob], events: EventList) -> None:
        self._pieces.append(text)
        self._text_length += len(text)
        if logprobs:
            self._logprobs.extend(logprobs)
        shown = [_logprob_to_dict(each) for each in logprobs] if logprobs else []
        events.append(text_delta_event(self.id, self.index, len(self._parts), text, shown))

    def _append_cited_text(
        self, scanner: CitationScanner, pieces: Sequence[tuple[str, CitationTarget]], events: EventList
    ) -> None:
        for text, cited in pieces:
            start = self._text_length
            if text or not self._pieces:  # an annotation comes after a delta
                self._append_text(text, (), events)
            if cited is None or len(self._annotations) == _MAX_CITATIONS:
                continue
            annotation = _build_citation(scanner, cited, start, self._text_length)
            told = (*vars(annotation).values(),)
            if told in self._annotations:  # two passages of one file, cited in one place
                continue
            self._annotations[told] = annotation
            events.append(
                ResponseOutputTextAnnotationAddedEvent(
                    type="response.output_text.annotation.added",
                    item_id=self.id,
                    output_index=self.index,
                    content_index=len(self._parts),
                    annotation_index=len(self._annotations) - 1,
                    annotation=annotation.model_dump(),  # pyright: ignore[reportArgumentType]  # the SDK has the same shape under another class per event
                    sequence_number=0,
                )
            )

    def _open_part(self, kind: type[TextDelta | RefusalDelta], events: EventList) -> None:
        self._part_kind = kind
        part = _text_part("") if kind is TextDelta else ResponseOutputRefusal(type="refusal", refusal="")
        events.append(
            ResponseContentPartAddedEvent(
                type="response.content_part.added",
                item_id=self.id,
                output_index=self.index,
                content_index=len(self._parts),
                part=part,
                sequence_number=0,
            )
        )

    def _close_part(self, events: EventList) -> None:
        if self._part_kind is None:
            return
        if self._citation_scanner is not None and self._part_kind is TextDelta:
            self._append_cited_text(self._citation_scanner, self._citation_scanner.flush(), events)
        whole = "".join(self._pieces)
        if self._part_kind is TextDelta:
            logprobs = [_logprob_to_dict(each) for each in self._logprobs]
            part = _text_part(whole, logprobs, [*self._annotations.values()])
            events.append(
                ResponseTextDoneEvent(
                    type="response.output_text.done",
                    item_id=self.id,
                    output_index=self.index,
                    content_index=len(self._parts),
                    text=whole,
                    logprobs=logprobs,  # pyright: ignore[reportArgumentType]  # validated from the dicts
                    sequence_number=0,
                )
            )
        else:
            part = ResponseOutputRefusal(type="refusal", refusal=whole)
            events.append(
                ResponseRefusalDoneEvent(
                    type="response.refusal.done",
                    item_id=self.id,
                    output_index=self.index,
                    content_index=len(self._parts),
                    refusal=whole,
                    sequence_number=0,
                )
            )
        events.append(
            ResponseContentPartDoneEvent(
                type="response.content_part.done",
                item_id=self.id,
                output_index=self.index,
                content_index=len(self._parts),
                part=part,
                sequence_number=0,
            )
        )
        self._parts.append(part)
        self._part_kind, self._pieces, self._text_length, self._annotations, self._logprobs = None, [], 0, {}, []


class OpenReasoning:
    """The model's thought, raw, as one part of text; and sealed, where a client is to keep it."""

    def __init__(self, item_id: str, index: int, seal: Callable[[str], str] | None = None) -> None:
        self.id = item_id
        self.index = index
        self._pieces: list[str] = []
        self._seal = seal
        self._sealed_text: str | None = None

    def item(self, status: Literal["in_progress"] | FinalItemStatus) -> ResponseReasoningItem:
        text = "".join(self._pieces)
        content = [Content(type="reasoning_text", text=text)] if status != "in_progress" else []
        item = ResponseReasoningItem(id=self.id, type="reasoning", summary=[], content=content, status=status)
        if self._seal is not None and status != "in_progress":
            self._sealed_text = item.encrypted_content = self._sealed_text or self._seal(text)
        return item

    def open(self) -> EventList:
        return [
            item_added_event(self.index, self.item("in_progress")),
            ResponseContentPartAddedEvent(
                type="response.content_part.added",
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                part=PartReasoningText(type="reasoning_text", text=""),
                sequence_number=0,
            ),
        ]

    def append(self, text: str, events: EventList) -> None:
        self._pieces.append(text)
        events.append(reasoning_delta_event(self.id, self.index, text))

    def close(self, status: FinalItemStatus) -> EventList:
        text = "".join(self._pieces)
        return [
            ResponseReasoningTextDoneEvent(
                type="response.reasoning_text.done",
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                text=text,
                sequence_number=0,
            ),
            ResponseContentPartDoneEvent(
                type="response.content_part.done",
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                part=DonePartReasoningText(type="reasoning_text", text=text),
                sequence_number=0,
            ),
            item_done_event(self.index, self.item(status)),
        ]


class OpenFunctionCall:
    """A call of a function or a custom tool of the client's."""

    item_type = "function_call"

    def __init__(self, item_id: str, index: int, call_id: str, name: str, namespace: str | None = None) -> None:
        self.id = item_id
        self.index = index
        self.call_id = call_id
        self.name = name
        self.namespace = namespace
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def open(self) -> EventList:
        return [item_added_event(self.index, self.item("in_progress"))]

    def item(self, status: Literal["in_progress"] | FinalItemStatus) -> ResponseOutputItem:
        item = ResponseFunctionToolCall(
            id=self.id,
            type="function_call",
            call_id=self.call_id,
            name=self.name,
            arguments=self.text,
            status=status,
        )
        if self.namespace is not None:
            item.namespace = self.namespace
        return item

    def append(self, text: str, events: EventList) -> None:
        self._pieces.append(text)
        events.append(self._delta_event(text))

    def close(self, status: FinalItemStatus) -> EventList:
        return [self._done_event(self.text), item_done_event(self.index, self.item(status))]

    def _delta_event(self, text: str) -> ResponseStreamEvent:
        return arguments_delta_event(self.id, self.index, text)

    def _done_event(self, text: str) -> ResponseStreamEvent:
        return ResponseFunctionCallArgumentsDoneEvent(
            type="response.function_call_arguments.done",
            item_id=self.id,
            output_index=self.index,
            name=self.name,  # pyright: ignore[reportCallIssue]  # extra: some clients read it, older SDKs require it
            arguments=text,
            sequence_number=0,
        )


class OpenCustomCall(OpenFunctionCall):
    """A call of a custom tool of the client's, whose input is free text."""

    item_type = "custom_tool_call"

    def item(self, status: Literal["in_progress"] | FinalItemStatus) -> ResponseOutputItem:
        item = ResponseCustomToolCall(
            id=self.id,
            type="custom_tool_call",
            call_id=self.call_id,
            name=self.name,
            input=self.text,
            status=status,  # pyright: ignore[reportCallIssue]  # extra: Open Responses wants one on every item
        )
        if self.namespace is not None:
            item.namespace = self.namespace
        return item

    def _delta_event(self, text: str) -> ResponseStreamEvent:
        return input_delta_event(self.id, self.index, text)

    def _done_event(self, text: str) -> ResponseStreamEvent:
        return ResponseCustomToolCallInputDoneEvent(
            type="response.custom_tool_call_input.done",
            item_id=self.id,
            output_index=self.index,
            input=text,
            sequence_number=0,
        )


def _build_citation(scanner: CitationScanner, target: int | str, start: int, end: int) -> Citation:
    if isinstance(target, str):
        made = scanner.files[target]
        return AnnotationContainerFileCitation(
            type="container_file_citation",
            container_id=made.container_id,
            file_id=made.file_id,
            filename=PurePosixPath(target).name,
            start_index=start,
            end_index=end,
        )
    source = scanner.sources[target]
    if source.file_id:
        return AnnotationFileCitation(type="file_citation", file_id=source.file_id, filename=source.title, index=start)
    return AnnotationURLCitation(
        type="url_citation", url=source.url, title=source.title, start_index=start, end_index=end
    )


def _text_part(text: str, logprobs: Sequence[object] = (), annotations: Sequence[Citation] = ()) -> ResponseOutputText:
    return ResponseOutputText(
        type="output_text",
        text=text,
        annotations=[*annotations],
        logprobs=[*logprobs],  # pyright: ignore[reportArgumentType]  # validated from the dicts
    )


def _logprob_to_dict(logprob: TokenLogprob) -> dict[str, object]:
    top = [{"token": one.token, "logprob": one.logprob, "bytes": [*one.bytes]} for one in logprob.top_logprobs]
    return {"token": logprob.token, "logprob": logprob.logprob, "bytes": [*logprob.bytes], "top_logprobs": top}
