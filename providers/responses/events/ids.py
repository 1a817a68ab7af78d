"""Ids of responses and of the items in them. An item's id holds that of its response, so that it can be found."""

import re
import secrets

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4,8}")


class ResponseIds:
    """Mints the ids of one response: 128 random bits for it, and a running number for each item."""

    __slots__ = ("_key", "_next_number", "response_id")

    def __init__(self, response_id: str | None = None, item_id_count: int = 0) -> None:
        """Of a new response, or of one that has `minted` item ids already."""
        self._key = secrets.token_hex(16) if response_id is None else response_id.removeprefix("resp_")
        self._next_number = item_id_count
        self.response_id = f"resp_{self._key}"

    @property
    def item_id_count(self) -> int:
        """How many item ids there are."""
        return self._next_number

    def new_item_id(self, prefix: str) -> str:
        """A new id, such as msg_…, for an item of this response."""
        number = self._next_number
        self._next_number = number + 1
        return f"{prefix}_{self._key}{number:04x}"


def generate_call_id() -> str:
    """A new id for a call whose model gave none."""
    return f"call_{secrets.token_hex(16)}"


def response_id_of(item_id: str) -> str | None:
    """The response in which an item with this id was minted; None for an id that is not ours."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def item_number(item_id: str) -> int:
    """The running number in an item id of ours."""
    return int(item_id.rpartition("_")[2][32:], 16)


def is_response_id(response_id: str) -> bool:
    """Whether it is of the form that `Ids` gives to responses."""
    return _RESPONSE_ID.fullmatch(response_id) is not None
