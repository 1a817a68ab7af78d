"""Stored items by their ids: each response or conversation that holds some of them is read once for all of them."""

from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

import msgspec

from apis.storage.kv_store import Entry, KVStore
from apis.storage.records import PAGE_BYTES, decode_record, reading_stored
from providers.common.fair_turns import end_pass
from providers.responses.events.ids import response_id_of
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.conversation_items import (
    ConversationKeys,
    ConversationRecord,
    StoredItem,
    decode_position,
)
from providers.responses.store.history_cache import HistoryCache, LoadAllowance, StoredTurn, TurnPosition
from providers.responses.store.large_items import decode_raw_items
from providers.responses.store.response_record import ResponseRecord, record_key, turn_key

T = TypeVar("T")

_RECORDS_PER_READ: Final = 8
"""Records of responses in one read: a record may hold long instructions, and its size is not known before."""
_TURNS_PER_READ: Final = 64
_CONVERSATIONS_PER_READ: Final = 256
_POINTERS_PER_READ: Final = 1000
_ITEMS_PER_READ: Final = 8
"""Items of conversations in one read, as large as their clients made them."""


class FoundItem(msgspec.Struct, frozen=True):
    """A stored item as JSON, and the result of its call if a hosted tool made it."""

    json: bytes
    tool_result: ToolResultRecord | None = None


class ItemLookup:
    """Looks up items in the stored responses and conversations of one store; `cache` has the turns in memory."""

    def __init__(self, kv: KVStore, cache: HistoryCache) -> None:
        self._kv = kv
        self._cache = cache

    async def find_items(
        self, params_by_id: Mapping[str, str], *, tenant: str, allowance: LoadAllowance
    ) -> dict[str, FoundItem]:
        """Return the stored ones of the items by id. `params_by_id` has the field of the request that names each id,
        for the error of `allowance`, which counts what is read."""
        found_items: dict[str, FoundItem] = {}
        owners = {item_id: response_id_of(item_id) for item_id in params_by_id}
        await end_pass(owners)
        ids_by_response = await self._find_responses(owners, tenant)
        records = self._read_records(ids_by_response, params_by_id, tenant, allowance)
        async with aclosing(records), aclosing(self._read_turns(records, tenant)) as turns:
            async for turn in turns:
                item_ids = ids_by_response[turn.id]
                allowance.take(len(turn.output_items) + len(turn.input_items), params_by_id[item_ids[0]])
                with reading_stored(turn.id):
                    found_items |= find_in_turn(turn, {*item_ids})
        ids_by_conversation: dict[str, list[str]] = {}
        for item_id, owner in owners.items():
            if owner is not None and item_id not in found_items:
                ids_by_conversation.setdefault(owner.replace("resp_", "conv_"), []).append(item_id)
        await end_pass(owners)
        await self._find_in_conversations(ids_by_conversation, params_by_id, tenant, allowance, found_items)
        return found_items

    async def _find_responses(self, owners: Mapping[str, str | None], tenant: str) -> dict[str, list[str]]:
        """Return the ids of the items by the ids of the responses that may hold them. `owners` are the ids that the
        ids of the items hold."""
        ids_by_response: dict[str, list[str]] = {}
        for item_id, owner in owners.items():
            if owner is not None:
                ids_by_response.setdefault(owner, []).append(item_id)
        client_ids = [item_id for item_id, owner in owners.items() if owner is None]
        entries = await self._load_pointers([record_key(tenant, "item", item_id) for item_id in client_ids])
        with reading_stored(f"{tenant}/item"):  # once for all: there may be very many
            for item_id, entry in zip(client_ids, entries, strict=True):
                if entry is not None:
                    ids_by_response.setdefault(entry.value.decode(), []).append(item_id)
        return ids_by_response

    async def _load_pointers(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return entries of a few bytes. Many are loaded in pieces, between which the event loop is left to others."""
        await end_pass(keys)
        entries: list[Entry | None] = []
        for piece in _split(keys, _POINTERS_PER_READ):
            entries += await self._kv.get_many(piece)
            await end_pass(piece)
        return entries

    async def _read_records(
        self,
        ids_by_response: Mapping[str, Sequence[str]],
        params_by_id: Mapping[str, str],
        tenant: str,
        allowance: LoadAllowance,
    ) -> AsyncGenerator[tuple[str, ResponseRecord]]:
        for response_ids in _split([*ids_by_response], _RECORDS_PER_READ):
            entries = await self._kv.get_many([record_key(tenant, "response", each) for each in response_ids])
            for response_id, entry in zip(response_ids, entries, strict=True):
                if entry is not None:
                    with reading_stored(response_id):
                        record = decode_record(entry, ResponseRecord)
                    allowance.take(len(record.response), params_by_id[ids_by_response[response_id][0]])
                    yield response_id, record

    async def _read_turns(
        self, records: AsyncGenerator[tuple[str, ResponseRecord]], tenant: str
    ) -> AsyncGenerator[StoredTurn]:
        """Yield the turns of responses. One read returns no more than a page."""
        positions: dict[str, TurnPosition] = {}
        size_bytes = 0
        async for response_id, record in records:
            cached = self._cache.get(tenant, response_id)
            if cached is not None:
                yield cached.turn
                continue
            if positions and (size_bytes + record.turn_bytes > PAGE_BYTES or len(positions) == _TURNS_PER_READ):
                for turn in await self._load_turns(positions, tenant):
                    yield turn
                positions, size_bytes = {}, 0
            positions[response_id] = TurnPosition(record.line, record.depth)
            size_bytes += record.turn_bytes
        for turn in await self._load_turns(positions, tenant):
            yield turn

    async def _load_turns(self, positions: Mapping[str, TurnPosition], tenant: str) -> list[StoredTurn]:
        entries = await self._kv.get_many([turn_key(tenant, position) for position in positions.values()])
        turns: list[StoredTurn] = []
        for response_id, entry in zip(positions, entries, strict=True):
            if entry is not None:
                with reading_stored(response_id):
                    turns.append(decode_record(entry, StoredTurn))
        return turns

    async def _find_in_conversations(
        self,
        ids_by_conversation: Mapping[str, Sequence[str]],
        params_by_id: Mapping[str, str],
        tenant: str,
        allowance: LoadAllowance,
        found_items: dict[str, FoundItem],
    ) -> None:
        """Add the items that conversations hold to those found; their ids were made from the ids of these."""
        refs: dict[str, ConversationKeys] = {}
        for conversation_id in await self._find_existing([*ids_by_conversation], tenant):
            ref = ConversationKeys(tenant, conversation_id)
            refs |= dict.fromkeys(ids_by_conversation[conversation_id], ref)
        entries = await self._load_pointers([ref.position_key(item_id) for item_id, ref in refs.items()])
        keys = {
            item_id: ref.item_key(decode_position(entry))
            for (item_id, ref), entry in zip(refs.items(), entries, strict=True)
            if entry is not None
        }
        for item_ids in _split([*keys], _ITEMS_PER_READ):
            entries = await self._kv.get_many([keys[item_id] for item_id in item_ids])
            for item_id, entry in zip(item_ids, entries, strict=True):
                if entry is not None:
                    allowance.take(len(entry.value), params_by_id[item_id])
                    with reading_stored(item_id):
                        stored = decode_record(entry, StoredItem)
                    found_items[item_id] = FoundItem(bytes(stored.item), stored.tool_result)

    async def _find_existing(self, conversation_ids: Sequence[str], tenant: str) -> list[str]:
        """Return the ids of those conversations that are stored and not deleted."""
        existing: list[str] = []
        for ids in _split(conversation_ids, _CONVERSATIONS_PER_READ):
            refs = [ConversationKeys(tenant, conversation_id) for conversation_id in ids]
            entries = await self._kv.get_many([ref.record_key("conversation") for ref in refs])
            existing += (
                conversation_id
                for conversation_id, entry in zip(ids, entries, strict=True)
                if entry is not None and not decode_record(entry, ConversationRecord).is_deleted
            )
            await end_pass(ids)
        return existing


def find_in_turn(turn: StoredTurn, item_ids: Collection[str]) -> dict[str, FoundItem]:
    """Return those of the items that the turn holds. The others are only skipped over: their ids are read and no
    more. Raises msgspec.MsgspecError for a damaged turn."""
    found_items: dict[str, FoundItem] = {}
    for items in (turn.input_items, turn.output_items):
        for raw, fields in zip(decode_raw_items(items), decode_item_ids(items), strict=True):
            if fields.id is not None and fields.id in item_ids:
                found_items[fields.id] = FoundItem(bytes(raw), turn.tool_results.get(fields.id))
    return found_items


class ItemId(msgspec.Struct, gc=False):
    """The id of an item, without the rest of it."""

    id: str | None = None


decode_item_ids = msgspec.json.Decoder(list[ItemId]).decode


def _split(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))
