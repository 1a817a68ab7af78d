"""Output items while they grow: each opens once, grows by deltas and closes once, and returns the typed events of that.

Every event has `sequence_number=0`; `assign_sequence_numbers` sets the number when the response yields the event.
Messages are in open_message.py, and calls in the `tools`.
"""

from collections.abc import Callable
from typing import Final, Literal

from openai.types.responses import (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseOutputItem,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningItem,
    ResponseReasoningSummaryPartAddedEvent,
    ResponseReasoningSummaryPartDoneEvent,
    ResponseReasoningSummaryTextDeltaEvent,
    ResponseReasoningSummaryTextDoneEvent,
    ResponseReasoningTextDoneEvent,
)
from openai.types.responses.response_content_part_added_event import PartReasoningText
from openai.types.responses.response_content_part_done_event import PartReasoningText as DonePartReasoningText
from openai.types.responses.response_reasoning_item import Content, Summary
from openai.types.responses.response_reasoning_summary_part_added_event import Part as AddedSummary
from openai.types.responses.response_reasoning_summary_part_done_event import Part as DoneSummary

from apis.events import EventList
from providers.responses.events.token_events import reasoning_delta_event
from providers.responses.events.unvalidated import unvalidated

EMPTY_ARGUMENTS: Final = "{}"
FinalItemStatus = Literal["completed", "incomplete"]
_build_added_event = unvalidated(ResponseOutputItemAddedEvent)
_build_done_event = unvalidated(ResponseOutputItemDoneEvent)


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
        return [
            added_event,
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
            part = AddedSummary(type="summary_text", text="")
            events.append(
                ResponseReasoningSummaryPartAddedEvent(
                    type="response.reasoning_summary_part.added",
                    item_id=self.id,
                    output_index=self.index,
                    summary_index=0,
                    part=part,
                    sequence_number=0,
                )
            )
        self._summary_chunks.append(text)
        events.append(
            ResponseReasoningSummaryTextDeltaEvent(
                type="response.reasoning_summary_text.delta",
                item_id=self.id,
                output_index=self.index,
                summary_index=0,
                delta=text,
                sequence_number=0,
            )
        )

    def close(self, status: FinalItemStatus) -> EventList:
        last_part = self._close_summary() if self.is_summarized else self._close_text()
        return [*last_part, item_done_event(self.index, self.item(status))]

    def _close_summary(self) -> EventList:
        text = "".join(self._summary_chunks)
        return [
            ResponseReasoningSummaryTextDoneEvent(
                type="response.reasoning_summary_text.done",
                item_id=self.id,
                output_index=self.index,
                summary_index=0,
                text=text,
                sequence_number=0,
            ),
            ResponseReasoningSummaryPartDoneEvent(
                type="response.reasoning_summary_part.done",
                item_id=self.id,
                output_index=self.index,
                summary_index=0,
                part=DoneSummary(type="summary_text", text=text),
                sequence_number=0,
            ),
        ]

    def _close_text(self) -> EventList:
        if self._is_hidden:
            return []
        text = str(self._text)
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
        ]
