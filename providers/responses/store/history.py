"""History: responses, their items and their chains in a KVStore.

    TENANT/response/ID           the response without its output, and the position of its turn
    TENANT/turn/LINE/DEPTH       the input and output items of one response, in the order of the chain
    TENANT/item/ID               the response of an item whose id a client chose; other item ids hold the response id
    TENANT/branch/LINE/DEPTH/NEW present for each line NEW that branches off from that turn
    TENANT/line/LINE             the state of a line with branches or deleted turns (`turn_writer.py`)

A line is a chain of turns without a fork, read by one scan. The first child of a turn continues its line, and each
other child begins a line of its own that records its fork point: a chain costs one read for each fork, not one for each
turn, and nothing is stored twice.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson
from openai.types.responses import Response

from apis.errors import InvalidRequest, NotFound, StorageCorrupt, StoredValueTooLarge
from apis.responses import ResponseListParams
from apis.storage.kv_store import MAX_VALUE_BYTES, STORED_OVERHEAD_BYTES, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, encode_record, reading_stored
from apis.telemetry import agent_traceparent
from apis.wire.base import remember_json, sdk_model_to_json
from apis.wire.items import items_to_json
from providers.common.fair_turns import current_turn, run_long
from providers.common.state.scan import decode_or_skip
from providers.responses.events.ids import is_response_id
from providers.responses.events.output import count_chars
from providers.responses.events.response_object import response_from_json
from providers.responses.events.unvalidated import copy_with
from providers.responses.store.chain_tree import ChainTree, load_chain_tree
from providers.responses.store.history_cache import (
    CachedTurn,
    HistoryCache,
    LoadAllowance,
    LoadedHistory,
    StoredTurn,
    TurnPosition,
    extend_history,
)
from providers.responses.store.item_lookup import ItemLookup
from providers.responses.store.listing import read_listing
from providers.responses.store.response_record import (
    ResponseRecord,
    branch_key,
    record_key,
    run_key,
    summarize_response,
    turn_key,
)
from providers.responses.store.turn_writer import FinishedResponse, NewTurn, TurnWriter, client_item_ids

_BYTES_PER_WORK: Final = 16
"""Bytes of a turn whose storing is one unit of work, as `fair_turns` counts it."""
_LARGE_CHARS: Final = 256 * 1024
"""Characters of an output that is serialized, or read, in the tenant's turn."""


class History:
    """The stored responses. A chain is deleted `retention_s` after its last use."""

    def __init__(
        self, kv: KVStore, *, retention_s: float, max_turns: int, cache_bytes: int, max_bytes: int = 64 * 1024 * 1024
    ) -> None:
        """`max_turns` and `max_bytes` bound the chain, or the conversation, that one request may load."""
        self._kv = kv
        self.cache = HistoryCache(cache_bytes, max_age_s=min(3600, retention_s / 4))
        self.find_items = ItemLookup(kv, self.cache).find_items
        self._turns = TurnWriter(kv, retention_s)
        self.retention_s = retention_s
        self.max_turns = max_turns
        self.max_bytes = max_bytes

    async def load_history(
        self,
        response_id: str,
        *,
        tenant: str,
        allowance: LoadAllowance | None = None,
        kept_position: TurnPosition | None = None,
    ) -> LoadedHistory:
        """Return the history of a request that follows `response_id`; where that was deleted, the one up to its turn at
        `kept_position`. `allowance` counts its bytes, of which `max_bytes` are allowed without one. Raises
        InvalidRequest if it is not stored, too long or too large."""
        allowance, has_mailbox = allowance or LoadAllowance(self.max_bytes), False
        entry = await self._kv.get(record_key(tenant, "response", response_id))
        if entry is not None:
            with reading_stored(response_id):
                record = decode_record(entry, ResponseRecord)
                _reject_conversation_turn(response_id, bytes(record.response))
            position, has_mailbox = TurnPosition(record.line, record.depth), record.has_mailbox
        elif kept_position is not None:
            position = kept_position
        else:
            raise await self._missing_response_error(response_id, tenant)
        cached = self.cache.get(tenant, response_id) if entry is not None else None
        if cached is not None:
            position, previous, turns = cached.position, cached.previous_history, [cached.turn]
        else:
            previous, turns = LoadedHistory(), await self._load_turns(position, tenant, allowance)
            if turns[-1].id != response_id:
                raise _chain_gone_error()
        with reading_stored(response_id):
            history = await extend_history(previous, turns, position)
        if history.turn_count > self.max_turns:
            raise chain_too_long_error(self.max_turns)
        allowance.take_history(history.size_bytes, "previous_response_id")
        return msgspec.structs.replace(history, has_mailbox=True) if has_mailbox else history

    async def _missing_response_error(self, response_id: str, tenant: str) -> InvalidRequest:
        if is_response_id(response_id) and await self._kv.get(run_key(tenant, response_id)) is not None:
            return InvalidRequest(
                f"The response '{response_id}' has not ended yet: wait until it has, then continue it.",
                param="previous_response_id",
                code="previous_response_in_progress",
            )
        return InvalidRequest(
            f"Previous response with id '{response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )

    async def save(
        self, finished_response: FinishedResponse, *, tenant: str, history: LoadedHistory
    ) -> list[int] | None:
        """Store a finished response after `history`; return the versions of its `extra_ops`, or None if a condition of
        theirs did not hold, and nothing was stored. Raises StoredValueTooLarge."""
        response = finished_response.response
        if sum(map(count_chars, response.output)) > _LARGE_CHARS:
            output_json = await run_long(items_to_json, response.output)
            response_json = await run_long(_serialize_without_output, response, output_json)
        else:
            output_json = items_to_json(response.output)
            response_json = _serialize_without_output(response, output_json)
        turn = StoredTurn(
            response.id,
            time.time(),
            msgspec.Raw(finished_response.input_json),
            msgspec.Raw(output_json),
            finished_response.tool_results,
            traceparent=agent_traceparent() or msgspec.UNSET,
            root="" if history.root else finished_response.root,
        )
        size = len(turn.input_items) + len(turn.output_items)
        if size > MAX_VALUE_BYTES:
            limit = f"{MAX_VALUE_BYTES} are the most"
            raise StoredValueTooLarge(
                f"The response cannot be stored: its input and output have {size} bytes, {limit}."
            )
        await current_turn().wait(size // _BYTES_PER_WORK)
        new = NewTurn(tenant, turn, response_json, finished_response)
        added = await self._turns.add(new, history)
        if added is None:
            return None
        self.cache.discard(tenant, response.previous_response_id)
        self.cache.put(tenant, response.id, CachedTurn(history, added.turn, added.position))
        return added.versions

    async def write(self, ops: Sequence[Op]) -> None:
        """Apply operations without a condition, of a response that is not stored."""
        if ops:
            await self._kv.write(ops, durable=False)

    async def branch_ops(self, history: LoadedHistory, response_id: str, ttl_s: float, *, tenant: str) -> list[Op]:
        """Return the operations by which the turn before a background response is kept until that has ended: to be
        written with its run. Their conditions do not hold if its chain has changed since; then ask again. Raises
        InvalidRequest if that turn was deleted."""
        if history.position is None:
            return []
        ops = await self._turns.branch_ops(tenant, history.position, response_id, ttl_s)
        if ops is None:
            raise _chain_gone_error()
        return ops

    async def load_response(self, response_id: str, *, tenant: str) -> Response:
        """Return a stored response with its output. Raises NotFound, and StorageCorrupt where what is stored is not a
        valid response."""
        record, turn = await self._load_response_record(response_id, tenant)
        with reading_stored(response_id):
            # the first one builds the schema of the SDK's type, which takes 40 ms
            if len(turn.output_items) > _LARGE_CHARS or not Response.__pydantic_complete__:
                return await run_long(_build_stored_response, record, turn)
            return _build_stored_response(record, turn)

    async def find_model(self, response_id: str, *, tenant: str) -> str | None:
        """Return the model of a stored response; None if it is not stored."""
        entry = await self._kv.get(record_key(tenant, "response", response_id))
        if entry is None:
            return None
        with reading_stored(response_id):
            model: str = orjson.loads(bytes(decode_record(entry, ResponseRecord).response))["model"]
            return model

    async def list_responses(self, params: ResponseListParams, *, tenant: str) -> Page[dict[str, Any]]:
        """Return a page of the stored responses without their items."""

        def accept(response_id: str, entry: Entry) -> dict[str, Any] | None:
            record = decode_record(entry, ResponseRecord)
            fields = orjson.loads(bytes(record.response))
            is_listed = params.accepts(fields, (record.preview, record.question))
            return summarize_response(fields, record.preview, record.question) if is_listed else None

        return await read_listing(self._kv, f"{tenant}/response/", params, accept, "response")

    async def load_tree(self, response_id: str, *, tenant: str, limit: int) -> ChainTree:
        """Return up to `limit` responses of the tree that a stored response is in. Raises NotFound."""
        return await load_chain_tree(self._kv, response_id, tenant=tenant, limit=limit)

    async def load_input_items(self, response_id: str, *, tenant: str) -> msgspec.Raw:
        """Return the input items of a stored response itself, without those of earlier turns, as a JSON array. Raises
        NotFound."""
        _, turn = await self._load_response_record(response_id, tenant)
        return turn.input_items

    async def delete(self, response_id: str, *, tenant: str) -> None:
        """Delete a response, and its turn unless later turns follow it; a damaged one, too. Raises NotFound."""
        ops: list[Op] = [Delete(record_key(tenant, "response", response_id))]
        try:
            record, turn = await self._load_response_record(response_id, tenant)
        except StorageCorrupt:
            await self._delete_damaged(response_id, tenant, ops)
            return
        with reading_stored(response_id):
            ops += [Delete(record_key(tenant, "item", item_id)) for item_id in client_item_ids(turn)]
        await self._turns.delete(tenant, TurnPosition(record.line, record.depth), turn, ops)

    async def _delete_damaged(self, response_id: str, tenant: str, ops: Sequence[Op]) -> None:
        """Delete what can be found of a response whose record or turn is damaged; the rest expires."""
        key = record_key(tenant, "response", response_id)
        entry = await self._kv.get(key)
        record = None if entry is None else decode_or_skip(self._kv, key, entry, ResponseRecord)
        if record is None:
            await self._kv.write(ops)
            return
        unreadable_turn = StoredTurn(response_id, 0, msgspec.Raw(b"[]"), msgspec.Raw(b"[]"))
        await self._turns.delete(tenant, TurnPosition(record.line, record.depth), unreadable_turn, ops)

    async def _load_response_record(self, response_id: str, tenant: str) -> tuple[ResponseRecord, StoredTurn]:
        entry = await self._kv.get(record_key(tenant, "response", response_id))
        if entry is not None:
            with reading_stored(response_id):
                record = decode_record(entry, ResponseRecord)
            turn_entry = await self._kv.get(turn_key(tenant, TurnPosition(record.line, record.depth)))
            if turn_entry is not None:
                with reading_stored(response_id):
                    return record, decode_record(turn_entry, StoredTurn)
        raise NotFound(f"Response with id '{response_id}' not found.")

    async def _load_turns(
        self, position: TurnPosition | None, tenant: str, allowance: LoadAllowance
    ) -> list[StoredTurn]:
        """Return the turns up to and including `position`, oldest first."""
        lines: list[list[StoredTurn]] = []
        count, loaded_bytes = 0, 0
        while position is not None:
            prefix = f"{tenant}/turn/{position.line}/"
            room = self.max_turns - count
            after = turn_key(tenant, TurnPosition(position.line, position.depth + 1))
            room_bytes = allowance.left_bytes - loaded_bytes
            rows = await self._kv.scan(
                prefix, before=after, limit=room + 1, max_bytes=room_bytes + room * STORED_OVERHEAD_BYTES
            )
            loaded_bytes += sum(len(entry.value) for _, entry in rows)
            if loaded_bytes > allowance.left_bytes:
                allowance.take_history(loaded_bytes, "previous_response_id")
            if len(rows) > room:
                raise chain_too_long_error(self.max_turns)
            if len(rows) != position.depth + 1:
                raise _chain_gone_error()
            with reading_stored(prefix):
                line = [decode_record(entry, StoredTurn) for _, entry in rows]
            await self._refresh_ttl(line, rows, tenant)
            lines.append(line)
            count += len(line)
            position = TurnPosition(*line[0].fork_point) if line[0].fork_point else None
        return [turn for line in reversed(lines) for turn in line]

    async def _refresh_ttl(self, turns: Sequence[StoredTurn], rows: Sequence[tuple[str, Entry]], tenant: str) -> None:
        """Extend the life of a chain in use: turns past half their time are written again, so each turn only rarely.
        One that was deleted meanwhile stays deleted."""
        now = time.time()
        for (key, entry), turn in zip(rows, turns, strict=True):
            if now - turn.stored_at <= self.retention_s / 2:
                continue
            turn.stored_at = now
            ops: list[Op] = [Put(key, encode_record(turn), self.retention_s, entry.version)]
            if turn.fork_point is not None:
                line = key.split("/")[2]
                ops.append(Put(branch_key(tenant, TurnPosition(*turn.fork_point), line), b"", self.retention_s))
            await self._kv.write(ops, durable=False)


def _chain_gone_error() -> InvalidRequest:
    return InvalidRequest(
        "A response that this chain stands on is gone.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _reject_conversation_turn(response_id: str, response: bytes) -> None:
    """Raise InvalidRequest for a turn of a conversation: it is stored without the items before it, which may have been
    deleted from the conversation since."""
    if b'"conversation":{' in response and (turn_of := orjson.loads(response).get("conversation")):
        raise InvalidRequest(
            f"The response '{response_id}' is a turn of the conversation '{turn_of['id']}': use `conversation`.",
            param="previous_response_id",
            code="invalid_value",
        )


def _build_stored_response(record: ResponseRecord, turn: StoredTurn) -> Response:
    fields: dict[str, Any] = orjson.loads(bytes(record.response))
    fields["output"] = orjson.loads(bytes(turn.output_items))
    return response_from_json(fields)


def _serialize_without_output(response: Response, output_json: bytes) -> bytes:
    """Return the response's JSON with an empty output. The whole JSON, which has `output_json`, is remembered for the
    client, for whom the response would be serialized again."""
    # no request can hold this mark, because the id was made after it was sent
    mark = b'"output":["%b"]' % response.id.encode()
    head, found, tail = sdk_model_to_json(copy_with(response, {"output": [response.id]})).partition(mark)
    assert found
    remember_json(response, b'%b"output":%b%b' % (head, output_json, tail))
    return b'%b"output":[]%b' % (head, tail)


def chain_too_long_error(max_turns: int) -> InvalidRequest:
    """Return the error of a chain with more than `max_turns` turns."""
    return InvalidRequest(
        f"The chain of previous responses is longer than {max_turns} turns.", param="previous_response_id"
    )
