"""The tree of a chain: all responses that stand on the same first one, through the lines and branches of History."""

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from apis.errors import NotFound
from apis.storage.kv_store import Entry, KVStore
from apis.storage.records import decode_record, reading_stored
from providers.common.state.scan import scan_records, skipping_damaged
from providers.responses.store.history_cache import StoredTurn, TurnPosition
from providers.responses.store.response_record import (
    ResponseRecord,
    branch_key,
    parse_branch_key,
    record_key,
    summarize_response,
    turn_key,
)


@dataclass(frozen=True, slots=True)
class ChainTree:
    """The responses of a tree, parents first, as listings show them; not `is_complete` if the limit cut some off."""

    responses: list[dict[str, Any]]
    is_complete: bool


async def load_chain_tree(kv: KVStore, response_id: str, *, tenant: str, limit: int) -> ChainTree:
    """Return up to `limit` responses of the tree that a stored response is in. A deleted response that others continue
    has only `id`, `object`, `deleted` and `previous_response_id`; a damaged one has them too, and is not `deleted`.
    Raises NotFound."""
    entry = await kv.get(record_key(tenant, "response", response_id))
    if entry is None:
        raise NotFound(f"Response with id '{response_id}' not found.")
    with reading_stored(response_id):
        record = decode_record(entry, ResponseRecord)
    parents: dict[str, str | None] = {}
    ids_by_position: dict[TurnPosition, str] = {}
    lines: list[tuple[str, TurnPosition | None]] = [(await _find_root_line(kv, tenant, record.line), None)]
    while lines and len(parents) <= limit:
        line, fork = lines.pop(0)
        parent = ids_by_position.get(fork) if fork else None
        for position, turn_id in await _list_turn_ids(kv, tenant, line, limit + 1 - len(parents)):
            parents[turn_id] = parent
            ids_by_position[position] = parent = turn_id
        lines += await _list_branches(kv, tenant, line, limit)
    ids = [*parents][:limit]
    entries = await kv.get_many([record_key(tenant, "response", each) for each in ids])
    responses = [
        _describe(kv, record_key(tenant, "response", each), entry) | {"previous_response_id": parents[each]}
        for each, entry in zip(ids, entries, strict=True)
    ]
    return ChainTree(responses, is_complete=len(parents) <= limit and not lines)


async def _find_root_line(kv: KVStore, tenant: str, line: str) -> str:
    """Return the line that the given one comes from by all its forks."""
    while (entry := await kv.get(turn_key(tenant, TurnPosition(line, 0)))) is not None:
        with reading_stored(line):
            turn = decode_record(entry, StoredTurn)
        if turn.fork_point is None:
            break
        line = turn.fork_point[0]
    return line


async def _list_turn_ids(kv: KVStore, tenant: str, line: str, limit: int) -> list[tuple[TurnPosition, str]]:
    """Return the response ids of the first readable turns of a line, by position."""
    prefix = f"{tenant}/turn/{line}/"
    ids: list[tuple[TurnPosition, str]] = []
    async with aclosing(scan_records(kv, prefix, StoredTurn, page_size=limit)) as turns:
        async for turn in turns:
            ids.append((TurnPosition(line, int(turn.key.removeprefix(prefix))), turn.record.id))
            if len(ids) == limit:
                break
    return ids


async def _list_branches(kv: KVStore, tenant: str, line: str, limit: int) -> list[tuple[str, TurnPosition | None]]:
    """Return the lines that branch off from a line, with the positions of their forks."""
    prefix = branch_key(tenant, TurnPosition(line, 0), "").rpartition("/")[0].rpartition("/")[0]
    rows = await kv.scan(f"{prefix}/", limit=limit + 1)
    return [(new_line, fork) for fork, new_line in (parse_branch_key(key) for key, _ in rows)]


def _describe(kv: KVStore, key: str, entry: Entry | None) -> dict[str, Any]:
    if entry is not None:
        with skipping_damaged(kv, key, ResponseRecord.__name__):
            record = decode_record(entry, ResponseRecord)
            return summarize_response(orjson.loads(bytes(record.response)), record.preview, record.question)
    return {"id": key.rpartition("/")[2], "object": "response", "deleted": entry is None}
