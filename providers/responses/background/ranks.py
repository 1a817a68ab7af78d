"""Rank: the place of a waiting run in its tenant's queue, as a key of the store. Pure functions.

    /queue/TENANT/PRIORITY/TIME/ID       a run that starts as soon as a worker is free
    /deferred/TENANT/DEADLINE/TIME/ID    a run with a completion window, which waits below all other work

Times are in microseconds since the epoch, of 17 digits, so that keys are ordered by them. A key expires when its run
has waited for too long.
"""

import time
from dataclasses import dataclass
from typing import Final

from apis.responses import CreateResponse

QUEUE_PREFIX: Final = "/queue/"
DEFERRED_PREFIX: Final = "/deferred/"
DEFAULT_PRIORITY: Final = 5
_TIER_PRIORITIES: Final = {"ultrafast": 0, "fast": 1, "priority": 2, "flex": 9}


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of a run: its `priority`, the smallest first; or, with a completion window of `window_s` seconds, its
    deadline."""

    priority: int = DEFAULT_PRIORITY
    window_s: int = 0

    def build_key(self, tenant: str, response_id: str) -> str:
        """Return the key in the queue of a run that is added now."""
        now_us = time.time_ns() // 1000
        time_and_id = f"{now_us:017d}/{response_id}"
        if self.window_s:
            return f"{DEFERRED_PREFIX}{tenant}/{now_us + self.window_s * 1_000_000:017d}/{time_and_id}"
        return f"{QUEUE_PREFIX}{tenant}/{self.priority}/{time_and_id}"

    @property
    def slot_prefix(self) -> str:
        """The prefix of the slots that bound the number of waiting runs, which is another one for each queue."""
        return "/deferred_place/" if self.window_s else "/place/"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of one tenant's queues: `max_waiting` runs may wait, each for `queue_timeout_s` seconds, and
    `max_deferred` with a completion window."""

    max_waiting: int
    queue_timeout_s: float
    max_deferred: int = 1000

    def find_limit(self, rank: Rank) -> tuple[int, str]:
        """Return the number of runs that may wait in the queue of this rank, and the name of its setting."""
        return (self.max_deferred, "max_deferred") if rank.window_s else (self.max_waiting, "max_waiting")


def request_rank(request: CreateResponse) -> Rank:
    """Return the rank of the response that the request creates."""
    return Rank(_TIER_PRIORITIES.get(request.service_tier or "", DEFAULT_PRIORITY), request.window_s)


def is_deferred_key(queue_key: str) -> bool:
    """Return True for the key of a run with a completion window."""
    return queue_key.startswith(DEFERRED_PREFIX)


def read_queued_at(queue_key: str) -> float:
    """Return the time at which a run was added, in seconds since the epoch."""
    return int(queue_key.split("/")[-2]) / 1e6


def read_deadline(queue_key: str) -> float | None:
    """Return the end of a run's completion window, in seconds since the epoch; None where it has none."""
    return int(queue_key.split("/")[-3]) / 1e6 if is_deferred_key(queue_key) else None
