"""StoredConversations: conversations in a KVStore, with the lock and the history that a response of one needs."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from openai.types.conversations import Conversation
from pydantic import SecretStr

from apis.conversations import (
    AddItems,
    ConversationListParams,
    Conversations,
    CreateConversation,
    ItemListParams,
    UpdateConversation,
)
from apis.errors import ConversationLocked, InvalidRequest, NotFound
from apis.responses import CreateResponse, InputItemListParams
from apis.storage.keys import new_id_key
from apis.storage.kv_store import ABSENT, STORED_OVERHEAD_BYTES, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page, page_after
from apis.storage.records import PAGE_BYTES, decode_record, delete_all, encode_record, reading_stored
from apis.wire.items import Item
from providers.common.fair_turns import run_long
from providers.common.state.change import repeat_until_true, write_prepared
from providers.common.state.scan import skipping_damaged
from providers.responses.context.conversation import stored_item
from providers.responses.context.input_items import read_added_items
from providers.responses.context.item_views import ItemViews
from providers.responses.context.prompt_cache.chain_root import ChainRoots
from providers.responses.context.sealed_content import SealedContent
from providers.responses.events.ids import ResponseIds
from providers.responses.store.conversation_items import (
    ConversationKeys,
    ConversationRecord,
    ConversationState,
    StoredItem,
    build_append_ops,
    decode_end,
    decode_position,
    duplicate_item_error,
    load_conversation_items,
    load_conversation_state,
)
from providers.responses.store.conversation_lock import ConversationLock
from providers.responses.store.history import History
from providers.responses.store.history_cache import CachedConversation, LoadAllowance, LoadedHistory
from providers.responses.store.item_lookup import decode_item_ids
from providers.responses.store.large_items import LARGE_BYTES, decode_item, decode_raw_items
from providers.responses.store.listing import read_listing

_DELETE_BATCH_SIZE = 500
"""Items that are deleted in one write."""


class StoredConversations(Conversations):
    """The conversations of one store, which stay until they are deleted; `history` holds the other responses."""

    def __init__(
        self,
        kv: KVStore,
        history: History,
        reasoning_keys: Sequence[SecretStr] = (),
        *,
        background_s: float,
        hides_reasoning: bool = False,
    ) -> None:
        """`background_s` is longer than a background response can take in seconds, waiting included."""
        self._kv = kv
        self.history = history
        self.roots = ChainRoots()
        self.views = ItemViews(SealedContent(reasoning_keys, kv), history, hides_reasoning=hides_reasoning)
        self._background_s = background_s

    async def create(self, request: CreateConversation, *, tenant: str) -> Conversation:
        await self._kv.require_room(tenant)
        ref = ConversationKeys(tenant, f"conv_{new_id_key()}")
        items, tool_results = await read_added_items(request.items or (), self.history, tenant=tenant)
        record = ConversationRecord(int(time.time()), request.metadata or {})
        stored = await run_long(_items_to_stored, items, ref, 0)
        _, ops = await run_long(build_append_ops, ref, None, stored, tool_results)
        await self._kv.write([Put(ref.record_key("conversation"), encode_record(record), None, ABSENT), *ops])
        return _record_to_conversation(ref, record)

    async def require(self, conversation_id: str, *, tenant: str) -> None:
        ref = ConversationKeys(tenant, conversation_id)
        record = ConversationRecord(int(time.time()), {})
        _, ops = build_append_ops(ref, None, (), {})
        await self._kv.write([Put(ref.record_key("conversation"), encode_record(record), None, ABSENT), *ops])

    async def list(self, params: ConversationListParams, *, tenant: str) -> Page[Conversation]:
        def accept(conversation_id: str, entry: Entry) -> Conversation | None:
            record = decode_record(entry, ConversationRecord)
            ref = ConversationKeys(tenant, conversation_id)
            if record.is_deleted:
                return None
            conversation = _record_to_conversation(ref, record)
            return conversation if params.accepts(conversation) else None

        return await read_listing(self._kv, f"{tenant}/conversation/", params, accept, "conversation")

    async def get(self, conversation_id: str, *, tenant: str) -> Conversation:
        ref = ConversationKeys(tenant, conversation_id)
        return _record_to_conversation(ref, (await load_conversation_state(self._kv, ref)).record)

    async def update(self, conversation_id: str, request: UpdateConversation, *, tenant: str) -> Conversation:
        ref = ConversationKeys(tenant, conversation_id)
        record = ConversationRecord(0, request.metadata or {})

        async def prepare() -> Sequence[Op]:
            state = await load_conversation_state(self._kv, ref)
            record.created_at = state.record.created_at
            return [Put(ref.record_key("conversation"), encode_record(record), None, state.record_version)]

        await write_prepared(self._kv, prepare)
        return _record_to_conversation(ref, record)

    async def delete(self, conversation_id: str, *, tenant: str) -> None:
        ref = ConversationKeys(tenant, conversation_id)

        async def prepare() -> Sequence[Op] | None:
            # the mark comes first: no response can add to it any more, and a repeated request continues the deletion
            state = await load_conversation_state(self._kv, ref, include_deleted=True)
            if state.record.is_deleted:
                return None
            record = ConversationRecord(state.record.created_at, {}, is_deleted=True)
            return [
                Put(ref.record_key("conversation"), encode_record(record), None, state.record_version),
                Delete(ref.record_key("conversation_end")),
                Delete(ref.record_key("conversation_floor")),
            ]

        await write_prepared(self._kv, prepare)
        self.history.cache.discard(tenant, conversation_id)
        for prefix in (ref.item_prefix, ref.position_prefix):
            await delete_all(self._kv, prefix, page_size=_DELETE_BATCH_SIZE, durable=True)
        await self._kv.write([Delete(ref.record_key("conversation"))])

    async def add_items(
        self, conversation_id: str, request: AddItems, *, include: Sequence[str] = (), tenant: str
    ) -> Sequence[dict[str, Any]]:
        ref = ConversationKeys(tenant, conversation_id)
        await load_conversation_state(self._kv, ref)
        await self._kv.require_room(tenant)
        items, tool_results = await read_added_items(request.items, self.history, tenant=tenant)
        if not items:
            return ()
        added: list[dict[str, Any]] = []

        async def attempt() -> bool:
            nonlocal added
            state = await load_conversation_state(self._kv, ref)
            if state.lock_entry is not None:
                raise ConversationLocked(ref.id)
            start, _ = decode_end(state.end_entry)
            stored = await run_long(_items_to_stored, items, ref, start)
            added, ops = await run_long(build_append_ops, ref, state.end_entry, stored, tool_results)
            keys = [ref.record_key("conversation_end"), *(ref.position_key(fields["id"]) for fields in added)]
            end, *positions = await self._kv.get_many(keys)
            if end != state.end_entry:
                return False
            for index, position in enumerate(positions):
                if position is not None:
                    raise duplicate_item_error(added[index]["id"], f"items[{index}].id")
            expect_unlocked = Delete(ref.record_key("conversation_floor"), ABSENT)
            return await self._kv.write([expect_unlocked, *ops]) is not None

        await repeat_until_true(attempt)
        return await self.views.show_items(added, include, tenant)

    async def list_items(self, conversation_id: str, params: ItemListParams, *, tenant: str) -> Page[dict[str, Any]]:
        ref = ConversationKeys(tenant, conversation_id)
        await load_conversation_state(self._kv, ref)
        reverse = params.order == "desc"
        cursor = ""
        if params.after is not None:
            position = await self._kv.get(ref.position_key(params.after))
            if position is None:
                raise InvalidRequest(
                    f"The conversation has no item '{params.after}'.", param="after", code="invalid_value"
                )
            cursor = ref.item_key(decode_position(position))
        page = await self._read_items(ref, params.limit, cursor, reverse=reverse)
        return replace(page, data=await self.views.show_items(page.data, params.include or (), tenant))

    async def _read_items(
        self, ref: ConversationKeys, limit: int, cursor: str, *, reverse: bool
    ) -> Page[dict[str, Any]]:
        """Return a page of the readable items after a key, of up to PAGE_BYTES: an item that is too large by itself is
        a page of its own."""
        items: list[dict[str, Any]] = []
        size = 0
        while True:
            after, before = ("", cursor) if reverse else (cursor, "")
            count = limit + 1 - len(items)
            rows = await self._kv.scan(
                ref.item_prefix, after=after, before=before, limit=count, reverse=reverse, max_bytes=PAGE_BYTES
            )
            readable = 0
            for key, entry in rows:
                with skipping_damaged(self._kv, key, StoredItem.__name__):
                    size += len(entry.value) + STORED_OVERHEAD_BYTES
                    if len(items) == limit or (items and size > PAGE_BYTES):
                        return Page(items, has_more=True)
                    items.append(await _decode_item(entry))
                    readable += 1
            if items and size > PAGE_BYTES:  # the next one may be as large: it is not read to know that it is there
                return Page(items, has_more=await self._has_items_beyond(ref, rows[-1][0], reverse=reverse))
            if not rows or readable == len(rows) < count:
                return Page(items)
            cursor = rows[-1][0]

    async def _has_items_beyond(self, ref: ConversationKeys, key: str, *, reverse: bool) -> bool:
        """Return whether the conversation has items after the one with this key, or before it with `reverse`."""
        if not reverse:
            _, last_key = await self._kv.measure(ref.item_prefix, after=key)
            return bool(last_key)
        position = int(key.removeprefix(ref.item_prefix))
        if position == 0:
            return False
        from_there = await self._kv.measure(ref.item_prefix, after=ref.item_key(position - 1))
        return from_there != await self._kv.measure(ref.item_prefix)

    async def get_item(
        self, conversation_id: str, item_id: str, *, include: Sequence[str] = (), tenant: str
    ) -> dict[str, Any]:
        ref = ConversationKeys(tenant, conversation_id)
        await load_conversation_state(self._kv, ref)
        position = await self._kv.get(ref.position_key(item_id))
        entry = None if position is None else await self._kv.get(ref.item_key(decode_position(position)))
        if entry is None:
            raise _item_not_found(ref, item_id)
        with reading_stored(item_id):
            item = await _decode_item(entry)
        return (await self.views.show_items([item], include, tenant))[0]

    async def delete_item(self, conversation_id: str, item_id: str, *, tenant: str) -> Conversation:
        ref = ConversationKeys(tenant, conversation_id)
        record: ConversationRecord | None = None

        async def prepare() -> Sequence[Op]:
            nonlocal record
            state = await load_conversation_state(self._kv, ref)
            if state.lock_entry is not None:
                raise ConversationLocked(ref.id)
            record = state.record
            position = await self._kv.get(ref.position_key(item_id))
            if position is None:
                raise _item_not_found(ref, item_id)
            return [
                Delete(ref.record_key("conversation_floor"), ABSENT),
                # its new version shows all processes that the items which they have read have changed
                Put(ref.record_key("conversation"), encode_record(record), None, state.record_version),
                Delete(ref.position_key(item_id), position.version),
                Delete(ref.item_key(decode_position(position))),
            ]

        await write_prepared(self._kv, prepare)
        assert record is not None
        return _record_to_conversation(ref, record)

    async def acquire_lock(self, request: CreateResponse, response_id: str, *, tenant: str) -> ConversationLock:
        """Lock the conversation that a response will add to, and return the lock. Raises ConversationLocked and
        NotFound."""
        assert request.conversation_id is not None
        lock = ConversationLock(
            self._kv,
            ConversationKeys(tenant, request.conversation_id),
            response_id,
            self._background_s + request.window_s,
        )
        await lock.acquire()
        return lock

    async def load_history(
        self,
        conversation_id: str,
        *,
        tenant: str,
        allowance: LoadAllowance,
        accepts: Callable[[Sequence[Item]], Awaitable[bool]] | None = None,
    ) -> LoadedHistory:
        """Return the items of a conversation, which `allowance` counts: those from the newest compaction on, where
        `accepts` takes them for all. Raises NotFound."""
        ref = ConversationKeys(tenant, conversation_id)
        state = await load_conversation_state(self._kv, ref)
        _, compaction = decode_end(state.end_entry)
        if compaction > 0 and accepts is not None:
            recent_allowance = LoadAllowance(allowance.left_bytes)
            recent = await self._load_items(ref, state, recent_allowance, first=compaction)
            if recent.items and await accepts(recent.items):
                allowance.take_history(recent.size_bytes, "conversation")
                return recent
        return await self._load_items(ref, state, allowance, first=0)

    async def _load_items(
        self, ref: ConversationKeys, state: ConversationState, allowance: LoadAllowance, *, first: int
    ) -> LoadedHistory:
        """Return the items from position `first` on. Those that this process has read before are not read again."""
        cache, version = self.history.cache, state.record_version
        cached = cache.get_conversation(ref.tenant, ref.id)
        if cached is None or (cached.record_version, cached.first) != (version, first):
            cached = CachedConversation(version, first, first, LoadedHistory())
        allowance.take_history(cached.history.size_bytes, "conversation")
        loaded = cached
        if cached.end < decode_end(state.end_entry)[0]:
            loaded = await load_conversation_items(self._kv, ref, cached, allowance)
        cache.put(ref.tenant, ref.id, loaded)
        return loaded.history


async def page_input_items(input_items: msgspec.Raw, params: InputItemListParams) -> Page[dict[str, Any]]:
    """Return a page of a response's input items, given as a JSON array, oldest first. Raises a ValueError for bytes
    that are none."""
    chosen, has_more = await run_long(_choose_input_items, input_items, params)
    return Page([await decode_item(item) for item in chosen], has_more)


def _choose_input_items(input_items: msgspec.Raw, params: InputItemListParams) -> tuple[Sequence[msgspec.Raw], bool]:
    """Return the items of a page, and whether more follow: of PAGE_BYTES together, or one that is larger."""
    items = [*zip(decode_item_ids(input_items), decode_raw_items(input_items), strict=True)]
    ordered = items if params.order == "asc" else items[::-1]
    page = page_after(ordered, params, lambda item: item[0].id or "", f"No input item has the id '{params.after}'.")
    chosen: list[msgspec.Raw] = []
    size = 0
    for _, item in page.data:
        size += len(item)
        if chosen and size > PAGE_BYTES:
            return chosen, True
        chosen.append(item)
    return chosen, page.has_more


def _items_to_stored(items: Sequence[Item], ref: ConversationKeys, start: int) -> list[dict[str, Any]]:
    ids = ResponseIds(ref.id.replace("conv_", "resp_"), start)
    return [stored_item(item, ids) for item in items]


async def _decode_item(entry: Entry) -> dict[str, Any]:
    """Return a stored item, which may be so large that it is read in the tenant's turns."""
    if len(entry.value) <= LARGE_BYTES:
        return await decode_item(decode_record(entry, StoredItem).item)
    stored = await run_long(decode_record, entry, StoredItem)
    return await decode_item(stored.item)


def _item_not_found(ref: ConversationKeys, item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:256]}' not found in conversation '{ref.id}'.", param="item_id")


def _record_to_conversation(ref: ConversationKeys, record: ConversationRecord) -> Conversation:
    return Conversation(id=ref.id, object="conversation", created_at=record.created_at, metadata=record.metadata)
