"""ItemIndex: the items before a response, sorted by type in one pass, for all steps that prepare it.

Nearly every step is about a few types of items, of which most requests have none. It asks the index for those, instead
of walking over all items again.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, TypeVar

from apis.wire.computer import ComputerCallOutput
from apis.wire.item_parts import ItemWire
from apis.wire.items import AssistantMessage, CustomToolCallOutput, FunctionCallOutput, InputMessage, Item

ItemT = TypeVar("ItemT", bound=ItemWire)
_MESSAGE_TYPES: Final = frozenset((InputMessage, AssistantMessage))
TYPES_WITH_PARTS: Final = frozenset((InputMessage, FunctionCallOutput, CustomToolCallOutput, ComputerCallOutput))
"""Types of the items that may hold files or images."""


class ItemIndex:
    """Items in their order: those of the history, those of the request's input from `input_start` to `input_end`, and
    the output of an attempt that is resumed. A step may replace an item by another one of its type."""

    __slots__ = ("_positions", "input_end", "input_start", "items")

    def __init__(
        self, history_items: Sequence[Item] = (), input_items: Sequence[Item] = (), output_items: Sequence[Item] = ()
    ) -> None:
        self.items: list[Item] = [*history_items, *input_items, *output_items]
        self.input_start = len(history_items)
        self.input_end = self.input_start + len(input_items)
        self._positions: dict[type[ItemWire], list[int]] = {}
        positions = self._positions
        for position, kind in enumerate(map(type, self.items)):
            if kind in positions:
                positions[kind].append(position)
            else:
                positions[kind] = [position]

    @property
    def input_items(self) -> Sequence[Item]:
        """The items of the request's input."""
        return self.items[self.input_start : self.input_end]

    @property
    def is_plain_text(self) -> bool:
        """They are messages of text, which need nothing to be opened or fetched."""
        return self._positions.keys() <= _MESSAGE_TYPES and all(
            map(_is_text, [self.items[at] for at in self._positions.get(InputMessage, ())])
        )

    def has(self, *kinds: type[ItemWire]) -> bool:
        """Return true if there are items of one of these types."""
        return not self._positions.keys().isdisjoint(kinds)

    def of(self, kind: type[ItemT]) -> Sequence[ItemT]:
        """Return the items of one type, oldest first."""
        items: Sequence[ItemT] = [self.items[at] for at in self._positions.get(kind, ())]  # pyright: ignore[reportAssignmentType] - the positions are those of this type
        return items

    def positions(self, *kinds: type[ItemWire]) -> Sequence[int]:
        """Return the positions of the items of these types, in their order."""
        found = [self._positions[kind] for kind in kinds if kind in self._positions]
        return found[0] if len(found) == 1 else sorted(at for positions in found for at in positions)

    def named(self, type_names: Collection[str]) -> Sequence[int]:
        """Return the positions of the items whose `type` is one of these names, in their order."""
        return self.positions(*(kind for kind, at in self._positions.items() if self.items[at[0]].type in type_names))

    def replace(self, position: int, item: Item) -> None:
        """Put another item of the same type in the place of one."""
        assert type(item) is type(self.items[position])
        self.items[position] = item

    def param(self, position: int) -> str:
        """Return the name, in errors, of the item at a position of the input."""
        return f"input[{position - self.input_start}]"

    def file_positions(self) -> Sequence[int]:
        """Return the positions of the items that may hold files or images, because they are more than text."""
        return [at for at in self.positions(*TYPES_WITH_PARTS) if not _is_text(self.items[at])]

    def followed_by(self, output_items: Sequence[Item]) -> "ItemIndex":
        """Return the index of these items and of the output of the response until now."""
        return ItemIndex(self.items[: self.input_start], self.input_items, output_items) if output_items else self

    def preceded_by(self, items: Sequence[Item]) -> "ItemIndex":
        """Return the index of these items with others before them."""
        if not items:
            return self
        earlier, later = [*items, *self.items[: self.input_start]], self.items[self.input_end :]
        return ItemIndex(earlier, self.input_items, later)

    def without(self, positions: Collection[int]) -> "ItemIndex":
        """Return the index of the other items; the positions are in the input."""
        kept = [item for at, item in enumerate(self.items) if at not in positions]
        return ItemIndex(kept[: self.input_start], kept[self.input_start :])

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


NO_ITEMS: Final = ItemIndex()


def _is_text(item: Item) -> bool:
    return isinstance(item.content if type(item) is InputMessage else getattr(item, "output", None), str)
