"""The ids of responses and items. An item's id contains the id of its response, by which the store finds the item.

An id begins with the time of its creation, so that a listing in the order of ids is one in the order of creation.
"""

import re

from apis.storage.keys import new_id_key

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{44}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{44})([0-9a-f]{4,8})")


class ResponseIds:
    """Creates the ids of one response: the time and 112 random bits for it, and a running number for each item."""

    __slots__ = ("_key", "item_id_count", "response_id")

    def __init__(self, response_id: str | None = None, item_id_count: int = 0) -> None:
        """Continue the ids of a response that has `item_id_count` item ids, or begin those of a new response."""
        self._key = new_id_key() if response_id is None else response_id.removeprefix("resp_")
        self.item_id_count = item_id_count
        """The number of item ids created so far."""
        self.response_id = f"resp_{self._key}"

    def new_item_id(self, prefix: str) -> str:
        """Return a new id, such as msg_…, for an item of this response."""
        number = self.item_id_count
        self.item_id_count = number + 1
        return f"{prefix}_{self._key}{number:04x}"


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that the item id was created for; None for an id that a client chose."""
    match = _ITEM_ID.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None


def item_number(item_id: str) -> int:
    """Return the running number in an item id that ResponseIds created."""
    match = _ITEM_ID.fullmatch(item_id)
    assert match is not None
    return int(match[2], 16)


def is_response_id(response_id: str) -> bool:
    """Return True for an id of the form that ResponseIds creates."""
    return _RESPONSE_ID.fullmatch(response_id) is not None
