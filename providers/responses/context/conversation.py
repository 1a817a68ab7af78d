"""What a request stands on: its own input items, made whole, and all that came before them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson
from openai.types.responses.response import InputTransformation

from apis.chat import Message, Part
from apis.errors import InvalidRequest, NotFound
from apis.responses import CreateResponse
from apis.wire.item_parts import InputFile, InputImage
from apis.wire.items import (
    AssistantMessage,
    CompactionItem,
    CompactionTrigger,
    GivenMessage,
    Item,
    ItemReference,
    ReasoningItem,
)
from providers.responses.context.messages import check_items, items_to_messages
from providers.responses.context.replay import HOSTED
from providers.responses.context.window import (
    Compacted,
    Window,
    earlier_thoughts,
    find_window,
    without_earlier_thoughts,
)
from providers.responses.events.ids import Ids
from providers.responses.events.tool_result import Told
from providers.responses.store.conversation_items import check_new
from providers.responses.store.history import FoundItem
from providers.responses.store.history_cache import Past
from providers.responses.tools.mcp.approvals import approved_requests

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "web_search_call": "ws",
    "code_interpreter_call": "ci",
    "file_search_call": "fs",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "configuration_update": "cu",
    "compaction": "cmp",
}
_NO_STATUS = frozenset(
    {
        *("item_reference", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("additional_tools", "configuration_update", "compaction"),
    }
)
_KNOWN_BETTER = frozenset({*HOSTED, "mcp_approval_request"})


class Known(Protocol):
    """Where a request finds what it refers to: a History, or a connection's own memory before one."""

    async def past(self, response_id: str, *, tenant: str) -> Past: ...

    async def item(self, item_id: str, *, tenant: str) -> FoundItem | None: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """`given` are the request's own items, with references resolved; `told` is what all hosted calls gave, by item;
    `attached` are the files of all items, as the model is to be told them; `compacted` the compactions that could be
    opened, by what they are sealed in."""

    past: Past
    given: Sequence[Item]
    told: dict[str, Told]
    instructions: str | None
    attached: Mapping[InputFile | InputImage, Part] = field(default_factory=dict[InputFile | InputImage, Part])
    compacted: dict[str, Compacted] = field(default_factory=dict[str, Compacted])
    current_turn: bool = False
    """Whether the model is shown no thoughts of earlier turns."""
    to_compact: bool = False
    """Whether it is to be compacted, and not answered."""

    @property
    def items(self) -> Sequence[Item]:
        """All that came before the response."""
        return [*self.past.items, *self.given]

    def messages(self, made: Sequence[Item | Told] = (), *, grouped: bool = False) -> list[Message]:
        """The conversation as a model is shown it; `made` is what the running response has put out so far."""
        if self.compacted or self.current_turn:
            messages = self.window(made).messages(partial(self.messages_of, grouped=grouped))
        else:
            messages = self.messages_of([*self.past.items, *self.given, *made], grouped=grouped)
        if self.instructions:
            messages.insert(0, Message(role="developer", content=self.instructions))
        return messages

    def window(self, made: Sequence[Item | Told] = ()) -> Window:
        """What of it a model is shown."""
        items = [*self.past.items, *self.given, *made]
        return find_window(without_earlier_thoughts(items) if self.current_turn else items, self.compacted)

    def said(self, made: Sequence[Item | Told] = ()) -> list[Message]:
        """What a model is shown that was said to it, word for word."""
        return self.window(made).said(self.messages_of)

    def is_compacted(self) -> bool:
        """Whether there is a compaction in it."""
        return CompactionItem in map(type, self.given) or CompactionItem in map(type, self.past.items)

    def left_out(self) -> Sequence[InputTransformation]:
        """What of the request's own input no model is shown."""
        return earlier_thoughts(self.given) if self.current_turn else ()

    def messages_of(self, items: Sequence[Item | Told], *, grouped: bool = False) -> list[Message]:
        """Items of it, by themselves, for a model."""
        return items_to_messages(items, self.told, grouped=grouped, attached=self.attached)

    def told_by_given(self) -> dict[str, Told]:
        """What the hosted calls among the request's own items told: it is kept with them."""
        return {item.id: self.told[item.id] for item in self.given if item.id in self.told}

    def given_json(self, ids: Ids) -> bytes:
        """The request's items as they are kept and listed: as they came, each with an id and a type."""
        return orjson.dumps([kept_item(item, ids) for item in self.given])


async def read_conversation(
    request: CreateResponse, history: Known, ids: Ids, *, tenant: str, kept: Past | None = None
) -> Conversation:
    """`ids` are those of the response; `kept` is what the request's conversation holds, if it is a turn of one. Raises
    InvalidRequest or NotFound where the input, or what it refers to, is wrong."""
    past = kept or Past()
    current_turn = request.reasoning is not None and request.reasoning.context == "current_turn"
    if request.previous_response_id is not None:
        past = await history.past(request.previous_response_id, tenant=tenant)
    if request.input is None or isinstance(request.input, str):
        text = request.input
        given: list[Item] = [] if text is None else [GivenMessage(type="message", role="user", content=text)]
        return Conversation(past, given, dict(past.told), request.instructions, current_turn=current_turn)
    check_items(request.input)
    given, told = await read_items(request.input, history, tenant=tenant)
    check_new(given, past)
    given = [item if item.id or item.type not in HOSTED else _with_id(item, ids) for item in given]
    approved_requests(request, [*past.items, *given])
    to_compact = CompactionTrigger in map(type, request.input)
    told = {**past.told, **told}
    if to_compact and not past.items and not given:
        raise InvalidRequest("There is nothing to compact.", param="input", code="invalid_value")
    return Conversation(past, given, told, request.instructions, current_turn=current_turn, to_compact=to_compact)


async def read_items(
    items: Sequence[Item], history: Known, *, tenant: str, field: str = "input"
) -> tuple[list[Item], dict[str, Told]]:
    """The items with references resolved, and what hosted calls among them told. Raises NotFound."""
    given: list[Item] = []
    told: dict[str, Told] = {}
    for index, item in enumerate(items):
        if isinstance(item, CompactionTrigger):
            continue
        if isinstance(item, ItemReference) or item.type in _KNOWN_BETTER:
            stored = await history.item(item.id, tenant=tenant) if item.id else None
            if isinstance(item, ItemReference) and stored is None:
                raise NotFound(
                    f"Item with id '{item.id}' not found. Items are not persisted when `store` is set to false.",
                    param=f"{field}[{index}].id",
                )
            if stored is not None and stored[1] is not None and item.id:
                told[item.id] = stored[1]
            given.append(stored[0] if stored is not None and isinstance(item, ItemReference) else item)
        elif isinstance(item, ReasoningItem) and item.id and _is_bare(item):
            stored = await history.item(item.id, tenant=tenant)
            given.append(stored[0] if stored is not None else item)
        else:
            given.append(item)
    return given, told


def _is_bare(item: ReasoningItem) -> bool:
    """Whether it says nothing itself: a client that sends the id alone means what is stored."""
    return not (item.content or item.summary or item.encrypted_content)


def _with_id(item: Item, ids: Ids) -> Item:
    """A hosted call that its client keeps without an id: what it told is known by one."""
    return item.model_copy(update={"id": ids.item(_PREFIXES[item.type or ""])})


def kept_item(item: Item, ids: Ids) -> dict[str, Any]:
    """An item as it is kept and listed: as it came, with an id, a type, and a status where it can have one."""
    fields: dict[str, Any] = orjson.loads(item.model_dump_json(exclude_none=True))
    fields.setdefault("type", "message")
    if "id" not in fields:
        fields["id"] = ids.item(_PREFIXES[fields["type"]])
    match item:
        case GivenMessage(content=str() as text):
            fields["content"] = [{"type": "input_text", "text": text}]
        case AssistantMessage(content=str() as text):
            fields["content"] = [{"type": "output_text", "text": text, "annotations": []}]
        case _:
            pass
    if fields["type"] not in _NO_STATUS:
        fields.setdefault("status", "completed")
    return fields
