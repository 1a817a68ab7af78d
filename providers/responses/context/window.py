"""What a model is still shown of a conversation: a compaction stands for what came before it. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from openai.types.responses.response import InputTransformation
from pydantic import AliasChoices, Field

from apis.chat import Message
from apis.wire.base import Wire
from apis.wire.items import CompactionItem, InputMessage, Item, ReasoningItem
from providers.responses.events.tool_result import ToolResultRecord

ToMessages = Callable[[Sequence[Item | ToolResultRecord]], list[Message]]
SUMMARY_PREFIX: Final = "The conversation so far was shortened here. This is a summary of it; go on from there.\n\n"
"""What a summary is told under."""


class CompactionContent(Wire):
    """What a compaction item holds. It stands for all that came before it: `kept` is what was said there, word for
    word, `summary` is all the rest, and `pending` is what was said last and not answered yet. One that is not `alone`
    leaves the messages before it as they are."""

    summary: str
    verbatim_messages: list[Message] = Field(
        default_factory=list[Message],
        validation_alias=AliasChoices("verbatim_messages", "kept"),
        serialization_alias="kept",
    )
    pending_messages: list[Message] = Field(
        default_factory=list[Message],
        validation_alias=AliasChoices("pending_messages", "pending"),
        serialization_alias="pending",
    )
    replaces_history: bool = Field(
        validation_alias=AliasChoices("replaces_history", "alone"), serialization_alias="alone"
    )


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """`after` are the items that follow the newest compaction, `before` the messages that it left as they are. Without
    one, `after` is all there is."""

    recent_items: Sequence[Item | ToolResultRecord]
    earlier_messages: Sequence[InputMessage] = ()
    compaction: CompactionContent | None = field(default=None)

    def messages(self, to_messages: ToMessages) -> list[Message]:
        """All that the model is shown."""
        after = to_messages(self.recent_items)
        if self.compaction is None:
            return after
        summary = Message(role="user", content=SUMMARY_PREFIX + self.compaction.summary)
        return [*self._render_earlier_messages(to_messages), summary, *self.compaction.pending_messages, *after]

    def verbatim_messages(self, to_messages: ToMessages) -> list[Message]:
        """What of it was said to the model, word for word, in order."""
        after = to_messages([item for item in self.recent_items if isinstance(item, InputMessage)])
        pending = self.compaction.pending_messages if self.compaction is not None else ()
        return [*self._render_earlier_messages(to_messages), *pending, *after]

    def verbatim_items(self) -> list[InputMessage]:
        """The same, as far as it is items: the rest is in the compaction."""
        return [*self.earlier_messages, *(item for item in self.recent_items if isinstance(item, InputMessage))]

    def _render_earlier_messages(self, to_messages: ToMessages) -> list[Message]:
        before = to_messages(self.earlier_messages)
        kept = self.compaction.verbatim_messages if self.compaction is not None else ()
        # a client may go on sending its own instructions, which the compaction holds too
        return [*(message for message in kept if message not in before), *before]


def find_window(
    items: Sequence[Item | ToolResultRecord], compactions_by_token: Mapping[str, CompactionContent]
) -> ContextWindow:
    """`compacted` are the compactions that could be opened, by what they are sealed in."""
    if compactions_by_token:
        for at in range(len(items) - 1, -1, -1):
            item = items[at]
            found = compactions_by_token.get(item.encrypted_content) if isinstance(item, CompactionItem) else None
            if found is not None:
                left = () if found.replaces_history else [each for each in items[:at] if isinstance(each, InputMessage)]
                return ContextWindow(items[at + 1 :], left, found)
    return ContextWindow(items)


def drop_earlier_reasoning(items: Sequence[Item | ToolResultRecord]) -> list[Item | ToolResultRecord]:
    """The items without the reasoning of the turns before the last one."""
    begin = _last_turn_start(items)
    return [item for at, item in enumerate(items) if at >= begin or not isinstance(item, ReasoningItem)]


def list_dropped_reasoning(items: Sequence[Item]) -> list[InputTransformation]:
    """What `without_earlier_thoughts` leaves out, as the API tells it."""
    return [
        InputTransformation(id=item.id or "", action="removed", reason="turn_boundary", type="reasoning")
        for item in items[: _last_turn_start(items)]
        if isinstance(item, ReasoningItem) and (item.content or item.summary)
    ]


def _last_turn_start(items: Sequence[Item | ToolResultRecord]) -> int:
    """Where the last turn begins: with what the user said last."""
    for at in range(len(items) - 1, -1, -1):
        item = items[at]
        if isinstance(item, InputMessage) and item.role == "user":
            return at
    return 0
