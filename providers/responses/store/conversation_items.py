"""The records of conversations in a KVStore: loading them, and the operations that append items.

TENANT/conversation/ID               its creation time and metadata
TENANT/conversation_end/ID           the position of the next item, and that of the newest compaction, which later
                                     responses may begin with; each append writes it
TENANT/conversation_item/ID/POSITION an item, with the tool result that the model saw if a hosted tool made it
TENANT/conversation_place/ID/ITEM    the position of the item with that id
TENANT/conversation_floor/ID         the lock: held by the response that is in progress in the conversation
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from apis.errors import InvalidRequest, NotFound
from apis.storage.keys import id_to_key_part
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, encode_record, reading_stored, scan_all
from apis.wire.item_types import TYPES_WITH_ID_OF_CALL, id_prefix
from apis.wire.items import Item
from providers.common.state.scan import decode_or_skip
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.history_cache import CachedConversation, LoadAllowance, LoadedHistory, read_stored_items

MAX_CONVERSATION_ITEMS: Final = 10_000
"""Items that a response reads of its conversation: all, or those from the newest compaction on. More are refused."""
_NO_COMPACTION: Final = -1
_OUTLIVES_COMPACTIONS: Final = -2
"""Stands for the position of the newest compaction in a conversation with items whose effect outlives it."""
_LASTING_TYPES: Final = frozenset(("additional_tools", "configuration_update"))
_CONVERSATION_ID: Final = re.compile(r"conv_[0-9a-f]{44}")
_CONVERSATION_ID_FORM: Final = re.compile(r"conv_[0-9A-Za-z_-]{1,251}")
"""Form of an id; one that has it and is none of this server's is unknown, and any other is no id."""


class ConversationRecord(msgspec.Struct):
    """A conversation without its items. One with `is_deleted` is unknown to clients while its items are deleted."""

    created_at: int
    metadata: dict[str, str]
    is_deleted: bool = False


class StoredItem(msgspec.Struct):
    """An item as the API shows it, and its tool result as the model saw it, where the item does not hold that."""

    item: msgspec.Raw
    tool_result: ToolResultRecord | None = None


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """The tenant and id of a conversation, and the keys of its records."""

    tenant: str
    id: str

    def record_key(self, kind: str) -> str:
        """Return the key of its one record of that kind: `conversation`, `conversation_end` or
        `conversation_floor`."""
        return f"{self.tenant}/{kind}/{self.id}"

    @property
    def item_prefix(self) -> str:
        """The prefix of the keys of all its items."""
        return f"{self.tenant}/conversation_item/{self.id}/"

    @property
    def position_prefix(self) -> str:
        """The prefix of the keys of all its items' positions."""
        return f"{self.tenant}/conversation_place/{self.id}/"

    def item_key(self, position: int) -> str:
        return f"{self.item_prefix}{position:010d}"

    def position_key(self, item_id: str) -> str:
        return self.position_prefix + id_to_key_part(item_id)


@dataclass(frozen=True, slots=True)
class ConversationState:
    """The records of a conversation other than its items, each with its version."""

    record: ConversationRecord
    record_version: int
    end_entry: Entry | None
    lock_entry: Entry | None


async def load_conversation_state(
    kv: KVStore, ref: ConversationKeys, *, include_deleted: bool = False
) -> ConversationState:
    """Return the state of the conversation. Raises InvalidRequest for an id of another form, and NotFound, for a
    deleted conversation unless `include_deleted`: then a damaged record counts as an empty one, to be deleted."""
    if not _CONVERSATION_ID_FORM.fullmatch(ref.id):
        raise InvalidRequest(
            f"Invalid 'conversation': {ref.id[:64]!r}. Expected an ID that begins with 'conv_'.",
            param="conversation",
            code="invalid_value",
        )
    if _CONVERSATION_ID.fullmatch(ref.id):
        keys = [ref.record_key(kind) for kind in ("conversation", "conversation_end", "conversation_floor")]
        record_entry, end_entry, lock_entry = await kv.get_many(keys)
        if record_entry is not None:
            if include_deleted:
                readable = decode_or_skip(kv, keys[0], record_entry, ConversationRecord)
                record = readable or ConversationRecord(0, {})
            else:
                record = decode_record(record_entry, ConversationRecord)
            if include_deleted or not record.is_deleted:
                return ConversationState(record, record_entry.version, end_entry, lock_entry)
    raise conversation_not_found_error(ref.id)


async def load_conversation_items(
    kv: KVStore, ref: ConversationKeys, cached: CachedConversation, allowance: LoadAllowance
) -> CachedConversation:
    """Return the conversation with the items that came after the cached ones. Raises InvalidRequest if there are too
    many, or they are larger than `allowance`, which the cached ones are taken from."""
    stored_items: list[StoredItem] = []
    size, end, count = cached.history.size_bytes, cached.end, len(cached.history.items)
    after = ref.item_key(end - 1) if end else ""
    async with aclosing(scan_all(kv, ref.item_prefix, after=after)) as rows:
        async for key, entry in rows:
            size += len(entry.value)
            allowance.take_history(len(entry.value), "conversation")
            stored_items.append(decode_record(entry, StoredItem))
            end = int(key.removeprefix(ref.item_prefix)) + 1
            if count + len(stored_items) > MAX_CONVERSATION_ITEMS:
                raise InvalidRequest(
                    f"The conversation holds more than {MAX_CONVERSATION_ITEMS} items.", param="conversation"
                )
    with reading_stored(ref.id):
        items = await read_stored_items(b"[%b]" % b",".join(bytes(stored.item) for stored in stored_items))
    tool_results = {
        item.id: stored.tool_result
        for item, stored in zip(items, stored_items, strict=True)
        if item.id and stored.tool_result
    }
    history = LoadedHistory(
        [*cached.history.items, *items], {**cached.history.tool_results, **tool_results}, size_bytes=size
    )
    return msgspec.structs.replace(cached, end=end, history=history)


def decode_position(entry: Entry) -> int:
    """Return the position of an item, or of the end, that the entry holds. Raises StorageCorrupt."""
    with reading_stored("the position of an item"):
        return int(entry.value)


def decode_end(entry: Entry | None) -> tuple[int, int]:
    """Return the position of the next item, and that of the newest compaction, which is negative where there is none
    that a response may begin with. Raises StorageCorrupt."""
    if entry is None:
        return 0, _NO_COMPACTION
    with reading_stored("the end of a conversation"):
        end, _, compaction = entry.value.decode().partition(" ")
        return int(end), int(compaction) if compaction else _NO_COMPACTION


def build_append_ops(
    ref: ConversationKeys,
    end_entry: Entry | None,
    items: Sequence[dict[str, Any]],
    tool_results: Mapping[str, ToolResultRecord],
) -> tuple[list[dict[str, Any]], list[Op]]:
    """Return the items with their final ids, and the operations that append them on the condition that the end of the
    conversation is still at `end_entry`."""
    start, compaction = decode_end(end_entry)
    ids = ResponseIds(ref.id.replace("conv_", "resp_"), start)
    added = [_assign_item_id(fields, ids) for fields in items]
    for position, fields in enumerate(added, start):
        if fields["type"] in _LASTING_TYPES:
            compaction = _OUTLIVES_COMPACTIONS
        elif fields["type"] == "compaction" and compaction != _OUTLIVES_COMPACTIONS:
            compaction = position
    end = f"{start + len(added)}" if compaction == _NO_COMPACTION else f"{start + len(added)} {compaction}"
    ops: list[Op] = [
        Put(
            ref.record_key("conversation_end"),
            end.encode(),
            None,
            end_entry.version if end_entry else ABSENT,
        )
    ]
    for position, fields in enumerate(added, start):
        stored = StoredItem(msgspec.Raw(orjson.dumps(fields)), tool_results.get(fields["id"]))
        ops.append(Put(ref.item_key(position), encode_record(stored)))
        ops.append(Put(ref.position_key(fields["id"]), str(position).encode(), None, ABSENT))
    return added, ops


def reject_repeated_items(input_items: Sequence[Item], field: str = "input") -> None:
    """Raise InvalidRequest, naming the index in `field`, for an item that a request adds to a conversation twice."""
    seen_ids: set[str] = set()
    for index, item in enumerate(input_items):
        if item.id is None or item.type in TYPES_WITH_ID_OF_CALL:
            continue
        if item.id in seen_ids:
            raise InvalidRequest(f"Duplicate item id '{item.id}'.", param=f"{field}[{index}].id", code="invalid_value")
        seen_ids.add(item.id)


def reject_existing_items(input_items: Sequence[Item], history: LoadedHistory) -> None:
    """Raise InvalidRequest for an item of a request that the conversation has already."""
    if not history.items:
        return
    positions = {
        item.id: position
        for position, item in enumerate(input_items)
        if item.id and item.type not in TYPES_WITH_ID_OF_CALL
    }
    for item in history.items if positions else ():
        if item.id in positions:
            raise duplicate_item_error(item.id, f"input[{positions[item.id]}].id")


def duplicate_item_error(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"The conversation has an item '{item_id}' already.", param=param, code="invalid_value")


def conversation_not_found_error(conversation_id: str) -> NotFound:
    return NotFound(f"Conversation with id '{conversation_id[:256]}' not found.", param="conversation")


def _assign_item_id(fields: dict[str, Any], ids: ResponseIds) -> dict[str, Any]:
    """Return the item with an id of its own, where clients send it with the id of its call."""
    if fields["type"] not in TYPES_WITH_ID_OF_CALL:
        return fields
    return {
        **fields,
        "id": ids.new_item_id(id_prefix(fields["type"])),
        "call_id": fields.get("call_id") or fields["id"],
    }
