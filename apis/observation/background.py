"""Observation of a stack while it works: the events and runs of background responses, the workers that execute them,
the inference servers. All are extensions of OpenAI's API, for operators and the built-in page."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from apis.conversations import ItemInclude
from apis.events import ResponseEvent
from apis.storage.pages import Page


class EventListParams(ItemInclude):
    """The page of a response's stored events to list; `after` is the sequence number of the last event of the page
    before."""

    after: str | None = Field(None, pattern=r"^[0-9]{1,8}$")
    limit: int = Field(100, ge=1, le=1000)
    order: Literal["asc", "desc"] = "asc"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A background response that has not ended. `queue_place` counts the tenant's own waiting runs from 1, None where
    it does not wait. `attempts` are the workers that have executed it, `handovers` those of them that had to stop.
    `worker` has its lease now; None if no worker has, or the reader may not know it. A run that waits with a completion
    window fails at `expires_at`, in Unix time."""

    id: str
    status: Literal["queued", "in_progress"]
    created_at: float
    queue_place: int | None
    attempts: int
    handovers: int
    is_leased: bool
    worker: str | None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """A process that executes background responses, on any machine of the store: where it runs, when it started and
    last reported itself in Unix time, and how many runs it executed then."""

    id: str
    host: str
    pid: int
    started_at: float
    seen_at: float
    running: int
    max_running: int


@dataclass(frozen=True, slots=True)
class BackgroundOverview:
    """The background responses of one tenant: counts, limits, and up to 100 runs, the oldest of each state first. The
    counts stop at `count_limit`. `deferred` runs wait with a completion window, and are no part of `waiting`.
    `orphaned` runs are in progress without a lease, until another worker claims them."""

    running: int
    waiting: int
    orphaned: int
    max_running: int
    max_waiting: int
    deferred: int
    max_deferred: int
    count_limit: int
    runs: Sequence[RunSummary]


@dataclass(frozen=True, slots=True)
class UpstreamHealth:
    """A server that a provider sends requests to: whether it answered its last check, and whether requests are kept
    from it because it failed too often, which ends after `retry_s`."""

    url: str
    is_healthy: bool
    is_blocked: bool
    retry_s: float


class Observation(ABC):
    """Reads of background responses as they are now. Each costs a few reads of the store, however large the requests
    and the outputs are."""

    @abstractmethod
    async def list_events(self, response_id: str, params: EventListParams, *, tenant: str) -> Page[ResponseEvent]:
        """Return a page of the events of a background response that are stored now, oldest first by default; while the
        response runs, more may follow later. A page ends at `limit` events or 8 MiB, and its `last_id` is the sequence
        number of its last event. The `include` of `params` decides as in `Responses.get`.

        Raises NotFound; InvalidRequest if the events were never stored or have expired.
        """

    @abstractmethod
    async def list_runs(self, *, tenant: str) -> BackgroundOverview:
        """Return the tenant's background responses that have not ended."""

    @abstractmethod
    async def list_workers(self) -> Sequence[WorkerSummary]:
        """Return the processes that execute background responses of this store for all tenants."""
