"""A cache of the chains that were continued last, so that the next turn of a chain need not load all of it again."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from apis.wire.items import Item
from providers.responses.events.tool_result import ToolResultRecord

ItemWithToolResult = tuple[Item, ToolResultRecord | None]
"""A stored item, and the result of its call if a hosted tool made it."""


@dataclass(frozen=True, slots=True)
class TurnPosition:
    """The line of a turn and its depth in it, from 0."""

    line: str
    depth: int


class StoredTurn(
    msgspec.Struct,
    rename={
        "stored_at": "at",
        "input_items": "given",
        "output_items": "made",
        "tool_results": "told",
        "fork_point": "base",
    },
):
    """The input and output items of one response, as JSON arrays, and the results of its hosted tool calls."""

    id: str
    stored_at: float
    input_items: msgspec.Raw
    output_items: msgspec.Raw
    tool_results: dict[str, ToolResultRecord] = {}
    fork_point: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class LoadedHistory:
    """The history of a request: items in order, results of hosted tool calls, and the position of the last turn.
    `size_bytes` is the size of all turns as stored; `read_at` the monotonic time of the last load from the store."""

    items: Sequence[Item] = ()
    tool_results: Mapping[str, ToolResultRecord] = field(default_factory=dict[str, ToolResultRecord])
    position: TurnPosition | None = None
    turn_count: int = 0
    size_bytes: int = 0
    read_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class CachedTurn:
    """The turn of a response just stored, and the history before it."""

    previous_history: LoadedHistory
    turn: StoredTurn
    position: TurnPosition

    @property
    def size_bytes(self) -> int:
        return self.previous_history.size_bytes + len(self.turn.input_items) + len(self.turn.output_items)


class HistoryCache:
    """Cached turns by tenant and response id, at most `max_bytes` in all; the oldest are evicted first. Stored turns
    never change, so an entry is never wrong; it is not used after `max_age_s`, so that a load extends the life of the
    stored turns in time."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._cached_turns: OrderedDict[tuple[str, str], CachedTurn] = OrderedDict()
        self._size_bytes = 0

    def get(self, tenant: str, response_id: str) -> CachedTurn | None:
        cached = self._cached_turns.get((tenant, response_id))
        if cached is None or time.monotonic() - cached.previous_history.read_at > self._max_age_s:
            return None
        return cached

    def put(self, tenant: str, cached_turn: CachedTurn) -> None:
        self._cached_turns[tenant, cached_turn.turn.id] = cached_turn
        self._size_bytes += cached_turn.size_bytes
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._cached_turns.popitem(last=False)[1].size_bytes

    def discard(self, tenant: str, response_id: str | None) -> None:
        cached = self._cached_turns.pop((tenant, response_id or ""), None)
        if cached is not None:
            self._size_bytes -= cached.size_bytes
