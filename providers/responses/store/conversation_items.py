"""Where conversations are in a KVStore, and what adding items to one writes. Pure, but for reading.

TENANT/conversation/ID               when it was made, and its metadata
TENANT/conversation_end/ID           the place of the next item: whoever adds items moves it
TENANT/conversation_item/ID/PLACE    an item, and what the model was told if a hosted tool made it
TENANT/conversation_place/ID/ITEM    the place of the item with that id
TENANT/conversation_floor/ID         the response that is being made in it
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from apis.errors import InvalidRequest, NotFound
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from apis.wire.items import ITEM_LIST_ADAPTER, Item, LocalShellCallOutput
from providers.responses.events.ids import ResponseIds, response_id_of
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.history import ItemWithToolResult
from providers.responses.store.history_cache import LoadedHistory
from providers.responses.tools.item_types import id_prefix

MAX_CONVERSATION_ITEMS: Final = 10_000
"""Of one conversation, as long as it is to be answered."""
_PAGE_SIZE: Final = 1000
_CONVERSATION_ID: Final = re.compile(r"conv_([0-9a-f]{32})")


class ConversationRecord(msgspec.Struct, rename={"is_deleted": "gone"}):
    """What is kept of a conversation itself. One that is `gone` is unknown, and its items are being forgotten."""

    created_at: int
    metadata: dict[str, str]
    is_deleted: bool = False


class StoredItem(msgspec.Struct, rename={"tool_result": "told"}):
    """An item as the API shows it, and what it told the model, where it does not say so itself."""

    item: msgspec.Raw
    tool_result: ToolResultRecord | None = None


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """Which conversation."""

    tenant: str
    id: str

    def record_key(self, kind: str) -> str:
        """Of its one record of that kind: `conversation`, `conversation_end` or `conversation_floor`."""
        return f"{self.tenant}/{kind}/{self.id}"

    @property
    def item_prefix(self) -> str:
        """The beginning of all its items' keys."""
        return f"{self.tenant}/conversation_item/{self.id}/"

    @property
    def position_prefix(self) -> str:
        """The beginning of the keys of all their places."""
        return f"{self.tenant}/conversation_place/{self.id}/"

    def item_key(self, position: int) -> str:
        return f"{self.item_prefix}{position:010d}"

    def position_key(self, item_id: str) -> str:
        # an id that a client made up may hold what no key may, or be too long
        plain = item_id.isascii() and item_id.isprintable() and len(item_id) <= 256
        return self.position_prefix + (item_id if plain else hashlib.sha256(item_id.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class ConversationState:
    """What there is of a conversation beside its items; each with the version it was read at."""

    record: ConversationRecord
    record_version: int
    end_entry: Entry | None
    lock_entry: Entry | None


async def load_conversation_state(
    kv: KVStore, ref: ConversationKeys, *, include_deleted: bool = False
) -> ConversationState:
    """Raises NotFound; with `gone`, not for one that is being forgotten."""
    if _CONVERSATION_ID.fullmatch(ref.id):
        keys = [ref.record_key(kind) for kind in ("conversation", "conversation_end", "conversation_floor")]
        head, end, floor = await kv.get_many(keys)
        if head is not None:
            read = decode_conversation_record(head.value)
            if include_deleted or not read.is_deleted:
                return ConversationState(read, head.version, end, floor)
    raise conversation_not_found_error(ref.id)


async def load_conversation_history(kv: KVStore, ref: ConversationKeys) -> LoadedHistory:
    """All items, as what came before a turn. Raises InvalidRequest where there are too many."""
    kept: list[StoredItem] = []
    after = ""
    while rows := await kv.scan(ref.item_prefix, after=after, limit=_PAGE_SIZE):
        after = rows[-1][0]
        kept += [decode_stored_item(entry.value) for _, entry in rows]
        if len(kept) > MAX_CONVERSATION_ITEMS:
            raise InvalidRequest(
                f"The conversation holds more than {MAX_CONVERSATION_ITEMS} items.", param="conversation"
            )
    items = ITEM_LIST_ADAPTER.validate_json(b"[%b]" % b",".join(bytes(each.item) for each in kept))
    told = {item.id: each.tool_result for item, each in zip(items, kept, strict=True) if item.id and each.tool_result}
    return LoadedHistory(items, told)


async def find_conversation_item(kv: KVStore, tenant: str, item_id: str) -> ItemWithToolResult | None:
    """An item that was added to a conversation under an id of its own, and what it told; None if there is none."""
    named = response_id_of(item_id)
    if named is None:
        return None
    ref = ConversationKeys(tenant, named.replace("resp_", "conv_"))
    place = await kv.get(ref.position_key(item_id))
    if place is None:
        return None
    head, entry = await kv.get_many([ref.record_key("conversation"), ref.item_key(int(place.value))])
    if head is None or entry is None or decode_conversation_record(head.value).is_deleted:
        return None
    kept = decode_stored_item(entry.value)
    return ITEM_LIST_ADAPTER.validate_json(b"[%b]" % bytes(kept.item))[0], kept.tool_result


def build_append_ops(
    ref: ConversationKeys,
    end_entry: Entry | None,
    items: Sequence[dict[str, Any]],
    tool_results: Mapping[str, ToolResultRecord],
) -> tuple[list[dict[str, Any]], list[Op]]:
    """The items as they will be, and what puts them at the end, if that is still where it was."""
    start = int(end_entry.value) if end_entry is not None else 0
    ids = ResponseIds(ref.id.replace("conv_", "resp_"), start)
    added = [_assign_item_id(fields, ids) for fields in items]
    ops: list[Op] = [
        Put(
            ref.record_key("conversation_end"),
            str(start + len(added)).encode(),
            None,
            end_entry.version if end_entry else ABSENT,
        )
    ]
    for place, fields in enumerate(added, start):
        kept = StoredItem(msgspec.Raw(orjson.dumps(fields)), tool_results.get(fields["id"]))
        ops.append(Put(ref.item_key(place), encode_conversation_entry(kept)))
        ops.append(Put(ref.position_key(fields["id"]), str(place).encode(), None, ABSENT))
    return added, ops


def reject_existing_items(input_items: Sequence[Item], history: LoadedHistory) -> None:
    """Refuse items of a request that the conversation has already."""
    named = {
        item.id: at for at, item in enumerate(input_items) if item.id and not isinstance(item, LocalShellCallOutput)
    }
    for item in history.items if named else ():
        if item.id in named:
            raise duplicate_item_error(item.id, f"input[{named[item.id]}].id")


def duplicate_item_error(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"The conversation has an item '{item_id}' already.", param=param, code="invalid_value")


def conversation_not_found_error(conversation_id: str) -> NotFound:
    return NotFound(f"Conversation with id '{conversation_id[:256]}' not found.", param="conversation")


def _assign_item_id(fields: dict[str, Any], ids: ResponseIds) -> dict[str, Any]:
    """The item under an id that is its own: the output of a local shell comes under that of its call."""
    if fields["type"] != "local_shell_call_output":
        return fields
    return {
        **fields,
        "id": ids.new_item_id(id_prefix(fields["type"])),
        "call_id": fields.get("call_id") or fields["id"],
    }


decode_conversation_record = msgspec.json.Decoder(ConversationRecord).decode
decode_stored_item = msgspec.json.Decoder(StoredItem).decode
encode_conversation_entry = msgspec.json.Encoder().encode
