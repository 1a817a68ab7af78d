"""Bytes that requests in progress hold in one process: their bodies, their messages and the answers of models to them.

All count in one share, of which one tenant has at most half where there are several. A request holds places of it in a
list. The code that runs the request releases them when it is over.
"""

import asyncio
from collections.abc import Generator, MutableSequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from weakref import WeakKeyDictionary

from apis.errors import Overloaded
from apis.fair_share import FairShare, Place

PLACE_BYTES: Final = 64 * 1024
"""Bytes that one place covers."""
UNCOUNTED_BYTES: Final = 64 * 1024
"""Bytes of a body, or of an answer, that take no place: nearly all are smaller, and pay nothing."""
_LARGE_ANSWER_BYTES: Final = 1024 * 1024
_LARGE_ANSWER_COPIES: Final = 4
"""Places for the same bytes of an answer beyond _LARGE_ANSWER_BYTES: it is stored, cached and sent at its end."""

HELD_PLACES: Final[ContextVar[MutableSequence[Place] | None]] = ContextVar("held_places", default=None)
"""The places of the request that the current task works for."""

_share_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, FairShare] = WeakKeyDictionary()


@contextmanager
def held_places() -> Generator[None]:
    """Release at the end of the context the places that the work within it has taken."""
    places: list[Place] = []
    HELD_PLACES.set(places)
    try:
        yield
    finally:
        for place in places:
            place.release()


def count_answers_in(share: FairShare) -> None:
    """Let the answers that arrive on the running event loop take their places from `share`."""
    _share_by_loop[asyncio.get_running_loop()] = share


def too_many_bytes_error(setting: str = "max_bodies_bytes") -> Overloaded:
    """Return the error of a request that finds no place for its bytes in the share of this setting."""
    return Overloaded(
        f"The bodies and answers of the requests in progress are too large together (`server.{setting}`). Try again "
        "when some of them have ended.",
        retry_after_s=1,
    )


def take_places(
    places: MutableSequence[Place], count: int, share: FairShare, tenant: str, *, at_least: int = 0
) -> bool:
    """Add `count` places of the tenant to `places`; return false where it has no more. `at_least` is that of
    `FairShare.try_acquire`."""
    for _ in range(count):
        place = share.try_acquire(tenant, at_least=at_least)
        if place is None:
            return False
        places.append(place)
    return True


class AnswerAllowance:
    """The bytes that an answer may have: `allowed_bytes` now, and more up to `max_bytes` as long as its tenant finds
    places. It belongs to the request that the current task works for."""

    __slots__ = ("_places", "_share", "allowed_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._places = HELD_PLACES.get()
        self._share = None if self._places is None else _share_by_loop.get(asyncio.get_running_loop())
        self.allowed_bytes = max_bytes if self._share is None else min(max_bytes, UNCOUNTED_BYTES)

    def extend(self, size_bytes: int, tenant: str) -> bool:
        """Take places until they cover so many bytes; return false where that exceeds a bound."""
        while self.allowed_bytes < min(size_bytes, self.max_bytes):
            count = _LARGE_ANSWER_COPIES if self.allowed_bytes >= _LARGE_ANSWER_BYTES else 1
            assert self._places is not None
            assert self._share is not None
            if not take_places(self._places, count, self._share, tenant):
                return False
            self.allowed_bytes = min(self.max_bytes, self.allowed_bytes + PLACE_BYTES)
        return size_bytes <= self.allowed_bytes
