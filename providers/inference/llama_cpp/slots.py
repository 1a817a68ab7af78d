"""Choice of the engine's slot for a prompt: a chain goes on where its earlier turns are cached.

The engine's own choice is the slot with the longest common prefix, so a new chain that shares its instructions with an
older one would take that one's place, and caches of different salts would serve each other.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

COMPARE_TOKENS: Final = 1024
EXTENSION_SHARE: Final = 0.5
"""Part of a slot's tokens that a prompt must begin with to be the next turn of the slot's chain. The engine also
replaces the contents of a slot of which it would use less (`f_keep` in its server-context.cpp)."""


@dataclass(slots=True)
class _Slot:
    number: int
    is_free: bool = True
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    salt: str | None = None
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class SlotLease:
    """Slot of one generation. `may_reuse` says that its cache is of the request's own salt."""

    number: int
    may_reuse: bool


class SlotTable:
    """The slots of one engine. At most `count` leases exist at a time, which the caller ensures.

    `shares_cache`: the engine moves caches between slots, so a salted prompt may reuse only what its slot surely holds.
    """

    def __init__(self, count: int, *, shares_cache: bool) -> None:
        self._slots = [_Slot(number) for number in range(count)]
        self._shares_cache = shares_cache
        self._uses = 0

    def lease(self, ids: Sequence[int], salt: str | None) -> SlotLease:
        """Lease the free slot whose chain the prompt continues, otherwise the one that was used the longest ago."""
        prompt = array("i", ids)
        free = [slot for slot in self._slots if slot.is_free]
        lengths = {slot.number: _common_prefix(slot.ids, prompt) for slot in free if slot.salt == salt}
        chains = [slot for slot in free if slot.ids and lengths.get(slot.number, 0) >= EXTENSION_SHARE * len(slot.ids)]
        if chains:
            slot = max(chains, key=lambda slot: lengths[slot.number])
        else:
            slot = min(free, key=lambda slot: slot.last_use)
        may_reuse = slot.salt == salt and (salt is None or slot in chains or not self._shares_cache)
        self._uses += 1
        slot.is_free, slot.ids, slot.salt, slot.last_use = False, prompt, salt, self._uses
        return SlotLease(slot.number, may_reuse)

    def release(self, lease: SlotLease) -> None:
        """Return the slot of a generation that ended."""
        self._slots[lease.number].is_free = True


def _common_prefix(one: "array[int]", two: "array[int]") -> int:
    limit = min(len(one), len(two))
    for start in range(0, limit, COMPARE_TOKENS):
        end = min(start + COMPARE_TOKENS, limit)
        if one[start:end] != two[start:end]:
            return next(at for at in range(start, end) if one[at] != two[at])
    return limit
