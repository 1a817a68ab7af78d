"""The history that a request loads, and a cache of the chains that were continued last: the next turn of a chain need
not load all of it again."""

import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from apis.errors import InvalidRequest
from apis.wire.items import ITEM_LIST_ADAPTER, Item
from providers.common.fair_turns import calculate
from providers.responses.events.tool_result import ToolResultRecord

_TURN_OVERHEAD_BYTES: Final = 1536
"""Bytes that a turn takes besides the JSON of its items: its objects, keys and ids."""

_LARGE_BYTES: Final = 256 * 1024
"""Bytes of items from which they are read in a thread."""


class TurnPosition(msgspec.Struct, frozen=True):
    """The line of a turn and its depth in it, from 0."""

    line: str
    depth: int


class StoredTurn(
    msgspec.Struct,
    omit_defaults=True,
):
    """The input and output items of one response, as JSON arrays, and the results of its hosted tool calls. The first
    turn of a chain has the chain's root."""

    id: str
    stored_at: float
    input_items: msgspec.Raw
    output_items: msgspec.Raw
    tool_results: dict[str, ToolResultRecord] = {}
    fork_point: tuple[str, int] | None = None
    traceparent: str | msgspec.UnsetType = msgspec.UNSET
    root: str = ""


class LoadedHistory(msgspec.Struct, frozen=True):
    """The history of a request: items in order, results of hosted tool calls, and the position of the last turn.
    `size_bytes` is the size of all turns as stored; `read_at` the monotonic time of the last load from the store;
    `traceparent` that of the last turn's span, if it had one; `root` the root of the chain; `has_mailbox` says that
    input may wait in the stored mailbox of the last response, and `sent_items` are those that wait for it in memory."""

    items: Sequence[Item] = ()
    tool_results: Mapping[str, ToolResultRecord] = {}
    position: TurnPosition | None = None
    turn_count: int = 0
    size_bytes: int = 0
    read_at: float = msgspec.field(default_factory=time.monotonic)
    traceparent: str = ""
    root: str = ""
    has_mailbox: bool = False
    sent_items: Sequence[Item] = ()


class LoadAllowance:
    """Counts what one request loads of the stored items, its history and those that it refers to together, and refuses
    more than `max_bytes`."""

    def __init__(self, max_bytes: int, loaded_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.left_bytes = max_bytes - loaded_bytes

    def take(self, size_bytes: int, param: str) -> None:
        """Count bytes that are loaded for an item that the field `param` refers to. Raises InvalidRequest beyond the
        limit."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise self._error("The items before this response, together with those that it refers to, are", param)

    def take_history(self, size_bytes: int, param: str) -> None:
        """Count bytes of the chain or conversation that the field `param` names. Raises InvalidRequest beyond the
        limit."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise self._error("The items before this response are", param)

    def _error(self, subject: str, param: str) -> InvalidRequest:
        message = f"{subject} larger than {self.max_bytes} bytes (`responses.max_history_bytes`)."
        return InvalidRequest(message, param=param, code="history_too_large")


class CachedTurn(msgspec.Struct, frozen=True):
    """The turn of a response just stored, and the history before it."""

    previous_history: LoadedHistory
    turn: StoredTurn
    position: TurnPosition

    @property
    def size_bytes(self) -> int:
        history = self.previous_history
        items_bytes = history.size_bytes + len(self.turn.input_items) + len(self.turn.output_items)
        return items_bytes + (history.turn_count + 1) * _TURN_OVERHEAD_BYTES


class CachedConversation(msgspec.Struct, frozen=True):
    """The items of a conversation from the position `first` on, before `end`, as they are while its record has that
    version."""

    record_version: int
    first: int
    end: int
    history: LoadedHistory

    @property
    def size_bytes(self) -> int:
        return self.history.size_bytes + len(self.history.items) * _TURN_OVERHEAD_BYTES // 2


class HistoryCache:
    """Cached turns and conversations by tenant and key, at most `max_bytes` in all. When it is full, the oldest entry
    of the tenant that uses the most is evicted, so that no tenant evicts one that uses less. Stored turns never change,
    so an entry is never wrong; it is not used after `max_age_s`, so that a load extends the life of the stored turns in
    time. A conversation says by its version whether it has changed."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._tenants: dict[str, _TenantTurns] = {}
        self._size_bytes = 0

    def get(self, tenant: str, key: str) -> CachedTurn | None:
        """Return the turn that was put with the key, if it is still there."""
        cached = self._find(tenant, key)
        if not isinstance(cached, CachedTurn) or time.monotonic() - cached.previous_history.read_at > self._max_age_s:
            return None
        return cached

    def get_conversation(self, tenant: str, key: str) -> CachedConversation | None:
        """Return the conversation that was put with the key, if it is still there."""
        cached = self._find(tenant, key)
        return cached if isinstance(cached, CachedConversation) else None

    def _find(self, tenant: str, key: str) -> CachedTurn | CachedConversation | None:
        turns = self._tenants.get(tenant)
        return turns.by_key.get(key) if turns is not None else None

    def put(self, tenant: str, key: str, cached_turn: CachedTurn | CachedConversation) -> None:
        self.discard(tenant, key)
        turns = self._tenants.get(tenant)
        if turns is None:
            turns = self._tenants[tenant] = _TenantTurns()
        turns.by_key[key] = cached_turn
        size_bytes = cached_turn.size_bytes
        turns.size_bytes += size_bytes
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].size_bytes)
            self.discard(largest, next(iter(self._tenants[largest].by_key)))

    def discard(self, tenant: str, key: str | None) -> None:
        turns = self._tenants.get(tenant)
        cached = turns.by_key.pop(key or "", None) if turns is not None else None
        if turns is not None and cached is not None:
            self._size_bytes -= cached.size_bytes
            turns.size_bytes -= cached.size_bytes
            if not turns.by_key:
                del self._tenants[tenant]


class _TenantTurns(msgspec.Struct):
    by_key: dict[str, CachedTurn | CachedConversation] = {}
    size_bytes: int = 0


async def extend_history(history: LoadedHistory, turns: Sequence[StoredTurn], position: TurnPosition) -> LoadedHistory:
    """Return the history with more turns, the last of them at `position`; many items are read in a thread. Raises
    ValueError for damaged ones."""
    size_bytes = sum(len(turn.input_items) + len(turn.output_items) for turn in turns)
    if size_bytes > _LARGE_BYTES:
        return await calculate(_extend_history, history, turns, position)
    return _extend_history(history, turns, position)


def _extend_history(history: LoadedHistory, turns: Sequence[StoredTurn], position: TurnPosition) -> LoadedHistory:
    items, tool_results, size_bytes = [*history.items], {**history.tool_results}, history.size_bytes
    for turn in turns:
        input_json, output_json = bytes(turn.input_items), bytes(turn.output_items)
        items += ITEM_LIST_ADAPTER.validate_json(input_json)
        items += ITEM_LIST_ADAPTER.validate_json(output_json)
        tool_results.update(turn.tool_results)
        size_bytes += len(input_json) + len(output_json)
    trace = (turns[-1].traceparent or "") if turns else history.traceparent
    root = history.root or (turns[0].root or turns[0].id if turns else "")
    count = history.turn_count + len(turns)
    return LoadedHistory(items, tool_results, position, count, size_bytes, history.read_at, trace, root)


async def read_stored_items(items_json: bytes) -> list[Item]:
    """Return the items of a JSON array; many are read in a thread, as those of a request are. Raises ValueError."""
    read = ITEM_LIST_ADAPTER.validate_json
    return await calculate(read, items_json) if len(items_json) > _LARGE_BYTES else read(items_json)
