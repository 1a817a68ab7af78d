"""TurnWriter: adds the turns of chains to a KVStore, and deletes them, so that no turn loses those before it.

    TENANT/line/LINE    the state of a line that has branches, or of which turns were deleted

A response may be generated for long while the one before it is deleted. So a turn is stored on the condition that its
line is as it was read: where the turn before is gone, its history is stored again, with the new turn. A background
response is a branch from its creation on, which keeps the turn before it until it has ended.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
from openai.types.responses import Response

from apis.errors import StoredValueTooLarge
from apis.storage.kv_store import ABSENT, MAX_VALUE_BYTES, Delete, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.common.fair_turns import end_pass
from providers.common.state.change import repeat_until_true
from providers.common.state.scan import decode_or_skip, skipping_damaged
from providers.responses.events.ids import response_id_of
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.store.history_cache import LoadedHistory, StoredTurn, TurnPosition
from providers.responses.store.item_lookup import decode_item_ids
from providers.responses.store.response_record import (
    ResponseRecord,
    branch_key,
    first_words,
    line_key,
    question_of,
    record_key,
    turn_key,
)

_END_LIFE_S: Final = 86_400.0
"""Seconds for which the end of a line is known after a deletion: longer than a response can be generated that is no
background response."""


class LineRecord(msgspec.Struct, omit_defaults=True):
    """The state of a line. From the depth `end` on its turns were deleted, and none is added."""

    end: int | None = None

    def holds(self, depth: int) -> bool:
        """True if the turn of that depth was not deleted."""
        return self.end is None or depth < self.end


class QueuedSuccessor(msgspec.Struct, frozen=True):
    """A background response that is queued in the write of the turn that it follows: its id, how long it keeps that
    turn in seconds, and the writes that queue it, by the position of the turn."""

    response_id: str
    life_s: float
    build_ops: Callable[[TurnPosition], Sequence[Op]]


class FinishedResponse(msgspec.Struct, frozen=True):
    """A finished response and what is stored with it: `input_json` is the JSON array of its own input items, each with
    an id; `tool_results` are those of its hosted calls; `extra_ops` belong in the same write; `root` is its chain's.
    `successor` is the response that is queued with it, and `has_mailbox` that of `ResponseRecord`."""

    response: Response
    input_json: bytes
    tool_results: dict[str, ToolResultRecord]
    extra_ops: Sequence[Op] = ()
    root: str = ""
    successor: QueuedSuccessor | None = None
    has_mailbox: bool = False


class NewTurn(msgspec.Struct, frozen=True):
    """A turn that is to be stored for a finished response, whose JSON without its output is `response_json`."""

    tenant: str
    turn: StoredTurn
    response_json: bytes
    finished: FinishedResponse

    @property
    def line(self) -> str:
        """The line that begins with this turn, if one does."""
        return _line_of(self.turn.id)


class TurnAdded(NamedTuple):
    """A turn as it was stored, its position, and the versions of its `extra_ops`."""

    turn: StoredTurn
    position: TurnPosition
    versions: list[int]


class TurnWriter:
    """The turns of all chains of a store, which live for `retention_s`."""

    def __init__(self, kv: KVStore, retention_s: float) -> None:
        self._kv = kv
        self._retention_s = retention_s

    async def add(self, new: NewTurn, history: LoadedHistory) -> TurnAdded | None:
        """Store a turn after `history`; None if a condition of its `extra_ops` did not hold, and nothing was stored."""
        before = history.position
        if before is None:
            return await self._write(new, TurnPosition(new.line, 0))
        following = TurnPosition(before.line, before.depth + 1)
        key = line_key(new.tenant, before.line)
        # as a branch it has kept the turn before
        is_background = bool(new.finished.response.background)
        release = [Delete(branch_key(new.tenant, before, new.line))] if is_background else []
        # most lines have no state
        added = None if is_background else await self._write(new, following, [Delete(key, ABSENT)])
        while added is None:
            entry = await self._kv.get(key)
            line, version = self._decode_line(key, entry), _version(entry)
            if not line.holds(before.depth):
                return await self._write_with_history(new, history, release)
            if line.end is None:
                unchanged = Delete(key, ABSENT) if entry is None else self._put_line(key, line, version)
                added = await self._write(new, following, [unchanged, *release])
            if added is None:
                added = await self._write(
                    new, TurnPosition(new.line, 0), [self._put_line(key, line, version)], fork_point=before
                )
            if added is None and _version(await self._kv.get(key)) == version:
                return None  # the line is as it was, so a condition among `extra_ops` did not hold
        return added

    async def branch_ops(self, tenant: str, before: TurnPosition, response_id: str, ttl_s: float) -> list[Op] | None:
        """Return the operations by which the turn `before` is kept until a background response after it has ended; None
        if that turn was deleted. Their conditions do not hold if the line has changed since."""
        key = line_key(tenant, before.line)
        entry = await self._kv.get(key)
        line = self._decode_line(key, entry)
        if not line.holds(before.depth):
            return None
        put_branch = Put(branch_key(tenant, before, _line_of(response_id)), b"", ttl_s)
        return [put_branch, self._put_line(key, line, _version(entry))]

    async def delete(self, tenant: str, position: TurnPosition, turn: StoredTurn, ops: Sequence[Op]) -> None:
        """Apply `ops`, which delete a response, and delete its turn unless others follow it; then those before it whose
        responses were deleted earlier, because they were stored only for this one."""
        while await self._delete_turn(tenant, position, turn, ops):
            parent = (
                TurnPosition(*turn.fork_point) if turn.fork_point else TurnPosition(position.line, position.depth - 1)
            )
            entry = await self._kv.get(turn_key(tenant, parent)) if parent.depth >= 0 else None
            parent_turn = (
                None if entry is None else decode_or_skip(self._kv, turn_key(tenant, parent), entry, StoredTurn)
            )
            if parent_turn is None:
                return
            position, turn, ops = parent, parent_turn, ()
            if await self._kv.get(record_key(tenant, "response", turn.id)) is not None:
                return

    async def _delete_turn(self, tenant: str, position: TurnPosition, turn: StoredTurn, ops: Sequence[Op]) -> bool:
        """Delete a turn, with `ops`; return False if others follow it, and then only `ops` were applied."""
        key, following = line_key(tenant, position.line), TurnPosition(position.line, position.depth + 1)
        has_children = False

        async def attempt() -> bool:
            nonlocal ops, has_children
            version = _version(await self._kv.get(key))
            has_children = await self._has_children(tenant, position)
            if has_children:
                if not ops:
                    return True
                await self._kv.write(ops)
                ops = ()  # the last of the others may just be deleted: then this turn is deleted now or with it
                return False
            writes: list[Op] = [
                *ops,
                Delete(turn_key(tenant, position)),
                Delete(turn_key(tenant, following), ABSENT),
                self._put_line(key, LineRecord(position.depth), version),
            ]
            if turn.fork_point is not None:
                writes.append(Delete(branch_key(tenant, TurnPosition(*turn.fork_point), position.line)))
            return await self._kv.write(writes) is not None

        await repeat_until_true(attempt)
        return not has_children

    async def _has_children(self, tenant: str, position: TurnPosition) -> bool:
        following = turn_key(tenant, TurnPosition(position.line, position.depth + 1))
        if await self._kv.scan(following, limit=1):
            return True
        return bool(await self._kv.scan(branch_key(tenant, position, ""), limit=1))

    def _decode_line(self, key: str, entry: Entry | None) -> LineRecord:
        if entry is not None:
            with skipping_damaged(self._kv, key, "LineRecord"):
                return decode_record(entry, LineRecord)
        return LineRecord()

    def _put_line(self, key: str, line: LineRecord, version: int) -> Put:
        return Put(key, encode_record(line), self._retention_s if line.end is None else _END_LIFE_S, version)

    async def _write_with_history(self, new: NewTurn, history: LoadedHistory, ops: Sequence[Op]) -> TurnAdded | None:
        """Store a turn in a line of its own, after one that has the items of its history."""
        items = (item.model_dump_json(exclude_none=True, by_alias=True) for item in history.items)
        before = StoredTurn(
            new.finished.response.previous_response_id or "",
            new.turn.stored_at,
            msgspec.Raw(f"[{','.join(items)}]".encode()),
            msgspec.Raw(b"[]"),
            {**history.tool_results},
            traceparent=history.traceparent or msgspec.UNSET,
            root=history.root,
        )
        put = Put(turn_key(new.tenant, TurnPosition(new.line, 0)), encode_record(before), self._retention_s, ABSENT)
        if len(put.value) > MAX_VALUE_BYTES:
            raise StoredValueTooLarge(
                "The response cannot be stored: those before it were deleted meanwhile, and they are too large to be "
                "stored again as one value."
            )
        return await self._write(new, TurnPosition(new.line, 1), [put, *ops])

    async def _write(
        self, new: NewTurn, position: TurnPosition, ops: Sequence[Op] = (), *, fork_point: TurnPosition | None = None
    ) -> TurnAdded | None:
        turn, finished, tenant, ttl_s = new.turn, new.finished, new.tenant, self._retention_s
        writes: list[Op] = [*ops]
        if fork_point is not None:
            turn = msgspec.structs.replace(turn, fork_point=(fork_point.line, fork_point.depth))
            writes.append(Put(branch_key(tenant, fork_point, position.line), b"", ttl_s))
        turn_bytes = len(turn.input_items) + len(turn.output_items)
        record = ResponseRecord(
            position.line,
            position.depth,
            msgspec.Raw(new.response_json),
            first_words(finished.response),
            turn_bytes,
            question_of(finished.input_json),
            finished.has_mailbox,
        )
        writes += [
            Put(turn_key(tenant, position), encode_record(turn), ttl_s, ABSENT),
            Put(record_key(tenant, "response", turn.id), encode_record(record), ttl_s),
        ]
        if (successor := finished.successor) is not None:  # a branch from here on, which keeps this turn
            branch = branch_key(tenant, position, _line_of(successor.response_id))
            writes += [Put(branch, b"", successor.life_s), *successor.build_ops(position)]
        if item_ids := client_item_ids(turn):
            await end_pass(item_ids)
            writes += [Put(record_key(tenant, "item", each), turn.id.encode(), ttl_s) for each in item_ids]
            await end_pass(item_ids)
        versions = await self._kv.write([*writes, *finished.extra_ops])
        return None if versions is None else TurnAdded(turn, position, versions[len(writes) :])


def client_item_ids(turn: StoredTurn) -> list[str]:
    """Return the ids that clients chose, once each: a request may refer to one item more than once."""
    ids, own_key = (item.id for item in decode_item_ids(turn.input_items)), _line_of(turn.id)
    # nearly all are the response's own, which are found without the form of an id
    foreign_ids = dict.fromkeys(item_id for item_id in ids if item_id and own_key not in item_id)
    return [item_id for item_id in foreign_ids if response_id_of(item_id) is None]


def _line_of(response_id: str) -> str:
    """Return the line that begins with a response."""
    return response_id[5:]


def _version(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version
