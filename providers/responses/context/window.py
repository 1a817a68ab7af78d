"""ContextWindow: the part of a conversation that a model still reads, after compaction. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from openai.types.responses.response import InputTransformation
from pydantic import Field

from apis.chat import Message
from apis.wire.base import Wire
from apis.wire.items import CompactionItem, InputMessage, Item, ReasoningItem
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.item_index import ItemIndex

ToMessages = Callable[[Sequence[Item | ToolResultRecord]], list[Message]]
SUMMARY_PREFIX: Final = "The conversation so far was shortened here. This is a summary of it; go on from there.\n\n"
"""Text before a summary, in a message of the user."""


class CompactionContent(Wire):
    """Sealed content of a compaction item, which replaces the items before it: `verbatim_messages` are messages of
    users and developers word for word, `summary` is everything else, and `pending_messages` are the last ones, which
    have no answer yet. Without `replaces_history`, messages of users and developers before the item stay. `tool_state`
    is that of tools, as JSON, where it is known."""

    summary: str
    verbatim_messages: list[Message] = Field(default_factory=list[Message])
    pending_messages: list[Message] = Field(default_factory=list[Message])
    replaces_history: bool
    tool_state: str | None = None


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """The newest compaction, the items after it, and those before it, of whose messages it may leave some. Without a
    compaction, all items are recent ones, and `earlier_items` is None."""

    recent_items: Sequence[Item | ToolResultRecord]
    earlier_messages: Sequence[InputMessage] = ()
    compaction: CompactionContent | None = field(default=None)
    earlier_items: Sequence[Item | ToolResultRecord] | None = None

    def messages(self, recent: list[Message], to_messages: ToMessages) -> list[Message]:
        """Return all messages that the model reads; `recent` are those of the recent items."""
        if self.compaction is None:
            return recent
        summary = Message(role="user", content=SUMMARY_PREFIX + self.compaction.summary)
        return [*self._render_earlier_messages(to_messages), summary, *self.compaction.pending_messages, *recent]

    def verbatim_messages(self, to_messages: ToMessages) -> list[Message]:
        """Return the messages of users and developers in the window, word for word, in order."""
        recent = to_messages([item for item in self.recent_items if type(item) is InputMessage])
        pending = self.compaction.pending_messages if self.compaction is not None else ()
        return [*self._render_earlier_messages(to_messages), *pending, *recent]

    def verbatim_items(self) -> list[InputMessage]:
        """Return the items of `verbatim_messages`; those that the compaction holds have none."""
        return [*self.earlier_messages, *(item for item in self.recent_items if type(item) is InputMessage)]

    def _render_earlier_messages(self, to_messages: ToMessages) -> list[Message]:
        earlier = to_messages(self.earlier_messages)
        compacted = self.compaction.verbatim_messages if self.compaction is not None else ()
        # a client may send its own instructions with each request, although the compaction holds them too
        return [*messages_without(compacted, earlier), *earlier]


def messages_without(messages: Sequence[Message], others: Sequence[Message]) -> list[Message]:
    """Return those of the messages that do not equal one of the others."""
    keys = set(map(_message_key, others))
    return [message for message in messages if _message_key(message) not in keys]


def _message_key(message: Message) -> tuple[str, str]:
    """Return what is equal for equal messages of users and developers."""
    content = message.content
    return message.role, content if isinstance(content, str) else message.model_dump_json(exclude_none=True)


def find_window(
    items: Sequence[Item | ToolResultRecord], compactions_by_token: Mapping[str, CompactionContent]
) -> ContextWindow:
    """Return the window of these items; the compactions are those that could be opened, by sealed token."""
    if compactions_by_token:
        for index in range(len(items) - 1, -1, -1):
            item = items[index]
            content = compactions_by_token.get(item.encrypted_content) if isinstance(item, CompactionItem) else None
            if content is not None:
                before = () if content.replaces_history else items[:index]
                earlier = [item for item in before if type(item) is InputMessage]
                return ContextWindow(items[index + 1 :], earlier, content, items[:index])
    return ContextWindow(items)


def drop_earlier_reasoning(items: Sequence[Item | ToolResultRecord]) -> list[Item | ToolResultRecord]:
    """Return the items without the reasoning of all turns before the last one."""
    start = _last_turn_start(items)
    return [item for index, item in enumerate(items) if index >= start or type(item) is not ReasoningItem]


def list_dropped_reasoning(index: ItemIndex) -> list[InputTransformation]:
    """Return the items of the input that `drop_earlier_reasoning` leaves out, as the API lists them."""
    end = index.input_start + _last_turn_start(index.input_items)
    dropped = (index.items[at] for at in index.positions(ReasoningItem) if index.input_start <= at < end)
    return [
        InputTransformation(id=item.id or "", action="removed", reason="turn_boundary", type="reasoning")
        for item in dropped
        if isinstance(item, ReasoningItem) and (item.content or item.summary)
    ]


def _last_turn_start(items: Sequence[Item | ToolResultRecord]) -> int:
    """Return the index of the user's last message, with which the last turn begins."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if type(item) is InputMessage and item.role == "user":
            return index
    return 0
