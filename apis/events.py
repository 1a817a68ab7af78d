"""LoggedEvent: an event of a response's stream as its log keeps it."""

from typing import NamedTuple


class LoggedEvent(NamedTuple):
    """`data` is the event as one line of JSON, its sequence_number included; `type` is the JSON's own."""

    type: str
    data: bytes
