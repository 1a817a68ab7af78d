"""Responses, their items and their chains in a KVStore.

Three kinds of keys, all of them a tenant's:

    TENANT/response/ID           the response without its output, and the place of its turn
    TENANT/turn/LINE/DEPTH       what one response was given and what it made, in the order of the conversation
    TENANT/item/ID               where an item is whose id a client made (an id of ours says so itself)

A line is a chain of turns without a fork, read by one scan. The first child of a turn continues its line, and any
other child begins a line of its own that tells where it branched off: a chain costs one read for each fork, not one
for each turn, and nothing is stored twice.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from openai.types.responses import Response

from apis.errors import InvalidRequest, NotFound, StackError
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.wire.base import sdk_model_to_json
from apis.wire.items import ITEM_LIST_ADAPTER, Item, items_to_json
from providers.responses.events.ids import response_id_of
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.history_cache import CachedTurn, HistoryCache, LoadedHistory, StoredTurn, TurnPosition

_DEPTH_DIGITS = 8


class ResponseRecord(msgspec.Struct):
    """A response without its output, and the place of its turn."""

    line: str
    depth: int
    response: msgspec.Raw


@dataclass(frozen=True, slots=True)
class FinishedResponse:
    """A finished response and what is kept with it: `given` is the JSON array of its own input items, each with an id;
    `told` is what its hosted calls gave; `also` is written in the same step, or nothing is."""

    response: Response
    input_json: bytes
    tool_results: dict[str, ToolResultRecord]
    extra_ops: Sequence[Op] = ()


_decode_turn = msgspec.json.Decoder(StoredTurn).decode
_decode_response_record = msgspec.json.Decoder(ResponseRecord).decode
_encode = msgspec.json.Encoder().encode


ItemWithToolResult = tuple[Item, ToolResultRecord | None]
FindItem = Callable[[str, str], Awaitable[ItemWithToolResult | None]]


class History:
    """All that a Responses provider keeps. `retention_s` after its last use a chain is forgotten. `elsewhere` finds
    items, by tenant and id, that are of no response."""

    def __init__(
        self,
        kv: KVStore,
        *,
        retention_s: float,
        max_turns: int,
        cache_bytes: int,
        find_conversation_item: FindItem | None = None,
    ) -> None:
        self._kv = kv
        self._find_conversation_item = find_conversation_item
        self._cache = HistoryCache(cache_bytes, max_age_s=min(3600, retention_s / 4))
        self.retention_s = retention_s
        self.max_turns = max_turns

    async def load_history(self, response_id: str, *, tenant: str) -> LoadedHistory:
        """What came before a request that follows `response_id`. Raises InvalidRequest when that is not known."""
        entry = await self._kv.get(_record_key(tenant, "response", response_id))
        if entry is None:
            raise InvalidRequest(
                f"Previous response with id '{response_id}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        head = _decode_record(_decode_response_record, entry.value)
        _reject_conversation_turn(response_id, bytes(head.response))
        recent = self._cache.get(tenant, response_id)
        if recent is not None:
            past = extend_history(recent.previous_history, [recent.turn], recent.position)
        else:
            place = TurnPosition(head.line, head.depth)
            past = extend_history(LoadedHistory(), await self._load_turns(place, tenant), place)
        if past.turn_count > self.max_turns:
            raise chain_too_long_error(self.max_turns)
        return past

    async def save(self, finished_response: FinishedResponse, *, tenant: str, history: LoadedHistory) -> bool:
        """Keep a finished response, after `past`; False when its `also` did not hold, and nothing was kept."""
        response = finished_response.response
        made = items_to_json(response.output)
        bare = sdk_model_to_json(response.model_copy(update={"output": []}))
        turn = StoredTurn(
            response.id,
            time.time(),
            msgspec.Raw(finished_response.input_json),
            msgspec.Raw(made),
            finished_response.tool_results,
        )
        place = (
            TurnPosition(history.position.line, history.position.depth + 1)
            if history.position
            else TurnPosition(response.id[5:], 0)
        )
        done = await self._write_turn(place, turn, bare, tenant, finished_response.extra_ops)
        if not done and history.position is not None:
            turn.fork_point = (history.position.line, history.position.depth)
            place = TurnPosition(response.id[5:], 0)
            done = await self._write_turn(place, turn, bare, tenant, finished_response.extra_ops)
        if done:
            self._cache.discard(tenant, response.previous_response_id)
            self._cache.put(tenant, CachedTurn(history, turn, place))
        return done

    async def load_response(self, response_id: str, *, tenant: str) -> Response:
        """A stored response, whole. Raises NotFound."""
        head, turn = await self._load_response_record(response_id, tenant)
        fields: dict[str, Any] = orjson.loads(bytes(head.response))
        fields["output"] = orjson.loads(bytes(turn.output_items))
        return Response.model_validate(fields)

    async def load_input_items(self, response_id: str, *, tenant: str) -> list[dict[str, Any]]:
        """The input items of a stored response itself, without those of earlier turns. Raises NotFound."""
        _, turn = await self._load_response_record(response_id, tenant)
        return orjson.loads(bytes(turn.input_items))

    async def find_item(self, item_id: str, *, tenant: str) -> ItemWithToolResult | None:
        """A stored item by its id, and what it told if a hosted tool made it; None if there is none."""
        found = await self._find_response_item(item_id, tenant)
        return (
            found
            if found or self._find_conversation_item is None
            else await self._find_conversation_item(tenant, item_id)
        )

    async def _find_response_item(self, item_id: str, tenant: str) -> ItemWithToolResult | None:
        owner = response_id_of(item_id)
        if owner is None:
            entry = await self._kv.get(_record_key(tenant, "item", item_id))
            if entry is None:
                return None
            owner = entry.value.decode()
        try:
            _, turn = await self._load_response_record(owner, tenant)
        except NotFound:
            return None
        for item in (
            *ITEM_LIST_ADAPTER.validate_json(bytes(turn.output_items)),
            *ITEM_LIST_ADAPTER.validate_json(bytes(turn.input_items)),
        ):
            if item.id == item_id:
                return item, turn.tool_results.get(item_id)
        return None

    async def delete(self, response_id: str, *, tenant: str) -> None:
        """Forget a response, and its turn unless later turns stand on it. Raises NotFound."""
        head, turn = await self._load_response_record(response_id, tenant)
        ops: list[Op] = [Delete(_record_key(tenant, "response", response_id))]
        ops += [Delete(_record_key(tenant, "item", each)) for each in _client_item_ids(turn)]
        place: TurnPosition | None = TurnPosition(head.line, head.depth)
        while place is not None and not await self._has_children(place, tenant):
            ops.append(Delete(_turn_key(tenant, place)))
            if turn.fork_point is not None:
                ops.append(Delete(_branch_key(tenant, TurnPosition(*turn.fork_point), place.line)))
            await self._kv.write(ops)
            ops = []
            turn, place = await self._deleted_parent(place, turn, tenant)
        if ops:
            await self._kv.write(ops)

    async def _deleted_parent(
        self, position: TurnPosition, turn: StoredTurn, tenant: str
    ) -> tuple[StoredTurn, TurnPosition | None]:
        """The turn before, where its own response was deleted earlier and it was kept for the one just deleted."""
        parent = (
            TurnPosition(*turn.fork_point)
            if turn.fork_point
            else TurnPosition(position.line, position.depth - 1)
            if position.depth
            else None
        )
        found = await self._kv.get(_turn_key(tenant, parent)) if parent else None
        if found is None:
            return turn, None
        before: StoredTurn = _decode_record(_decode_turn, found.value)
        known = await self._kv.get(_record_key(tenant, "response", before.id))
        return before, None if known else parent

    async def _write_turn(
        self, position: TurnPosition, turn: StoredTurn, response_json: bytes, tenant: str, extra_ops: Sequence[Op]
    ) -> bool:
        head = ResponseRecord(position.line, position.depth, msgspec.Raw(response_json))
        ttl = self.retention_s
        ops: list[Op] = [
            Put(_turn_key(tenant, position), _encode(turn), ttl, ABSENT),
            Put(_record_key(tenant, "response", turn.id), _encode(head), ttl),
        ]
        ops += [Put(_record_key(tenant, "item", each), turn.id.encode(), ttl) for each in _client_item_ids(turn)]
        if turn.fork_point is not None:
            ops.append(Put(_branch_key(tenant, TurnPosition(*turn.fork_point), position.line), b"", ttl))
        ops += extra_ops
        return await self._kv.write(ops) is not None

    async def _load_response_record(self, response_id: str, tenant: str) -> tuple[ResponseRecord, StoredTurn]:
        entry = await self._kv.get(_record_key(tenant, "response", response_id))
        if entry is not None:
            head = _decode_record(_decode_response_record, entry.value)
            found = await self._kv.get(_turn_key(tenant, TurnPosition(head.line, head.depth)))
            if found is not None:
                return head, _decode_record(_decode_turn, found.value)
        raise NotFound(f"Response with id '{response_id}' not found.")

    async def _load_turns(self, position: TurnPosition | None, tenant: str) -> list[StoredTurn]:
        """The turns up to and with `place`, oldest first."""
        lines: list[list[StoredTurn]] = []
        count = 0
        while position is not None:
            prefix = f"{tenant}/turn/{position.line}/"
            room = self.max_turns - count
            after = _turn_key(tenant, TurnPosition(position.line, position.depth + 1))
            found = await self._kv.scan(prefix, before=after, limit=room + 1)
            if len(found) > room:
                raise chain_too_long_error(self.max_turns)
            if len(found) != position.depth + 1:
                raise InvalidRequest(
                    "A response that this chain stands on is gone.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            line = [_decode_record(_decode_turn, entry.value) for _, entry in found]
            await self._refresh_ttl(line, [key for key, _ in found], tenant)
            lines.append(line)
            count += len(line)
            position = TurnPosition(*line[0].fork_point) if line[0].fork_point else None
        return [turn for line in reversed(lines) for turn in line]

    async def _refresh_ttl(self, turns: Sequence[StoredTurn], keys: Sequence[str], tenant: str) -> None:
        """Keep a chain that is in use: turns past half their time are written again, so each but rarely."""
        now = time.time()
        stale = [
            (key, turn) for key, turn in zip(keys, turns, strict=True) if now - turn.stored_at > self.retention_s / 2
        ]
        if stale:
            ops: list[Op] = []
            for key, turn in stale:
                turn.stored_at = now
                ops.append(Put(key, _encode(turn), self.retention_s))
                if turn.fork_point is not None:
                    line = key.split("/")[2]
                    ops.append(Put(_branch_key(tenant, TurnPosition(*turn.fork_point), line), b"", self.retention_s))
            await self._kv.write(ops, durable=False)

    async def _has_children(self, position: TurnPosition, tenant: str) -> bool:
        following = _turn_key(tenant, TurnPosition(position.line, position.depth + 1))
        if await self._kv.get(following) is not None:
            return True
        return bool(await self._kv.scan(_branch_key(tenant, position, ""), limit=1))


def extend_history(history: LoadedHistory, turns: Sequence[StoredTurn], position: TurnPosition) -> LoadedHistory:
    """The past with more turns, the last of them at `place`."""
    items, told, size = [*history.items], {**history.tool_results}, history.size_bytes
    for turn in turns:
        given, made = bytes(turn.input_items), bytes(turn.output_items)
        items += ITEM_LIST_ADAPTER.validate_json(given)
        items += ITEM_LIST_ADAPTER.validate_json(made)
        told.update(turn.tool_results)
        size += len(given) + len(made)
    return LoadedHistory(items, told, position, history.turn_count + len(turns), size, history.read_at)


def _reject_conversation_turn(response_id: str, response: bytes) -> None:
    """A turn of a conversation is kept without what came before, which the conversation may have lost since."""
    if b'"conversation":{' in response and (turn_of := orjson.loads(response).get("conversation")):
        raise InvalidRequest(
            f"The response '{response_id}' is a turn of the conversation '{turn_of['id']}': use `conversation`.",
            param="previous_response_id",
            code="invalid_value",
        )


def chain_too_long_error(max_turns: int) -> InvalidRequest:
    """Of a chain with more turns than that."""
    return InvalidRequest(
        f"The chain of previous responses is longer than {max_turns} turns.", param="previous_response_id"
    )


def _decode_record(decode: Any, value: bytes) -> Any:
    try:
        return decode(value)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def _record_key(tenant: str, kind: str, name: str) -> str:
    # a name that a client made up may hold what no key may, or be too long in UTF-8: that one goes by its hash
    plain = name.isascii() and name.isprintable()
    return f"{tenant}/{kind}/{name if plain else hashlib.sha256(name.encode()).hexdigest()}"


def _turn_key(tenant: str, position: TurnPosition) -> str:
    return f"{tenant}/turn/{position.line}/{position.depth:0{_DEPTH_DIGITS}d}"


def _branch_key(tenant: str, position: TurnPosition, line: str) -> str:
    return f"{tenant}/branch/{position.line}/{position.depth:0{_DEPTH_DIGITS}d}/{line}"


def _client_item_ids(turn: StoredTurn) -> list[str]:
    ids = [item.get("id") for item in orjson.loads(bytes(turn.input_items))]
    return [each for each in ids if each and response_id_of(each) is None]
