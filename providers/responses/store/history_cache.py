"""The conversations that went on last, so that a chain's next turn need not read all of it again."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from apis.wire.items import Item
from providers.responses.events.tool_result import ToolResultRecord


@dataclass(frozen=True, slots=True)
class TurnPosition:
    """Where a turn is."""

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
    """One response's part of the conversation: `given` is its own input, `made` its output, both as JSON arrays."""

    id: str
    stored_at: float
    input_items: msgspec.Raw
    output_items: msgspec.Raw
    tool_results: dict[str, ToolResultRecord] = {}
    fork_point: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class LoadedHistory:
    """All that came before a request: items in order, what hosted calls told, and the turn it would follow. `size` is
    the bytes of it all as stored, `read_at` when it was last read from the store, by the monotonic clock."""

    items: Sequence[Item] = ()
    tool_results: Mapping[str, ToolResultRecord] = field(default_factory=dict[str, ToolResultRecord])
    position: TurnPosition | None = None
    turn_count: int = 0
    size_bytes: int = 0
    read_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class CachedTurn:
    """A response just stored: its turn, and what had come before."""

    previous_history: LoadedHistory
    turn: StoredTurn
    position: TurnPosition

    @property
    def size_bytes(self) -> int:
        return self.previous_history.size_bytes + len(self.turn.input_items) + len(self.turn.output_items)


class HistoryCache:
    """By tenant and response id, bounded by `max_bytes` over all, the oldest first out. What is stored never changes,
    so an entry is never wrong; after `max_age_s` it counts for nothing, because the store renews what is read."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._cached_turns: OrderedDict[tuple[str, str], CachedTurn] = OrderedDict()
        self._size_bytes = 0

    def get(self, tenant: str, response_id: str) -> CachedTurn | None:
        recent = self._cached_turns.get((tenant, response_id))
        fresh = recent is not None and time.monotonic() - recent.previous_history.read_at <= self._max_age_s
        return recent if fresh else None

    def put(self, tenant: str, cached_turn: CachedTurn) -> None:
        self._cached_turns[tenant, cached_turn.turn.id] = cached_turn
        self._size_bytes += cached_turn.size_bytes
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._cached_turns.popitem(last=False)[1].size_bytes

    def discard(self, tenant: str, response_id: str | None) -> None:
        recent = self._cached_turns.pop((tenant, response_id or ""), None)
        if recent is not None:
            self._size_bytes -= recent.size_bytes
