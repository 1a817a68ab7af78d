"""Output items while they grow: each opens once, grows by deltas and closes once, and returns the typed events of that.

Every event has `sequence_number=0`; `assign_sequence_numbers` sets the number when the response yields the event.
Messages are in open_message.py, and calls in the `tools`.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

from openai.types.responses import (
    ResponseOutputItem,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from openai.types.responses.response_reasoning_item import Content, Summary

from apis.events import EventList
from providers.responses.events.response_events import item_event, reasoning_delta_event
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
