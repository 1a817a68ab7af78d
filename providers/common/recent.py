"""RecentEntries: what is remembered under names that callers choose, as far as there is room."""

from collections import OrderedDict
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class RecentEntries(OrderedDict[KeyT, ValueT], Generic[KeyT, ValueT]):
    """A mapping of at most `limit` entries: the one that was set or found the longest time ago is forgotten first.
    Looking for one with `in` keeps nothing."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)

    def find(self, key: KeyT) -> ValueT | None:
        """Return the value of a key; None where there is none, or no more."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]
