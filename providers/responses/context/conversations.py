"""Conversations in a KVStore: made, changed, read, and given to the responses that are turns of them."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson
from openai.types.conversations import Conversation

from apis.conversations import (
    AddItems,
    Conversations,
    CreateConversation,
    ItemsPage,
    UpdateConversation,
)
from apis.errors import ConversationLocked, InvalidRequest, NotFound
from apis.files import Page
from apis.responses import CreateResponse
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.wire.items import Item
from providers.responses.context.conversation import kept_item, read_items
from providers.responses.context.messages import check_items
from providers.responses.context.url_files import as_given
from providers.responses.events.ids import Ids
from providers.responses.events.tool_result import Told
from providers.responses.store.conversation_items import (
    Head,
    Ref,
    adding,
    decode_kept,
    encode,
    find,
    has_already,
    read_past,
)
from providers.responses.store.conversation_lock import Floor
from providers.responses.store.history import History
from providers.responses.store.history_cache import Past

_FORGET_AT_ONCE = 500


class StoredConversations(Conversations):
    """The conversations of one store. They are kept until they are deleted."""

    def __init__(self, kv: KVStore, history: History, *, background_s: float) -> None:
        """`background_s` is more than a background response can take, waiting included."""
        self._kv = kv
        self._history = history
        self._background_s = background_s

    async def create(self, request: CreateConversation, *, tenant: str) -> Conversation:
        ref = Ref(tenant, f"conv_{secrets.token_hex(16)}")
        given, told = await self._read(request.items or (), tenant)
        head = Head(int(time.time()), request.metadata or {})
        _, ops = adding(ref, None, _fields(given, ref, 0), told)
        await self._kv.write([Put(ref.key("conversation"), encode(head), None, ABSENT), *ops])
        return _shown(ref, head)

    async def get(self, conversation_id: str, *, tenant: str) -> Conversation:
        ref = Ref(tenant, conversation_id)
        return _shown(ref, (await find(self._kv, ref)).head)

    async def update(self, conversation_id: str, request: UpdateConversation, *, tenant: str) -> Conversation:
        ref = Ref(tenant, conversation_id)
        while True:
            found = await find(self._kv, ref)
            head = Head(found.head.created_at, request.metadata or {})
            if await self._kv.write([Put(ref.key("conversation"), encode(head), None, found.head_version)]):
                return _shown(ref, head)

    async def delete(self, conversation_id: str, *, tenant: str) -> None:
        ref = Ref(tenant, conversation_id)
        while not (found := await find(self._kv, ref, gone=True)).head.gone:
            # first nobody knows it any more, and no response can end in it; one that asks again goes on from there
            head = Head(found.head.created_at, {}, gone=True)
            ends = [Delete(ref.key("conversation_end")), Delete(ref.key("conversation_floor"))]
            await self._kv.write([Put(ref.key("conversation"), encode(head), None, found.head_version), *ends])
        for prefix in (ref.items, ref.places):
            while rows := await self._kv.scan(prefix, limit=_FORGET_AT_ONCE):
                await self._kv.write([Delete(key) for key, _ in rows])
        await self._kv.write([Delete(ref.key("conversation"))])

    async def add(self, conversation_id: str, request: AddItems, *, tenant: str) -> Sequence[dict[str, Any]]:
        ref = Ref(tenant, conversation_id)
        await find(self._kv, ref)
        given, told = await self._read(request.items, tenant)
        if not given:
            return ()
        while True:
            found = await find(self._kv, ref)
            if found.floor is not None:
                raise ConversationLocked(ref.id)
            start = int(found.end.value) if found.end is not None else 0
            added, ops = adding(ref, found.end, _fields(given, ref, start), told)
            keys = [ref.key("conversation_end"), *(ref.place(fields["id"]) for fields in added)]
            end, *places = await self._kv.get_many(keys)
            if end != found.end:
                continue
            for index, place in enumerate(places):
                if place is not None:
                    raise has_already(added[index]["id"], f"items[{index}].id")
            free = Delete(ref.key("conversation_floor"), ABSENT)
            if await self._kv.write([free, *ops]) is not None:
                return [as_given(fields) for fields in added]

    async def list(self, conversation_id: str, page: ItemsPage, *, tenant: str) -> Page[dict[str, Any]]:
        ref = Ref(tenant, conversation_id)
        await find(self._kv, ref)
        reverse = page.order == "desc"
        cursor = ""
        if page.after is not None:
            place = await self._kv.get(ref.place(page.after))
            if place is None:
                raise InvalidRequest(
                    f"The conversation has no item '{page.after}'.", param="after", code="invalid_value"
                )
            cursor = ref.item(int(place.value))
        after, before = ("", cursor) if reverse else (cursor, "")
        rows = await self._kv.scan(ref.items, after=after, before=before, limit=page.limit + 1, reverse=reverse)
        items = [_item(entry.value) for _, entry in rows[: page.limit]]
        return Page(items, len(rows) > page.limit)

    async def item(self, conversation_id: str, item_id: str, *, tenant: str) -> dict[str, Any]:
        ref = Ref(tenant, conversation_id)
        await find(self._kv, ref)
        place = await self._kv.get(ref.place(item_id))
        entry = None if place is None else await self._kv.get(ref.item(int(place.value)))
        if entry is None:
            raise _no_item(ref, item_id)
        return _item(entry.value)

    async def delete_item(self, conversation_id: str, item_id: str, *, tenant: str) -> Conversation:
        ref = Ref(tenant, conversation_id)
        while True:
            found = await find(self._kv, ref)
            if found.floor is not None:
                raise ConversationLocked(ref.id)
            place = await self._kv.get(ref.place(item_id))
            if place is None:
                raise _no_item(ref, item_id)
            ops: list[Op] = [
                Delete(ref.key("conversation_floor"), ABSENT),
                Delete(ref.place(item_id), place.version),
                Delete(ref.item(int(place.value))),
            ]
            if await self._kv.write(ops) is not None:
                return _shown(ref, found.head)

    # --- for responses ------------------------------------------------------------------------------------------------

    async def take_floor(self, request: CreateResponse, response_id: str, *, tenant: str) -> Floor | None:
        """The floor of the conversation that a response will add to, if it is to add to one.

        Raises ConversationLocked and NotFound.
        """
        if request.conversation_id is None or request.store is False:
            return None
        floor = Floor(self._kv, Ref(tenant, request.conversation_id), response_id, self._background_s)
        await floor.take()
        return floor

    async def past(self, request: CreateResponse, *, tenant: str) -> Past | None:
        """What the request's conversation, if it has one, holds so far. Raises NotFound."""
        if request.conversation_id is None:
            return None
        ref = Ref(tenant, request.conversation_id)
        await find(self._kv, ref)
        return await read_past(self._kv, ref)

    async def _read(self, items: Sequence[Item], tenant: str) -> tuple[Sequence[Item], dict[str, Told]]:
        check_items(items, "items")
        return await read_items(items, self._history, tenant=tenant, field="items")


def _fields(items: Sequence[Item], ref: Ref, start: int) -> list[dict[str, Any]]:
    ids = Ids(ref.id.replace("conv_", "resp_"), start)
    return [kept_item(item, ids) for item in items]


def _item(value: bytes) -> dict[str, Any]:
    return as_given(orjson.loads(bytes(decode_kept(value).item)))


def _no_item(ref: Ref, item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:256]}' not found in conversation '{ref.id}'.", param="item_id")


def _shown(ref: Ref, head: Head) -> Conversation:
    return Conversation(id=ref.id, object="conversation", created_at=head.created_at, metadata=head.metadata)
