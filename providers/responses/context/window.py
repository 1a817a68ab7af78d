"""What a model is still shown of a conversation: a compaction stands for what came before it. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from openai.types.responses.response import InputTransformation
from pydantic import Field

from apis.chat import Message
from apis.wire.base import Wire
from apis.wire.items import CompactionItem, GivenMessage, Item, ReasoningItem
from providers.responses.events.tool_result import Told

ToMessages = Callable[[Sequence[Item | Told]], list[Message]]
SUMMARY: Final = "The conversation so far was shortened here. This is a summary of it; go on from there.\n\n"
"""What a summary is told under."""


class Compacted(Wire):
    """What a compaction item holds. It stands for all that came before it: `kept` is what was said there, word for
    word, `summary` is all the rest, and `pending` is what was said last and not answered yet. One that is not `alone`
    leaves the messages before it as they are."""

    summary: str
    kept: list[Message] = Field(default_factory=list[Message])
    pending: list[Message] = Field(default_factory=list[Message])
    alone: bool


@dataclass(frozen=True, slots=True)
class Window:
    """`after` are the items that follow the newest compaction, `before` the messages that it left as they are. Without
    one, `after` is all there is."""

    after: Sequence[Item | Told]
    before: Sequence[GivenMessage] = ()
    compacted: Compacted | None = field(default=None)

    def messages(self, to_messages: ToMessages) -> list[Message]:
        """All that the model is shown."""
        after = to_messages(self.after)
        if self.compacted is None:
            return after
        summary = Message(role="user", content=SUMMARY + self.compacted.summary)
        return [*self._before(to_messages), summary, *self.compacted.pending, *after]

    def said(self, to_messages: ToMessages) -> list[Message]:
        """What of it was said to the model, word for word, in order."""
        after = to_messages([item for item in self.after if isinstance(item, GivenMessage)])
        pending = self.compacted.pending if self.compacted is not None else ()
        return [*self._before(to_messages), *pending, *after]

    def said_items(self) -> list[GivenMessage]:
        """The same, as far as it is items: the rest is in the compaction."""
        return [*self.before, *(item for item in self.after if isinstance(item, GivenMessage))]

    def _before(self, to_messages: ToMessages) -> list[Message]:
        before = to_messages(self.before)
        kept = self.compacted.kept if self.compacted is not None else ()
        # a client may go on sending its own instructions, which the compaction holds too
        return [*(message for message in kept if message not in before), *before]


def find_window(items: Sequence[Item | Told], compacted: Mapping[str, Compacted]) -> Window:
    """`compacted` are the compactions that could be opened, by what they are sealed in."""
    if compacted:
        for at in range(len(items) - 1, -1, -1):
            item = items[at]
            found = compacted.get(item.encrypted_content) if isinstance(item, CompactionItem) else None
            if found is not None:
                left = () if found.alone else [each for each in items[:at] if isinstance(each, GivenMessage)]
                return Window(items[at + 1 :], left, found)
    return Window(items)


def without_earlier_thoughts(items: Sequence[Item | Told]) -> list[Item | Told]:
    """The items without the reasoning of the turns before the last one."""
    begin = _turn_begin(items)
    return [item for at, item in enumerate(items) if at >= begin or not isinstance(item, ReasoningItem)]


def earlier_thoughts(items: Sequence[Item]) -> list[InputTransformation]:
    """What `without_earlier_thoughts` leaves out, as the API tells it."""
    return [
        InputTransformation(id=item.id or "", action="removed", reason="turn_boundary", type="reasoning")
        for item in items[: _turn_begin(items)]
        if isinstance(item, ReasoningItem) and (item.content or item.summary)
    ]


def _turn_begin(items: Sequence[Item | Told]) -> int:
    """Where the last turn begins: with what the user said last."""
    for at in range(len(items) - 1, -1, -1):
        item = items[at]
        if isinstance(item, GivenMessage) and item.role == "user":
            return at
    return 0
