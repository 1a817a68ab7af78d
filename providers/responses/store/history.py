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
from pydantic import TypeAdapter

from apis.errors import InvalidRequest, NotFound, StackError
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.wire.items import Item
from providers.responses.events.ids import response_of
from providers.responses.events.tool_result import Told
from providers.responses.store.history_cache import Past, Place, Recent, Recents, Turn

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_DEPTH = 8


class Head(msgspec.Struct):
    """A response without its output, and the place of its turn."""

    line: str
    depth: int
    response: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished response and what is kept with it: `given` is the JSON array of its own input items, each with an id;
    `told` is what its hosted calls gave; `also` is written in the same step, or nothing is."""

    response: Response
    given: bytes
    told: dict[str, Told]
    also: Sequence[Op] = ()


_decode_turn = msgspec.json.Decoder(Turn).decode
_decode_head = msgspec.json.Decoder(Head).decode
_encode = msgspec.json.Encoder().encode


FoundItem = tuple[Item, Told | None]
FindItem = Callable[[str, str], Awaitable[FoundItem | None]]


class History:
    """All that a Responses provider keeps. `retention_s` after its last use a chain is forgotten. `elsewhere` finds
    items, by tenant and id, that are of no response."""

    def __init__(
        self, kv: KVStore, *, retention_s: float, max_turns: int, cache_bytes: int, elsewhere: FindItem | None = None
    ) -> None:
        self._kv = kv
        self._elsewhere = elsewhere
        self._recent = Recents(cache_bytes, max_age_s=min(3600, retention_s / 4))
        self._retention_s = retention_s
        self.max_turns = max_turns

    async def past(self, response_id: str, *, tenant: str) -> Past:
        """What came before a request that follows `response_id`. Raises InvalidRequest when that is not known."""
        entry = await self._kv.get(_key(tenant, "response", response_id))
        if entry is None:
            raise InvalidRequest(
                f"Previous response with id '{response_id}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        head = _read(_decode_head, entry.value)
        _refuse_conversation(response_id, bytes(head.response))
        recent = self._recent.get(tenant, response_id)
        if recent is not None:
            past = followed(recent.before, [recent.turn], recent.place)
        else:
            place = Place(head.line, head.depth)
            past = followed(Past(), await self._turns(place, tenant), place)
        if past.turns > self.max_turns:
            raise too_many(self.max_turns)
        return past

    async def save(self, kept: Finished, *, tenant: str, past: Past) -> bool:
        """Keep a finished response, after `past`; False when its `also` did not hold, and nothing was kept."""
        response = kept.response
        made = items_to_json(response.output)
        bare = to_json(response.model_copy(update={"output": []}))
        turn = Turn(response.id, time.time(), msgspec.Raw(kept.given), msgspec.Raw(made), kept.told)
        place = Place(past.place.line, past.place.depth + 1) if past.place else Place(response.id[5:], 0)
        done = await self._put(place, turn, bare, tenant, kept.also)
        if not done and past.place is not None:
            turn.base = (past.place.line, past.place.depth)
            place = Place(response.id[5:], 0)
            done = await self._put(place, turn, bare, tenant, kept.also)
        if done:
            self._recent.discard(tenant, response.previous_response_id)
            self._recent.put(tenant, Recent(past, turn, place))
        return done

    async def response(self, response_id: str, *, tenant: str) -> Response:
        """A stored response, whole. Raises NotFound."""
        head, turn = await self._find(response_id, tenant)
        fields: dict[str, Any] = orjson.loads(bytes(head.response))
        fields["output"] = orjson.loads(bytes(turn.made))
        return Response.model_validate(fields)

    async def given(self, response_id: str, *, tenant: str) -> list[dict[str, Any]]:
        """The input items of a stored response itself, without those of earlier turns. Raises NotFound."""
        _, turn = await self._find(response_id, tenant)
        return orjson.loads(bytes(turn.given))

    async def item(self, item_id: str, *, tenant: str) -> FoundItem | None:
        """A stored item by its id, and what it told if a hosted tool made it; None if there is none."""
        found = await self._item(item_id, tenant)
        return found if found or self._elsewhere is None else await self._elsewhere(tenant, item_id)

    async def _item(self, item_id: str, tenant: str) -> FoundItem | None:
        owner = response_of(item_id)
        if owner is None:
            entry = await self._kv.get(_key(tenant, "item", item_id))
            if entry is None:
                return None
            owner = entry.value.decode()
        try:
            _, turn = await self._find(owner, tenant)
        except NotFound:
            return None
        for item in (*ITEMS.validate_json(bytes(turn.made)), *ITEMS.validate_json(bytes(turn.given))):
            if item.id == item_id:
                return item, turn.told.get(item_id)
        return None

    async def delete(self, response_id: str, *, tenant: str) -> None:
        """Forget a response, and its turn unless later turns stand on it. Raises NotFound."""
        head, turn = await self._find(response_id, tenant)
        ops: list[Op] = [Delete(_key(tenant, "response", response_id))]
        ops += [Delete(_key(tenant, "item", each)) for each in _foreign_ids(turn)]
        place: Place | None = Place(head.line, head.depth)
        while place is not None and not await self._has_children(place, tenant):
            ops.append(Delete(_turn_key(tenant, place)))
            if turn.base is not None:
                ops.append(Delete(_branch_key(tenant, Place(*turn.base), place.line)))
            await self._kv.write(ops)
            ops = []
            turn, place = await self._forgotten_parent(place, turn, tenant)
        if ops:
            await self._kv.write(ops)

    async def _forgotten_parent(self, place: Place, turn: Turn, tenant: str) -> tuple[Turn, Place | None]:
        """The turn before, where its own response was deleted earlier and it was kept for the one just deleted."""
        parent = Place(*turn.base) if turn.base else Place(place.line, place.depth - 1) if place.depth else None
        found = await self._kv.get(_turn_key(tenant, parent)) if parent else None
        if found is None:
            return turn, None
        before: Turn = _read(_decode_turn, found.value)
        known = await self._kv.get(_key(tenant, "response", before.id))
        return before, None if known else parent

    async def _put(self, place: Place, turn: Turn, bare: bytes, tenant: str, also: Sequence[Op]) -> bool:
        head = Head(place.line, place.depth, msgspec.Raw(bare))
        ttl = self._retention_s
        ops: list[Op] = [
            Put(_turn_key(tenant, place), _encode(turn), ttl, ABSENT),
            Put(_key(tenant, "response", turn.id), _encode(head), ttl),
        ]
        ops += [Put(_key(tenant, "item", each), turn.id.encode(), ttl) for each in _foreign_ids(turn)]
        if turn.base is not None:
            ops.append(Put(_branch_key(tenant, Place(*turn.base), place.line), b"", ttl))
        ops += also
        return await self._kv.write(ops) is not None

    async def _find(self, response_id: str, tenant: str) -> tuple[Head, Turn]:
        entry = await self._kv.get(_key(tenant, "response", response_id))
        if entry is not None:
            head = _read(_decode_head, entry.value)
            found = await self._kv.get(_turn_key(tenant, Place(head.line, head.depth)))
            if found is not None:
                return head, _read(_decode_turn, found.value)
        raise NotFound(f"Response with id '{response_id}' not found.")

    async def _turns(self, place: Place | None, tenant: str) -> list[Turn]:
        """The turns up to and with `place`, oldest first."""
        lines: list[list[Turn]] = []
        count = 0
        while place is not None:
            prefix = f"{tenant}/turn/{place.line}/"
            room = self.max_turns - count
            after = _turn_key(tenant, Place(place.line, place.depth + 1))
            found = await self._kv.scan(prefix, before=after, limit=room + 1)
            if len(found) > room:
                raise too_many(self.max_turns)
            if len(found) != place.depth + 1:
                raise InvalidRequest(
                    "A response that this chain stands on is gone.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            line = [_read(_decode_turn, entry.value) for _, entry in found]
            await self._refresh(line, [key for key, _ in found], tenant)
            lines.append(line)
            count += len(line)
            place = Place(*line[0].base) if line[0].base else None
        return [turn for line in reversed(lines) for turn in line]

    async def _refresh(self, turns: Sequence[Turn], keys: Sequence[str], tenant: str) -> None:
        """Keep a chain that is in use: turns past half their time are written again, so each but rarely."""
        now = time.time()
        stale = [(key, turn) for key, turn in zip(keys, turns, strict=True) if now - turn.at > self._retention_s / 2]
        if stale:
            ops: list[Op] = []
            for key, turn in stale:
                turn.at = now
                ops.append(Put(key, _encode(turn), self._retention_s))
                if turn.base is not None:
                    line = key.split("/")[2]
                    ops.append(Put(_branch_key(tenant, Place(*turn.base), line), b"", self._retention_s))
            await self._kv.write(ops, durable=False)

    async def _has_children(self, place: Place, tenant: str) -> bool:
        following = _turn_key(tenant, Place(place.line, place.depth + 1))
        if await self._kv.get(following) is not None:
            return True
        return bool(await self._kv.scan(_branch_key(tenant, place, ""), limit=1))


def followed(past: Past, turns: Sequence[Turn], place: Place) -> Past:
    """The past with more turns, the last of them at `place`."""
    items, told, size = [*past.items], {**past.told}, past.size
    for turn in turns:
        given, made = bytes(turn.given), bytes(turn.made)
        items += ITEMS.validate_json(given)
        items += ITEMS.validate_json(made)
        told.update(turn.told)
        size += len(given) + len(made)
    return Past(items, told, place, past.turns + len(turns), size, past.read_at)


def _refuse_conversation(response_id: str, response: bytes) -> None:
    """A turn of a conversation is kept without what came before, which the conversation may have lost since."""
    if b'"conversation":{' in response and (turn_of := orjson.loads(response).get("conversation")):
        raise InvalidRequest(
            f"The response '{response_id}' is a turn of the conversation '{turn_of['id']}': use `conversation`.",
            param="previous_response_id",
            code="invalid_value",
        )


def too_many(turns: int) -> InvalidRequest:
    """Of a chain with more turns than that."""
    return InvalidRequest(
        f"The chain of previous responses is longer than {turns} turns.", param="previous_response_id"
    )


def items_to_json(items: Sequence[Any]) -> bytes:
    """Output items as one JSON array."""
    return b"[%b]" % b",".join(map(to_json, items))


def to_json(model: Any) -> bytes:
    """A model of the SDK as the API writes it."""
    return model.__pydantic_serializer__.to_json(model, by_alias=True, exclude_unset=True)


def _read(decode: Any, value: bytes) -> Any:
    try:
        return decode(value)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def _key(tenant: str, kind: str, name: str) -> str:
    # a name that a client made up may hold what no key may, or be too long in UTF-8: that one goes by its hash
    plain = name.isascii() and name.isprintable()
    return f"{tenant}/{kind}/{name if plain else hashlib.sha256(name.encode()).hexdigest()}"


def _turn_key(tenant: str, place: Place) -> str:
    return f"{tenant}/turn/{place.line}/{place.depth:0{_DEPTH}d}"


def _branch_key(tenant: str, place: Place, line: str) -> str:
    return f"{tenant}/branch/{place.line}/{place.depth:0{_DEPTH}d}/{line}"


def _foreign_ids(turn: Turn) -> list[str]:
    ids = [item.get("id") for item in orjson.loads(bytes(turn.given))]
    return [each for each in ids if each and response_of(each) is None]
