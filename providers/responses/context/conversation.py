"""What a request stands on: its own input items, made whole, and all that came before them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson
from openai.types.responses.response import InputTransformation

from apis.chat import ContentPart, Message
from apis.errors import InvalidRequest, NotFound
from apis.responses import CreateResponse
from apis.wire.item_parts import InputFile, InputImage
from apis.wire.items import (
    AssistantMessage,
    CompactionItem,
    CompactionTrigger,
    InputMessage,
    Item,
    ItemReference,
    ReasoningItem,
)
from providers.responses.context.messages import check_items, items_to_messages
from providers.responses.context.window import (
    CompactionContent,
    ContextWindow,
    drop_earlier_reasoning,
    find_window,
    list_dropped_reasoning,
)
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.conversation_items import reject_existing_items
from providers.responses.store.history import ItemWithToolResult
from providers.responses.store.history_cache import LoadedHistory
from providers.responses.tools.item_types import HOSTED_CALL_TYPES, ITEM_TYPES, REPLAYED_TYPES, id_prefix
from providers.responses.tools.mcp.approvals import find_approved_calls


class HistorySource(Protocol):
    """Where a request finds what it refers to: a History, or a connection's own memory before one."""

    async def load_history(self, response_id: str, *, tenant: str) -> LoadedHistory: ...

    async def find_item(self, item_id: str, *, tenant: str) -> ItemWithToolResult | None: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """`given` are the request's own items, with references resolved; `told` is what all hosted calls gave, by item;
    `attached` are the files of all items, as the model is to be told them; `compacted` the compactions that could be
    opened, by what they are sealed in."""

    history: LoadedHistory
    input_items: Sequence[Item]
    tool_results: dict[str, ToolResultRecord]
    instructions: str | None
    attachments: Mapping[InputFile | InputImage, ContentPart] = field(
        default_factory=dict[InputFile | InputImage, ContentPart]
    )
    compactions_by_token: dict[str, CompactionContent] = field(default_factory=dict[str, CompactionContent])
    current_turn_only: bool = False
    """Whether the model is shown no thoughts of earlier turns."""
    must_compact: bool = False
    """Whether it is to be compacted, and not answered."""

    @property
    def items(self) -> Sequence[Item]:
        """All that came before the response."""
        return [*self.history.items, *self.input_items]

    def messages(
        self, output_items: Sequence[Item | ToolResultRecord] = (), *, supports_namespaces: bool = False
    ) -> list[Message]:
        """The conversation as a model is shown it; `made` is what the running response has put out so far."""
        if self.compactions_by_token or self.current_turn_only:
            messages = self.window(output_items).messages(
                partial(self.render_items, supports_namespaces=supports_namespaces)
            )
        else:
            messages = self.render_items(
                [*self.history.items, *self.input_items, *output_items], supports_namespaces=supports_namespaces
            )
        if self.instructions:
            messages.insert(0, Message(role="developer", content=self.instructions))
        return messages

    def window(self, output_items: Sequence[Item | ToolResultRecord] = ()) -> ContextWindow:
        """What of it a model is shown."""
        items = [*self.history.items, *self.input_items, *output_items]
        return find_window(
            drop_earlier_reasoning(items) if self.current_turn_only else items, self.compactions_by_token
        )

    def verbatim_messages(self, output_items: Sequence[Item | ToolResultRecord] = ()) -> list[Message]:
        """What a model is shown that was said to it, word for word."""
        return self.window(output_items).verbatim_messages(self.render_items)

    def is_compacted(self) -> bool:
        """Whether there is a compaction in it."""
        return CompactionItem in map(type, self.input_items) or CompactionItem in map(type, self.history.items)

    def input_transformations(self) -> Sequence[InputTransformation]:
        """What of the request's own input no model is shown."""
        return list_dropped_reasoning(self.input_items) if self.current_turn_only else ()

    def render_items(
        self, items: Sequence[Item | ToolResultRecord], *, supports_namespaces: bool = False
    ) -> list[Message]:
        """Items of it, by themselves, for a model."""
        return items_to_messages(
            items, self.tool_results, supports_namespaces=supports_namespaces, attachments=self.attachments
        )

    def input_tool_results(self) -> dict[str, ToolResultRecord]:
        """What the hosted calls among the request's own items told: it is kept with them."""
        return {item.id: self.tool_results[item.id] for item in self.input_items if item.id in self.tool_results}

    def input_items_to_json(self, ids: ResponseIds) -> bytes:
        """The request's items as they are kept and listed: as they came, each with an id and a type."""
        return orjson.dumps([stored_item(item, ids) for item in self.input_items])


async def read_conversation(
    request: CreateResponse,
    history_source: HistorySource,
    ids: ResponseIds,
    *,
    tenant: str,
    conversation_history: LoadedHistory | None = None,
) -> Conversation:
    """`ids` are those of the response; `kept` is what the request's conversation holds, if it is a turn of one. Raises
    InvalidRequest or NotFound where the input, or what it refers to, is wrong."""
    past = conversation_history or LoadedHistory()
    current_turn = request.reasoning is not None and request.reasoning.context == "current_turn"
    if request.previous_response_id is not None:
        past = await history_source.load_history(request.previous_response_id, tenant=tenant)
    if request.input is None or isinstance(request.input, str):
        text = request.input
        given: list[Item] = [] if text is None else [InputMessage(type="message", role="user", content=text)]
        return Conversation(past, given, dict(past.tool_results), request.instructions, current_turn_only=current_turn)
    check_items(request.input)
    given, told = await resolve_items(request.input, history_source, tenant=tenant)
    reject_existing_items(given, past)
    given = [item if item.id or item.type not in HOSTED_CALL_TYPES else _assign_id(item, ids) for item in given]
    find_approved_calls(request, [*past.items, *given])
    to_compact = CompactionTrigger in map(type, request.input)
    told = {**past.tool_results, **told}
    if to_compact and not past.items and not given:
        raise InvalidRequest("There is nothing to compact.", param="input", code="invalid_value")
    return Conversation(
        past, given, told, request.instructions, current_turn_only=current_turn, must_compact=to_compact
    )


async def resolve_items(
    items: Sequence[Item], history_source: HistorySource, *, tenant: str, field: str = "input"
) -> tuple[list[Item], dict[str, ToolResultRecord]]:
    """The items with references resolved, and what hosted calls among them told. Raises NotFound."""
    given: list[Item] = []
    told: dict[str, ToolResultRecord] = {}
    for index, item in enumerate(items):
        if isinstance(item, CompactionTrigger):
            continue
        if isinstance(item, ItemReference) or item.type in REPLAYED_TYPES:
            stored = await history_source.find_item(item.id, tenant=tenant) if item.id else None
            if isinstance(item, ItemReference) and stored is None:
                raise NotFound(
                    f"Item with id '{item.id}' not found. Items are not persisted when `store` is set to false.",
                    param=f"{field}[{index}].id",
                )
            if stored is not None and stored[1] is not None and item.id:
                told[item.id] = stored[1]
            given.append(stored[0] if stored is not None and isinstance(item, ItemReference) else item)
        elif isinstance(item, ReasoningItem) and item.id and _is_id_only(item):
            stored = await history_source.find_item(item.id, tenant=tenant)
            given.append(stored[0] if stored is not None else item)
        else:
            given.append(item)
    return given, told


def _is_id_only(item: ReasoningItem) -> bool:
    """Whether it says nothing itself: a client that sends the id alone means what is stored."""
    return not (item.content or item.summary or item.encrypted_content)


def _assign_id(item: Item, ids: ResponseIds) -> Item:
    """A hosted call that its client keeps without an id: what it told is known by one."""
    return item.model_copy(update={"id": ids.new_item_id(id_prefix(item.type or ""))})


def stored_item(item: Item, ids: ResponseIds) -> dict[str, Any]:
    """An item as it is kept and listed: as it came, with an id, a type, and a status where it can have one."""
    fields: dict[str, Any] = orjson.loads(item.model_dump_json(exclude_none=True))
    fields.setdefault("type", "message")
    if "id" not in fields:
        fields["id"] = ids.new_item_id(id_prefix(fields["type"]))
    match item:
        case InputMessage(content=str() as text):
            fields["content"] = [{"type": "input_text", "text": text}]
        case AssistantMessage(content=str() as text):
            fields["content"] = [{"type": "output_text", "text": text, "annotations": []}]
        case _:
            pass
    if ITEM_TYPES[fields["type"]].has_status:
        fields.setdefault("status", "completed")
    return fields
