"""The ids of responses and items. An item's id contains the id of its response, by which the store finds the item.

An id begins with the time of its creation, so that a listing in the order of ids is one in the order of creation. It
ends with the number of the model's turn, for the items of each turn after the first. So a client that sends items back
says by their ids which of them the model made at once.
"""

import re
from typing import Final, NamedTuple

from apis.storage.keys import new_id_key

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{44}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{44})(?:([0-9a-f]{4})([0-9a-f]{4})|([0-9a-f]{4,7}))")
_MAX_MARKED: Final = 0xFFFF
"""The largest number of an item, and of a turn, with which the id of an item names its turn."""


class ModelTurn(NamedTuple):
    """One turn of a model: the key of its response, empty where that is unknown, and the number of the turn in it."""

    response_key: str
    number: int

    def differs(self, other: "ModelTurn | None") -> bool:
        """Return true where the other turn is known to be another one."""
        if other is None:
            return False
        is_same_response = not self.response_key or other.response_key in ("", self.response_key)
        return not is_same_response or self.number != other.number


class ResponseIds:
    """Creates the ids of one response: the time and 112 random bits for it, and a running number for each item."""

    __slots__ = ("_key", "item_id_count", "response_id", "turn")

    def __init__(self, response_id: str | None = None, item_id_count: int = 0) -> None:
        """Continue the ids of a response that has `item_id_count` item ids, or begin those of a new response."""
        self._key = new_id_key() if response_id is None else response_id.removeprefix("resp_")
        self.item_id_count = item_id_count
        """The number of item ids created so far."""
        self.turn = 0
        """The number of the model's turn that is running."""
        self.response_id = f"resp_{self._key}"

    def new_item_id(self, prefix: str) -> str:
        """Return a new id, such as msg_…, for an item of this response."""
        number = self.item_id_count
        self.item_id_count = number + 1
        turn = f"{self.turn:04x}" if 0 < self.turn <= _MAX_MARKED and number <= _MAX_MARKED else ""
        return f"{prefix}_{self._key}{number:04x}{turn}"


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that the item id was created for; None for an id that a client chose."""
    match = _ITEM_ID.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None


def item_number(item_id: str) -> int:
    """Return the running number in an item id that ResponseIds created."""
    match = _ITEM_ID.fullmatch(item_id)
    assert match is not None
    return int(match[2] or match[4], 16)


def turn_of(item_id: str, number: int = 0) -> ModelTurn | None:
    """Return the turn in which the model made the item of this id; `number` is that of the turn, where it is known from
    elsewhere. None for an id that a client chose."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else ModelTurn(match[1], number or int(match[3] or "0", 16))


def is_response_id(response_id: str) -> bool:
    """Return True for an id of the form that ResponseIds creates."""
    return _RESPONSE_ID.fullmatch(response_id) is not None
