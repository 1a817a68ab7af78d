"""Pages of listings, by cursor: the id of the last entry that the client has seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from apis.errors import InvalidRequest

_ItemT = TypeVar("_ItemT")
_OtherT = TypeVar("_OtherT")


@dataclass(frozen=True, slots=True)
class Page(Generic[_ItemT]):
    """A part of a list, in the requested order; `has_more` if entries follow it.

    `last_id` is the cursor of the next page where that is not the id of the last entry.
    """

    data: Sequence[_ItemT]
    has_more: bool = False
    last_id: str | None = None

    def map(self, convert: Callable[[_ItemT], _OtherT]) -> "Page[_OtherT]":
        """Return the page with what `convert` makes of each of its entries."""
        return Page([convert(entry) for entry in self.data], self.has_more, self.last_id)


class PageParams(Protocol):
    """The fields that the parameters of every listing have."""

    @property
    def after(self) -> str | None: ...

    @property
    def limit(self) -> int: ...


def first_page(items: Sequence[_ItemT], limit: int) -> Page[_ItemT]:
    """Return the first `limit` items; one item more is enough to see that more follow."""
    return Page(items[:limit], has_more=len(items) > limit)


def page_after(
    items: Sequence[_ItemT], params: PageParams, get_id: Callable[[_ItemT], str], unknown_cursor: str
) -> Page[_ItemT]:
    """Return the items after the one with the id `params.after`, or the first ones without it.

    Raises InvalidRequest with the message `unknown_cursor` if no item has this id.
    """
    if params.after is None:
        return first_page(items, params.limit)
    position = next((index for index, item in enumerate(items) if get_id(item) == params.after), None)
    if position is None:
        raise InvalidRequest(unknown_cursor, param="after", code="invalid_value")
    return first_page(items[position + 1 :], params.limit)


def page_between(
    items: Sequence[_ItemT], params: PageParams, before: str | None, get_id: Callable[[_ItemT], str]
) -> Page[_ItemT]:
    """Return the items between the ones with the ids `params.after` and `before`: the first ones after `params.after`,
    or the last ones before `before` where only that is set. A cursor that no item has is ignored."""
    positions = {get_id(item): position for position, item in enumerate(items)}
    stop = positions.get(before, len(items)) if before is not None else len(items)
    if before in positions and params.after is None:
        return Page(items[max(0, stop - params.limit) : stop], has_more=stop > params.limit)
    start = positions[params.after] + 1 if params.after in positions else 0
    return first_page(items[start:stop], params.limit)
