"""Conversation: the input items of a request and the history before them, as the model will read them.

Its window is the part that a model still reads, after compaction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson
from openai.types.responses.response import InputTransformation
from pydantic import Field

from apis.chat import ContentPart, Message
from apis.wire.base import Wire, value_to_kept_json
from apis.wire.item_parts import InputFile, InputImage
from apis.wire.item_types import ITEM_TYPES
from apis.wire.items import AssistantMessage, CompactionItem, InputMessage, Item, ReasoningItem
from providers.common.fair_turns import do_in_turns, end_pass
from providers.responses.context.messages import ItemReader
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.item_index import ItemIndex
from providers.responses.store.history_cache import LoadedHistory

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


class ResponseProgress(msgspec.Struct, frozen=True):
    """Output of a running response that its next turn has to read: the items in order, with a ToolResultRecord for
    each call that has no item; the results of hosted calls, by item id; and its compactions, by sealed token."""

    items: Sequence[Item | ToolResultRecord] = ()
    tool_results: Mapping[str, ToolResultRecord] = {}
    compactions: Mapping[str, CompactionContent] = {}


ITEM_WORK: Final = 200
"""Work of reading or writing one item, as `fair_turns` counts it."""
_NO_PROGRESS: Final = ResponseProgress()
_TEXT_TYPES: Final = frozenset((str, type(None)))
"""Types of the fields of most items, whose JSON is not written and read for them."""


class Conversation(msgspec.Struct, frozen=True):
    """Everything before a response. `input_items` are the request's own, with references resolved; `tool_results` the
    results of all hosted calls, by item id; `attachments` the files of all items, as the model reads them;
    `compactions` the contents of the compactions that this server could open, by sealed token."""

    history: LoadedHistory
    input_items: Sequence[Item]
    tool_results: Mapping[str, ToolResultRecord]
    instructions: str | None
    attachments: Mapping[InputFile | InputImage, ContentPart] = {}
    compactions: Mapping[str, CompactionContent] = {}
    tool_items: Sequence[Item] = ()
    """Items that tools still need, of those that a compaction has replaced; no model reads them."""
    current_turn_only: bool = False
    """The model does not see the reasoning of earlier turns."""
    sees_images: bool = False
    """The model takes images, and sees those that image models generated."""
    must_compact: bool = False
    """The response is a compaction instead of an answer."""
    root: str = ""
    """Root of the response's chain; empty where nothing can continue the response."""

    @property
    def items(self) -> Sequence[Item]:
        """All items before the response."""
        return [*self.history.items, *self.input_items]

    def messages(
        self, progress: ResponseProgress = _NO_PROGRESS, *, supports_namespaces: bool = False
    ) -> list[Message]:
        """Return the conversation as the model reads it, with the output of the running response at its end."""
        window = self.window(progress)
        reader = self._open_reader(progress.tool_results, window.earlier_items, supports_namespaces=supports_namespaces)
        return self._join(window, reader.read_all(window.recent_items))

    async def read_messages(self, *, supports_namespaces: bool = False) -> list[Message]:
        """Return what `messages` returns before the response; a long conversation is read at turns of the tenant."""
        window = self.window()
        await end_pass(window.recent_items)
        reader = self._open_reader({}, window.earlier_items, supports_namespaces=supports_namespaces)
        await do_in_turns(window.recent_items, reader.read, ITEM_WORK)
        messages = self._join(window, reader.finish())
        await end_pass(messages)
        return messages

    def _join(self, window: ContextWindow, recent: list[Message]) -> list[Message]:
        """Return all messages of a window, of whose recent items these are the messages."""
        messages = window.messages(recent, self.render_items)
        if self.instructions:
            messages.insert(0, Message(role="developer", content=self.instructions))
        return messages

    def window(self, progress: ResponseProgress = _NO_PROGRESS) -> ContextWindow:
        """Return the part of the conversation that a model still reads."""
        items = [*self.history.items, *self.input_items, *progress.items]
        return find_window(
            drop_earlier_reasoning(items) if self.current_turn_only else items,
            {**self.compactions, **progress.compactions},
        )

    def verbatim_messages(self, progress: ResponseProgress = _NO_PROGRESS) -> list[Message]:
        """Return the messages of users and developers that the model still reads word for word."""
        return self.window(progress).verbatim_messages(self.render_items)

    def render_items(self, items: Sequence[Item | ToolResultRecord]) -> list[Message]:
        """Return some of the conversation's items, by themselves, as messages."""
        return self._open_reader({}, None).read_all(items)

    def _open_reader(
        self,
        tool_results: Mapping[str, ToolResultRecord],
        compacted_items: Sequence[Item | ToolResultRecord] | None,
        *,
        supports_namespaces: bool = False,
    ) -> ItemReader:
        return ItemReader(
            {**self.tool_results, **tool_results} if tool_results else self.tool_results,
            supports_namespaces=supports_namespaces,
            attachments=self.attachments,
            sees_images=self.sees_images,
            compacted_items=compacted_items,
        )

    def input_tool_results(self) -> dict[str, ToolResultRecord]:
        """Return the results of the hosted calls among the request's own items; they are stored with these items."""
        if not self.tool_results:
            return {}
        return {
            item.id: self.tool_results[item.id]
            for item in self.input_items
            if item.id is not None and item.id in self.tool_results
        }

    async def store_input_items(self, ids: ResponseIds) -> bytes:
        """Return the request's items as a JSON array, as they are stored and listed, each with an id and a type; many
        items are written at turns of the tenant."""
        stored: list[dict[str, Any]] = []
        await do_in_turns(self.input_items, lambda item: stored.append(stored_item(item, ids)), ITEM_WORK)
        return value_to_kept_json(stored)


def stored_item(item: Item, ids: ResponseIds) -> dict[str, Any]:
    """Return an item as it is stored and listed: as the client sent it, with an id, a type and, where its type has one,
    a status."""
    fields = _item_to_fields(item)
    row = ITEM_TYPES[fields.setdefault("type", "message")]
    if "id" not in fields:
        fields["id"] = ids.new_item_id(row.id_prefix)
    kind = type(item)
    if kind in (InputMessage, AssistantMessage) and isinstance(fields["content"], str):
        if kind is InputMessage:
            fields["content"] = [{"type": "input_text", "text": fields["content"]}]
        else:
            fields["content"] = [{"type": "output_text", "text": fields["content"], "annotations": []}]
    if row.has_status:
        fields.setdefault("status", "completed")
    return fields


def _item_to_fields(item: Item) -> dict[str, Any]:
    values: dict[str, Any] = vars(item)
    if item.__pydantic_extra__ or not _TEXT_TYPES.issuperset(map(type, values.values())):
        serializer: Any = item.__pydantic_serializer__  # model_dump_json() would decode the bytes to text
        return orjson.loads(serializer.to_json(item, exclude_none=True, by_alias=True))
    return {name: value for name, value in values.items() if value is not None}


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
