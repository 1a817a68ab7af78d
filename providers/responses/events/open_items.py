"""Output items while they grow: each opens once, grows by deltas and closes once, and returns the typed events of that.

Every event has `sequence_number=0`; `assign_sequence_numbers` sets the number when the response yields the event.
Those of calls are in the `tools`.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Literal

from openai.types.responses import (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseOutputItem,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseTextDoneEvent,
)
from openai.types.responses.response_reasoning_item import Content, Summary

from apis.deltas import RefusalDelta, TextDelta, TokenLogprob
from apis.events import EventList, ResponseStreamEvent
from apis.wire.base import Phase
from providers.responses.events.citations import Citation, CitationScanner, CitationTarget
from providers.responses.events.response_events import item_event, reasoning_delta_event, text_delta_event
from providers.responses.events.unvalidated import unvalidated

EMPTY_ARGUMENTS: Final = "{}"
FinalItemStatus = Literal["completed", "incomplete"]
_build_added_event = unvalidated(ResponseOutputItemAddedEvent)
_build_done_event = unvalidated(ResponseOutputItemDoneEvent)
_build_message = unvalidated(ResponseOutputMessage)
_build_part_added_event = unvalidated(ResponseContentPartAddedEvent)
_build_part_done_event = unvalidated(ResponseContentPartDoneEvent)
_build_text_done_event = unvalidated(ResponseTextDoneEvent)
_build_text_part = unvalidated(ResponseOutputText)
_MAX_CITATIONS: Final = 2000
"""Maximum annotations per content part. Bounds the size of the item if the model loops; further links stay text."""


class GrowingText:
    """Text in UTF-8: a list of the deltas would take 70 bytes for each token, and this takes as many as its bytes."""

    __slots__ = ("_utf8",)

    def __init__(self) -> None:
        self._utf8 = bytearray()

    def append(self, text: str) -> None:
        """Add `text`, which may hold half of a surrogate pair."""
        self._utf8 += text.encode("utf-8", "surrogatepass")

    def __str__(self) -> str:
        """Return the whole text."""
        return self._utf8.decode("utf-8", "surrogatepass")


def item_added_event(index: int, item: ResponseOutputItem) -> ResponseOutputItemAddedEvent:
    return _build_added_event(type="response.output_item.added", output_index=index, item=item, sequence_number=0)


def item_done_event(index: int, item: ResponseOutputItem) -> ResponseOutputItemDoneEvent:
    return _build_done_event(type="response.output_item.done", output_index=index, item=item, sequence_number=0)


class OpenReasoning:
    """The model's reasoning as one part of text, also encrypted for a client that stores the conversation, then its
    summary as one part, if there is one. The events of one that `is_hidden` have no text: only its item has it, for the
    store."""

    def __init__(
        self, item_id: str, index: int, seal: Callable[[str], str] | None = None, *, is_hidden: bool = False
    ) -> None:
        self.id = item_id
        self.index = index
        self._text = GrowingText()
        self._summary_chunks: list[str] = []
        self._seal = seal
        self._is_hidden = is_hidden
        self._sealed_text: str | None = None

    def item(self, status: Literal["in_progress"] | FinalItemStatus) -> ResponseReasoningItem:
        text = str(self._text)
        content = [Content(type="reasoning_text", text=text)] if status != "in_progress" else []
        summary = [Summary(type="summary_text", text="".join(self._summary_chunks))] if self.is_summarized else []
        item = ResponseReasoningItem(id=self.id, type="reasoning", summary=summary, content=content, status=status)
        if self._seal is not None and status != "in_progress":
            self._sealed_text = item.encrypted_content = self._sealed_text or self._seal(text)
        return item

    def open(self) -> EventList:
        added_event = item_added_event(self.index, self.item("in_progress"))
        if self._is_hidden:
            return [added_event]
        return [added_event, self._event("content_part.added", content_index=0, part=_reasoning(""))]

    def append(self, text: str, events: EventList) -> None:
        self._text.append(text)
        if not self._is_hidden:
            events.append(reasoning_delta_event(self.id, self.index, text))

    @property
    def is_summarized(self) -> bool:
        """The summary has begun: the text is complete."""
        return bool(self._summary_chunks)

    def append_summary(self, text: str, events: EventList) -> None:
        """Take more of the summary; the first ends the text."""
        if not self.is_summarized:
            events += self._close_text()
            events.append(self._event("reasoning_summary_part.added", summary_index=0, part=_summary("")))
        self._summary_chunks.append(text)
        events.append(self._event("reasoning_summary_text.delta", summary_index=0, delta=text))

    def close(self, status: FinalItemStatus) -> EventList:
        last_part = self._close_summary() if self.is_summarized else self._close_text()
        return [*last_part, item_done_event(self.index, self.item(status))]

    def _close_summary(self) -> EventList:
        text = "".join(self._summary_chunks)
        return [
            self._event("reasoning_summary_text.done", summary_index=0, text=text),
            self._event("reasoning_summary_part.done", summary_index=0, part=_summary(text)),
        ]

    def _close_text(self) -> EventList:
        if self._is_hidden:
            return []
        text = str(self._text)
        return [
            self._event("reasoning_text.done", content_index=0, text=text),
            self._event("content_part.done", content_index=0, part=_reasoning(text)),
        ]

    def _event(self, name: str, **fields: Any) -> ResponseStreamEvent:
        return item_event(f"response.{name}", self.id, self.index, **fields)


def _summary(text: str) -> dict[str, str]:
    return {"type": "summary_text", "text": text}


def _reasoning(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}


class OpenMessage:
    """An assistant message: parts of text and refusal, one after the other. Unless the response `has_readers`, it makes
    only its last event, which holds the item."""

    __slots__ = (
        "_annotations",
        "_citation_scanner",
        "_has_delta",
        "_has_readers",
        "_logprobs",
        "_part_kind",
        "_parts",
        "_text",
        "_text_length",
        "id",
        "index",
        "phase",
    )

    def __init__(
        self,
        item_id: str,
        index: int,
        phase: Phase | None,
        citation_scanner: CitationScanner | None,
        *,
        has_readers: bool = True,
    ) -> None:
        self.id = item_id
        self.index = index
        self.phase: Phase | None = phase
        self._citation_scanner = citation_scanner
        self._has_readers = has_readers
        self._parts: list[ResponseOutputText | ResponseOutputRefusal] = []
        self._part_kind: type[TextDelta | RefusalDelta] | None = None
        self._text = GrowingText()
        self._has_delta = False
        self._text_length = 0
        self._annotations: dict[Hashable, Citation] = {}
        self._logprobs: list[TokenLogprob] = []

    def item(self, status: Literal["in_progress"] | FinalItemStatus) -> ResponseOutputMessage:
        message = _build_message(id=self.id, type="message", role="assistant", status=status, content=[*self._parts])
        if self.phase is not None:
            message.phase = self.phase
        return message

    def open(self) -> EventList:
        return [item_added_event(self.index, self.item("in_progress"))] if self._has_readers else []

    def append_text(self, text: str, logprobs: Sequence[TokenLogprob], events: EventList) -> None:
        """Take more text and add its events to `events`."""
        if self._part_kind is not TextDelta:
            self._close_part(events)
            self._open_part(TextDelta, events)
        if logprobs:
            self._logprobs.extend(logprobs)
        if self._citation_scanner is not None:
            self._append_cited_text(self._citation_scanner, self._citation_scanner.feed(text), events)
            return
        self._text.append(text)
        if not self._has_readers:
            return
        fields = [_logprob_to_dict(logprob) for logprob in logprobs] if logprobs else []
        events.append(text_delta_event(self.id, self.index, len(self._parts), text, fields))

    def append_refusal(self, text: str, events: EventList) -> None:
        """Take more text of a refusal and add its event to `events`."""
        if self._part_kind is not RefusalDelta:
            self._close_part(events)
            self._open_part(RefusalDelta, events)
        self._text.append(text)
        if not self._has_readers:
            return
        events.append(self._part_event("refusal.delta", delta=text))

    def close(self, status: FinalItemStatus) -> EventList:
        events: EventList = []
        if self._part_kind is None and not self._parts:
            self._open_part(TextDelta, events)
        self._close_part(events)
        events.append(item_done_event(self.index, self.item(status)))
        return events

    def _append_cited_text(
        self, scanner: CitationScanner, pieces: Sequence[tuple[str, CitationTarget]], events: EventList
    ) -> None:
        for text, target in pieces:
            start = self._text_length
            if text or not self._has_delta:  # an annotation follows a delta
                self._text.append(text)
                self._has_delta = True
                self._text_length += len(text)
                if self._has_readers:
                    events.append(text_delta_event(self.id, self.index, len(self._parts), text, []))
            if target is None or len(self._annotations) == _MAX_CITATIONS:
                continue
            annotation = scanner.build_citation(target, start, self._text_length)
            identity = (*vars(annotation).values(),)
            if identity in self._annotations:  # two passages of one file, cited in one place
                continue
            self._annotations[identity] = annotation
            if not self._has_readers:
                continue
            number = len(self._annotations) - 1
            events.append(
                self._part_event(
                    "output_text.annotation.added", annotation_index=number, annotation=annotation.model_dump()
                )
            )

    def _open_part(self, kind: type[TextDelta | RefusalDelta], events: EventList) -> None:
        self._part_kind = kind
        if not self._has_readers:
            return
        part = _text_part("") if kind is TextDelta else ResponseOutputRefusal(type="refusal", refusal="")
        events.append(
            _build_part_added_event(
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
        text, logprobs = str(self._text), [_logprob_to_dict(logprob) for logprob in self._logprobs]
        if self._part_kind is TextDelta:
            part = _text_part(text, logprobs, [*self._annotations.values()])
        else:
            part = ResponseOutputRefusal(type="refusal", refusal=text)
        if self._has_readers:
            events.append(self._text_done_event(part, logprobs))
            events.append(
                _build_part_done_event(
                    type="response.content_part.done",
                    item_id=self.id,
                    output_index=self.index,
                    content_index=len(self._parts),
                    part=part,
                    sequence_number=0,
                )
            )
        self._parts.append(part)
        self._part_kind, self._has_delta, self._text_length, self._annotations, self._logprobs = None, False, 0, {}, []
        self._text = GrowingText()

    def _text_done_event(
        self, part: ResponseOutputText | ResponseOutputRefusal, logprobs: Sequence[object]
    ) -> ResponseStreamEvent:
        if isinstance(part, ResponseOutputRefusal):
            return self._part_event("refusal.done", refusal=part.refusal)
        return (ResponseTextDoneEvent if logprobs else _build_text_done_event)(
            type="response.output_text.done",
            item_id=self.id,
            output_index=self.index,
            content_index=len(self._parts),
            text=part.text,
            logprobs=[*logprobs],  # pyright: ignore[reportArgumentType]  # validated from the dicts
            sequence_number=0,
        )

    def _part_event(self, name: str, **fields: Any) -> ResponseStreamEvent:
        return item_event(f"response.{name}", self.id, self.index, content_index=len(self._parts), **fields)


def _text_part(text: str, logprobs: Sequence[object] = (), annotations: Sequence[Citation] = ()) -> ResponseOutputText:
    return (ResponseOutputText if logprobs else _build_text_part)(
        type="output_text",
        text=text,
        annotations=[*annotations],
        logprobs=[*logprobs],  # pyright: ignore[reportArgumentType]  # validated from the dicts
    )


def _logprob_to_dict(logprob: TokenLogprob) -> dict[str, object]:
    top = [
        {"token": alternative.token, "logprob": alternative.logprob, "bytes": [*alternative.bytes]}
        for alternative in logprob.top_logprobs
    ]
    return {"token": logprob.token, "logprob": logprob.logprob, "bytes": [*logprob.bytes], "top_logprobs": top}
