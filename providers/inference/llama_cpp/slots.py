"""Choice of the engine's slot for a prompt: a conversation goes on where its earlier turns are cached.

The engine's own choice is the slot with the longest common prefix, so a new conversation that shares its instructions
with an older one would take that one's place, and caches of different salts would serve each other.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

COMPARE_TOKENS: Final = 1024
KEPT_SHARE: Final = 0.5
"""Part of a slot's tokens that a prompt must share with it, or else the engine replaces the slot's cache by another one
that it has stored (`f_keep` in llama.cpp's server-context.cpp)."""


@dataclass(slots=True)
class _Slot:
    number: int
    is_free: bool = True
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    turn_tokens: int = 0
    output_tokens: int = 0
    salt: str | None = None
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class SlotLease:
    """Slot of one generation. `may_reuse` says that its cache is of the request's own salt."""

    number: int
    may_reuse: bool


class SlotTable:
    """The slots of one engine. At most `count` leases exist at a time, which the caller ensures.

    `shares_cache`: the engine stores caches and moves them between slots, so a salted prompt may reuse only a slot that
    surely stays.
    """

    def __init__(self, count: int, *, shares_cache: bool) -> None:
        self._slots = [_Slot(number) for number in range(count)]
        self._shares_cache = shares_cache
        self._uses = 0

    def lease(self, ids: Sequence[int], turn_tokens: int, salt: str | None) -> SlotLease:
        """Lease the free slot of which the prompt is a later turn, otherwise the one that was used the longest ago. A
        later turn of this prompt begins with its first `turn_tokens` ids."""
        prompt = array("i", ids)
        free = [slot for slot in self._slots if slot.is_free]
        lengths = {slot.number: _common_prefix(slot.ids, prompt) for slot in free if slot.salt == salt}
        earlier = [slot for slot in free if slot.ids and lengths.get(slot.number, -1) >= slot.turn_tokens]
        if earlier:
            slot = max(earlier, key=lambda slot: lengths[slot.number])
        else:
            slot = min(free, key=lambda slot: slot.last_use)
        may_reuse = slot.salt == salt
        if salt is not None and self._shares_cache:
            cached_tokens = len(slot.ids) + slot.output_tokens
            may_reuse = may_reuse and lengths[slot.number] >= KEPT_SHARE * cached_tokens
        self._uses += 1
        slot.is_free, slot.ids, slot.turn_tokens, slot.salt = False, prompt, turn_tokens, salt
        slot.last_use = self._uses
        return SlotLease(slot.number, may_reuse)

    def release(self, lease: SlotLease, output_tokens: int) -> None:
        """Return the slot of a generation that ended after at most so many tokens."""
        slot = self._slots[lease.number]
        slot.is_free, slot.output_tokens = True, output_tokens


def _common_prefix(one: "array[int]", two: "array[int]") -> int:
    limit = min(len(one), len(two))
    for start in range(0, limit, COMPARE_TOKENS):
        end = min(start + COMPARE_TOKENS, limit)
        if one[start:end] != two[start:end]:
            return next(at for at in range(start, end) if one[at] != two[at])
    return limit
