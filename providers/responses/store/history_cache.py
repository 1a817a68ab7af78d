"""The conversations that went on last, so that a chain's next turn need not read all of it again."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from apis.wire.items import Item
from providers.responses.events.tool_result import Told


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn is."""

    line: str
    depth: int


class Turn(msgspec.Struct):
    """One response's part of the conversation: `given` is its own input, `made` its output, both as JSON arrays."""

    id: str
    at: float
    given: msgspec.Raw
    made: msgspec.Raw
    told: dict[str, Told] = {}
    base: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """All that came before a request: items in order, what hosted calls told, and the turn it would follow. `size` is
    the bytes of it all as stored, `read_at` when it was last read from the store, by the monotonic clock."""

    items: Sequence[Item] = ()
    told: Mapping[str, Told] = field(default_factory=dict[str, Told])
    place: Place | None = None
    turns: int = 0
    size: int = 0
    read_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Recent:
    """A response just stored: its turn, and what had come before."""

    before: Past
    turn: Turn
    place: Place

    @property
    def size(self) -> int:
        return self.before.size + len(self.turn.given) + len(self.turn.made)


class Recents:
    """By tenant and response id, bounded by `max_bytes` over all, the oldest first out. What is stored never changes,
    so an entry is never wrong; after `max_age_s` it counts for nothing, because the store renews what is read."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._recents: OrderedDict[tuple[str, str], Recent] = OrderedDict()
        self._bytes = 0

    def get(self, tenant: str, response_id: str) -> Recent | None:
        recent = self._recents.get((tenant, response_id))
        fresh = recent is not None and time.monotonic() - recent.before.read_at <= self._max_age_s
        return recent if fresh else None

    def put(self, tenant: str, recent: Recent) -> None:
        self._recents[tenant, recent.turn.id] = recent
        self._bytes += recent.size
        while self._bytes > self._max_bytes:
            self._bytes -= self._recents.popitem(last=False)[1].size

    def discard(self, tenant: str, response_id: str | None) -> None:
        recent = self._recents.pop((tenant, response_id or ""), None)
        if recent is not None:
            self._bytes -= recent.size
