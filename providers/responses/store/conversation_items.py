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
from apis.wire.items import Item, LocalShellCallOutput
from providers.responses.events.ids import Ids, response_of
from providers.responses.events.tool_result import Told
from providers.responses.store.history import ITEMS, FoundItem
from providers.responses.store.history_cache import Past

MAX_ITEMS: Final = 10_000
"""Of one conversation, as long as it is to be answered."""
_PAGE: Final = 1000
_ID: Final = re.compile(r"conv_([0-9a-f]{32})")


class Head(msgspec.Struct):
    """What is kept of a conversation itself. One that is `gone` is unknown, and its items are being forgotten."""

    created_at: int
    metadata: dict[str, str]
    gone: bool = False


class Kept(msgspec.Struct):
    """An item as the API shows it, and what it told the model, where it does not say so itself."""

    item: msgspec.Raw
    told: Told | None = None


@dataclass(frozen=True, slots=True)
class Ref:
    """Which conversation."""

    tenant: str
    id: str

    def key(self, kind: str) -> str:
        """Of its one record of that kind: `conversation`, `conversation_end` or `conversation_floor`."""
        return f"{self.tenant}/{kind}/{self.id}"

    @property
    def items(self) -> str:
        """The beginning of all its items' keys."""
        return f"{self.tenant}/conversation_item/{self.id}/"

    @property
    def places(self) -> str:
        """The beginning of the keys of all their places."""
        return f"{self.tenant}/conversation_place/{self.id}/"

    def item(self, place: int) -> str:
        return f"{self.items}{place:010d}"

    def place(self, item_id: str) -> str:
        # an id that a client made up may hold what no key may, or be too long
        plain = item_id.isascii() and item_id.isprintable() and len(item_id) <= 256
        return self.places + (item_id if plain else hashlib.sha256(item_id.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a conversation beside its items; each with the version it was read at."""

    head: Head
    head_version: int
    end: Entry | None
    floor: Entry | None


async def find(kv: KVStore, ref: Ref, *, gone: bool = False) -> Found:
    """Raises NotFound; with `gone`, not for one that is being forgotten."""
    if _ID.fullmatch(ref.id):
        keys = [ref.key(kind) for kind in ("conversation", "conversation_end", "conversation_floor")]
        head, end, floor = await kv.get_many(keys)
        if head is not None:
            read = decode_head(head.value)
            if gone or not read.gone:
                return Found(read, head.version, end, floor)
    raise unknown(ref.id)


async def read_past(kv: KVStore, ref: Ref) -> Past:
    """All items, as what came before a turn. Raises InvalidRequest where there are too many."""
    kept: list[Kept] = []
    after = ""
    while rows := await kv.scan(ref.items, after=after, limit=_PAGE):
        after = rows[-1][0]
        kept += [decode_kept(entry.value) for _, entry in rows]
        if len(kept) > MAX_ITEMS:
            raise InvalidRequest(f"The conversation holds more than {MAX_ITEMS} items.", param="conversation")
    items = ITEMS.validate_json(b"[%b]" % b",".join(bytes(each.item) for each in kept))
    told = {item.id: each.told for item, each in zip(items, kept, strict=True) if item.id and each.told}
    return Past(items, told)


async def find_item(kv: KVStore, tenant: str, item_id: str) -> FoundItem | None:
    """An item that was added to a conversation under an id of its own, and what it told; None if there is none."""
    named = response_of(item_id)
    if named is None:
        return None
    ref = Ref(tenant, named.replace("resp_", "conv_"))
    place = await kv.get(ref.place(item_id))
    if place is None:
        return None
    head, entry = await kv.get_many([ref.key("conversation"), ref.item(int(place.value))])
    if head is None or entry is None or decode_head(head.value).gone:
        return None
    kept = decode_kept(entry.value)
    return ITEMS.validate_json(b"[%b]" % bytes(kept.item))[0], kept.told


def adding(
    ref: Ref, end: Entry | None, items: Sequence[dict[str, Any]], told: Mapping[str, Told]
) -> tuple[list[dict[str, Any]], list[Op]]:
    """The items as they will be, and what puts them at the end, if that is still where it was."""
    start = int(end.value) if end is not None else 0
    ids = Ids(ref.id.replace("conv_", "resp_"), start)
    added = [_named(fields, ids) for fields in items]
    ops: list[Op] = [
        Put(ref.key("conversation_end"), str(start + len(added)).encode(), None, end.version if end else ABSENT)
    ]
    for place, fields in enumerate(added, start):
        kept = Kept(msgspec.Raw(orjson.dumps(fields)), told.get(fields["id"]))
        ops.append(Put(ref.item(place), encode(kept)))
        ops.append(Put(ref.place(fields["id"]), str(place).encode(), None, ABSENT))
    return added, ops


def check_new(given: Sequence[Item], past: Past) -> None:
    """Refuse items of a request that the conversation has already."""
    named = {item.id: at for at, item in enumerate(given) if item.id and not isinstance(item, LocalShellCallOutput)}
    for item in past.items if named else ():
        if item.id in named:
            raise has_already(item.id, f"input[{named[item.id]}].id")


def has_already(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"The conversation has an item '{item_id}' already.", param=param, code="invalid_value")


def unknown(conversation_id: str) -> NotFound:
    return NotFound(f"Conversation with id '{conversation_id[:256]}' not found.", param="conversation")


def _named(fields: dict[str, Any], ids: Ids) -> dict[str, Any]:
    """The item under an id that is its own: the output of a local shell comes under that of its call."""
    if fields["type"] != "local_shell_call_output":
        return fields
    return {**fields, "id": ids.item("lsho"), "call_id": fields.get("call_id") or fields["id"]}


decode_head = msgspec.json.Decoder(Head).decode
decode_kept = msgspec.json.Decoder(Kept).decode
encode = msgspec.json.Encoder().encode
