"""Conversation: the input items of a request and the history before them, as the model will read them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import orjson
from openai.types.responses.response import InputTransformation

from apis.chat import ContentPart, Message
from apis.errors import InvalidRequest, NotFound
from apis.responses import CreateResponse
from apis.storage.records import reading_stored
from apis.wire.base import value_to_kept_json
from apis.wire.item_parts import InputFile, InputImage
from apis.wire.items import (
    ITEM_LIST_ADAPTER,
    AssistantMessage,
    CompactionTrigger,
    InputMessage,
    Item,
    ItemReference,
    ReasoningItem,
)
from apis.wire.tool_items import ImageGenerationCallItem
from providers.common.fair_turns import do_in_turns, end_pass
from providers.responses.context.messages import ItemReader, check_items, items_to_messages
from providers.responses.context.window import (
    CompactionContent,
    ContextWindow,
    drop_earlier_reasoning,
    find_window,
    list_dropped_reasoning,
)
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.events.unvalidated import unvalidated
from providers.responses.store.conversation_items import reject_existing_items, reject_repeated_items
from providers.responses.store.history_cache import LoadedHistory
from providers.responses.store.item_lookup import FoundItem, LoadAllowance
from providers.responses.tools.item_types import (
    HOSTED_CALL_TYPES,
    INTERNAL_FIELDS,
    ITEM_TYPES,
    LOOKED_UP_TYPES,
    id_prefix,
)
from providers.responses.tools.mcp.approvals import find_approved_calls


class HistorySource(Protocol):
    """Source of the responses and items that a request refers to: the store, or a connection's own cache before it.
    Its methods are those of History."""

    async def load_history(self, response_id: str, *, tenant: str) -> LoadedHistory: ...

    max_bytes: int
    """The most bytes of stored items that one request may load."""

    async def find_items(
        self, params_by_id: Mapping[str, str], *, tenant: str, allowance: LoadAllowance
    ) -> dict[str, FoundItem]: ...


class ResponseProgress(msgspec.Struct, frozen=True):
    """Output of a running response that its next turn has to read: the items in order, with a ToolResultRecord for
    each call that has no item; the results of hosted calls, by item id; and its compactions, by sealed token."""

    items: Sequence[Item | ToolResultRecord] = ()
    tool_results: Mapping[str, ToolResultRecord] = msgspec.field(default_factory=dict[str, ToolResultRecord])
    compactions: Mapping[str, CompactionContent] = msgspec.field(default_factory=dict[str, CompactionContent])


ITEM_WORK: Final = 200
"""Work of reading or writing one item, as `fair_turns` counts it."""
_NO_PROGRESS: Final = ResponseProgress()
_build_input_message = unvalidated(InputMessage)


class Conversation(msgspec.Struct, frozen=True):
    """Everything before a response. `input_items` are the request's own, with references resolved; `tool_results` the
    results of all hosted calls, by item id; `attachments` the files of all items, as the model reads them;
    `compactions` the contents of the compactions that this server could open, by sealed token."""

    history: LoadedHistory
    input_items: Sequence[Item]
    tool_results: Mapping[str, ToolResultRecord]
    instructions: str | None
    attachments: Mapping[InputFile | InputImage, ContentPart] = msgspec.field(
        default_factory=dict[InputFile | InputImage, ContentPart]
    )
    compactions: Mapping[str, CompactionContent] = msgspec.field(default_factory=dict[str, CompactionContent])
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

    @property
    def is_plain_text(self) -> bool:
        """It is nothing but messages of text, in the request itself: there is nothing to look up, to open or to fetch
        for the model."""
        return not self.history.items and all(
            isinstance(item, InputMessage) and isinstance(item.content, str) for item in self.input_items
        )

    def messages(
        self, progress: ResponseProgress = _NO_PROGRESS, *, supports_namespaces: bool = False
    ) -> list[Message]:
        """Return the conversation as the model reads it, with the output of the running response at its end."""
        render = partial(self._render, progress.tool_results, supports_namespaces=supports_namespaces)
        window = self.window(progress)
        messages = window.messages(render(window.recent_items), render)
        if self.instructions:
            messages.insert(0, Message(role="developer", content=self.instructions))
        return messages

    async def read_messages(self, *, supports_namespaces: bool = False) -> list[Message]:
        """Return what `messages` returns before the response; a long conversation is read at turns of the tenant."""
        window = self.window()
        await end_pass(window.recent_items)
        reader = ItemReader(
            self.tool_results,
            supports_namespaces=supports_namespaces,
            attachments=self.attachments,
            sees_images=self.sees_images,
        )
        await do_in_turns(window.recent_items, reader.read, ITEM_WORK)
        render = partial(self._render, {}, supports_namespaces=supports_namespaces)
        messages = window.messages(reader.finish(), render)
        await end_pass(messages)
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

    def input_transformations(self) -> Sequence[InputTransformation]:
        """Return the items of the request's own input that are not shown to the model."""
        return list_dropped_reasoning(self.input_items) if self.current_turn_only else ()

    def render_items(self, items: Sequence[Item | ToolResultRecord]) -> list[Message]:
        """Return some of the conversation's items, by themselves, as messages."""
        return self._render({}, items)

    def _render(
        self,
        tool_results: Mapping[str, ToolResultRecord],
        items: Sequence[Item | ToolResultRecord],
        *,
        supports_namespaces: bool = False,
    ) -> list[Message]:
        return items_to_messages(
            items,
            {**self.tool_results, **tool_results} if tool_results else self.tool_results,
            supports_namespaces=supports_namespaces,
            attachments=self.attachments,
            sees_images=self.sees_images,
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
        """Return what `input_items_to_json` returns; many items are written at turns of the tenant."""
        stored: list[dict[str, Any]] = []
        await do_in_turns(self.input_items, lambda item: stored.append(stored_item(item, ids)), ITEM_WORK)
        return value_to_kept_json(stored)

    def input_items_to_json(self, ids: ResponseIds) -> bytes:
        """Return the request's items as a JSON array, as they are stored and listed, each with an id and a type."""
        return value_to_kept_json([stored_item(item, ids) for item in self.input_items])


async def read_conversation(
    request: CreateResponse,
    history_source: HistorySource,
    ids: ResponseIds,
    *,
    tenant: str,
    conversation_history: LoadedHistory | None = None,
) -> Conversation:
    """Read the request's input and the history that it follows. `ids` are those of the response;
    `conversation_history` holds the items of the stored conversation that the request names, if it names one.

    Raises InvalidRequest or NotFound where the input, or an item that it refers to, is wrong.
    """
    history = conversation_history or LoadedHistory()
    if request.previous_response_id is not None:
        history = await history_source.load_history(request.previous_response_id, tenant=tenant)
    input_items: list[Item]
    tool_results, must_compact = history.tool_results, False
    if isinstance(request.input, list):
        check_items(request.input)
        await end_pass(request.input)
        resolved, input_results = await resolve_items(
            request.input, history_source, tenant=tenant, loaded_bytes=history.size_bytes
        )
        if request.conversation_id is not None:
            reject_repeated_items(resolved)
        await end_pass(resolved)
        reject_existing_items(resolved, history)
        input_items = [
            item if item.id or item.type not in HOSTED_CALL_TYPES else _assign_id(item, ids) for item in resolved
        ]
        find_approved_calls(request, [*history.items, *input_items])
        tool_results = {**tool_results, **input_results}
        await end_pass(input_items)
        must_compact = CompactionTrigger in map(type, request.input)
        if must_compact and not history.items and not input_items:
            raise InvalidRequest("There is nothing to compact.", param="input", code="invalid_value")
    else:
        text = request.input
        input_items = [] if text is None else [_build_input_message(type="message", role="user", content=text)]
    return Conversation(
        history,
        input_items,
        tool_results,
        request.instructions,
        current_turn_only=request.reasoning is not None and request.reasoning.context == "current_turn",
        must_compact=must_compact,
    )


async def resolve_items(
    items: Sequence[Item], history_source: HistorySource, *, tenant: str, loaded_bytes: int = 0, field: str = "input"
) -> tuple[list[Item], dict[str, ToolResultRecord]]:
    """Return the items with references resolved, and the stored results of the hosted calls among them, by item id.
    `loaded_bytes` are those of the history before them; `field` names the list in errors. Raises NotFound, and
    InvalidRequest where more is referred to than one request may load."""
    params_by_id: dict[str, str] = {}
    for index, item in enumerate(items):
        if item.id and (_refers(item) or item.type in LOOKED_UP_TYPES):
            params_by_id.setdefault(item.id, f"{field}[{index}].id")
    await end_pass(items)
    if not params_by_id:
        return [item for item in items if not isinstance(item, CompactionTrigger)], {}
    allowance = LoadAllowance(history_source.max_bytes, loaded_bytes)
    found_items = await history_source.find_items(params_by_id, tenant=tenant, allowance=allowance)
    stored_items: dict[str, Item] = {}
    resolved: list[Item] = []
    await end_pass(items)
    for index, item in enumerate(items):
        if isinstance(item, CompactionTrigger):
            continue
        if not (item.id and _refers(item)):
            resolved.append(_with_internal_field(item, found_items.get(item.id or "")))
            continue
        param = f"{field}[{index}].id"
        if item.id in stored_items:  # it is in memory once, and once more in the prompt for each reference
            allowance.take(len(found_items[item.id].json), param)
        elif item.id in found_items:
            with reading_stored(item.id):
                stored_items[item.id] = ITEM_LIST_ADAPTER.validate_json(b"[%b]" % found_items[item.id].json)[0]
        elif not isinstance(item, ReasoningItem):
            raise NotFound(
                f"Item with id '{item.id}' not found. Items are not persisted when `store` is set to false.",
                param=param,
            )
        resolved.append(stored_items.get(item.id, item))
    return resolved, {
        item_id: each.tool_result for item_id, each in found_items.items() if each.tool_result is not None
    }


def _with_internal_field(item: Item, found_item: FoundItem | None) -> Item:
    """Return an item that its client sent back with the field that the client did not see."""
    field = INTERNAL_FIELDS.get(item.type or "")
    if field is None or found_item is None:
        return item
    with reading_stored(item.id or ""):
        return item.model_copy(update={field: orjson.loads(found_item.json).get(field)})


def drop_repeated_outputs(conversation: Conversation) -> Conversation:
    """Return the conversation without those outputs of its request that its history has already: some clients send the
    outputs of all rounds again. Raises InvalidRequest for another output of a call that has one."""
    outputs: dict[str, dict[str, Any]] = {}
    for item in conversation.history.items:
        _follow_output(item, outputs)
    repeated: set[int] = set()
    for index, item in enumerate(conversation.input_items if outputs else ()):
        call_id: str | None = getattr(item, "call_id", None)
        if call_id in outputs and _is_output(item):
            if _output_fields(item) != outputs[call_id]:
                message = f"The call with call_id {call_id} has an output already, which is not the same."
                raise InvalidRequest(message, param=f"input[{index}].output", code="invalid_value")
            repeated.add(index)
        else:
            _follow_output(item, outputs)
    if not repeated:
        return conversation
    kept_items = [item for index, item in enumerate(conversation.input_items) if index not in repeated]
    return msgspec.structs.replace(conversation, input_items=kept_items)


def _follow_output(item: Item, outputs: dict[str, dict[str, Any]]) -> None:
    """Remember the output of a call. Another call with its id has no output yet."""
    call_id: str | None = getattr(item, "call_id", None)
    if call_id is None:
        return
    if _is_output(item):
        outputs[call_id] = _output_fields(item)
    else:
        outputs.pop(call_id, None)


def _is_output(item: Item) -> bool:
    return (item.type or "").endswith("_output")


def _output_fields(item: Item) -> dict[str, Any]:
    """Return what a model reads of an output."""
    return {name: value for name, value in item if name not in ("id", "status")}


def _refers(item: Item) -> bool:
    """Return whether a client means the stored item of this id: it is a reference, or empty but for its id."""
    return isinstance(item, ItemReference) or _is_id_only(item) or _is_image_id(item)


def _is_id_only(item: Item) -> bool:
    """Return whether the item is reasoning that is empty but for its id."""
    return isinstance(item, ReasoningItem) and not (item.content or item.summary or item.encrypted_content)


def _is_image_id(item: Item) -> bool:
    """Return whether the item names a generated image by nothing but its id."""
    return isinstance(item, ImageGenerationCallItem) and not (item.result or item.status)


def _assign_id(item: Item, ids: ResponseIds) -> Item:
    """Give a hosted call that its client stored without an id a new one: its result is looked up by id."""
    return item.model_copy(update={"id": ids.new_item_id(id_prefix(item.type or ""))})


def stored_item(item: Item, ids: ResponseIds) -> dict[str, Any]:
    """Return an item as it is stored and listed: as the client sent it, with an id, a type and, where its type has one,
    a status."""
    serializer: Any = item.__pydantic_serializer__  # model_dump_json() would decode the bytes to text
    fields: dict[str, Any] = orjson.loads(serializer.to_json(item, exclude_none=True, by_alias=True))
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
