"""BackgroundObservation: background responses as operators and the built-in page see them while they run.

The overview of the runs that have not ended is read from the keys of the queue and the leases, and from the small
records of runs, never from the requests.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from openai.types.responses import Response

from apis.errors import InvalidRequest
from apis.events import LoggedEvent, ResponseEvent
from apis.observation.background import BackgroundOverview, EventListParams, Observation, RunSummary, WorkerSummary
from apis.storage.kv_store import Entry, KVStore
from apis.storage.lease import read_holder
from apis.storage.pages import Page
from apis.storage.records import PAGE_BYTES
from providers.common.state.event_logs import decode_batch
from providers.common.state.scan import decode_or_skip, skipping_damaged
from providers.responses.background.event_log import EventLog, event_prefix
from providers.responses.background.ranks import DEFERRED_PREFIX, QUEUE_PREFIX, read_deadline, read_queued_at
from providers.responses.background.runs import ResponseRef, RunRecord
from providers.responses.background.worker_registry import WorkerRegistry
from providers.responses.background.workers import BackgroundConfig
from providers.responses.context.item_views import ItemViews

_COUNT_LIMIT: Final = 1000
"""Runs of a tenant that are read and counted."""
_MAX_RUNS: Final = 100
"""Runs that an overview shows."""
_BATCHES: Final = 64
"""Batches that one scan reads."""


class BackgroundObservation(Observation):
    """Reads of one store. `load_response` returns the stored response of an id and a tenant, or raises NotFound."""

    def __init__(
        self,
        kv: KVStore,
        config: BackgroundConfig,
        event_log: EventLog,
        registry: WorkerRegistry,
        load_response: Callable[[str, str], Awaitable[Response]],
        views: ItemViews,
    ) -> None:
        self._kv = kv
        self._config = config
        self._event_log = event_log
        self._registry = registry
        self._load_response = load_response
        self._views = views

    async def list_events(self, response_id: str, params: EventListParams, *, tenant: str) -> Page[ResponseEvent]:
        response = await self._load_response(response_id, tenant)
        view = await self._views.of_response(params.include or (), response, tenant)
        await self._event_log.add_reader(response_id, tenant=tenant)
        page = await read_event_page(self._kv, tenant, response_id, params)
        return Page(view.show_events(page.data), page.has_more, page.last_id)

    async def list_runs(self, *, tenant: str) -> BackgroundOverview:
        return await summarize_runs(self._kv, tenant, self._config)

    async def list_workers(self) -> Sequence[WorkerSummary]:
        return await self._registry.list_workers()


async def summarize_runs(kv: KVStore, tenant: str, config: BackgroundConfig) -> BackgroundOverview:
    """Return the overview of a tenant's runs. Its three reads of the store are no snapshot: a run that starts or
    ends meanwhile may appear in its earlier state."""
    queue = await kv.scan(f"{QUEUE_PREFIX}{tenant}/", limit=_COUNT_LIMIT)
    queue += await kv.scan(f"{DEFERRED_PREFIX}{tenant}/", limit=_COUNT_LIMIT - len(queue))
    leases = await kv.scan(f"/lease/{tenant}/", limit=_COUNT_LIMIT)
    rows = await kv.scan(f"/run/{tenant}/", limit=_COUNT_LIMIT)
    places = {key: place for place, (key, _) in enumerate(queue, 1)}
    holders = dict.fromkeys((key for key, _ in leases), "")
    for key, entry in leases:
        with skipping_damaged(kv, key, "lease of a run"):
            holders[key] = read_holder(entry)
    runs: list[RunSummary] = []
    for key, entry in rows:
        run = decode_or_skip(kv, key, entry, RunRecord)
        if run is not None:
            runs.append(_summarize(ResponseRef(tenant, key.rpartition("/")[2]), run, places, holders))
    runs.sort(key=lambda run: (run.status == "queued", run.queue_place or 0, run.created_at))
    return BackgroundOverview(
        running=sum(run.is_leased for run in runs),
        waiting=sum(run.queue_place is not None and run.expires_at is None for run in runs),
        deferred=sum(run.queue_place is not None and run.expires_at is not None for run in runs),
        orphaned=sum(run.status == "in_progress" and not run.is_leased and run.queue_place is None for run in runs),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_deferred=config.max_deferred,
        count_limit=_COUNT_LIMIT,
        runs=runs[:_MAX_RUNS],
    )


def _summarize(ref: ResponseRef, run: RunRecord, places: Mapping[str, int], holders: Mapping[str, str]) -> RunSummary:
    holder = holders.get(ref.lease_key)
    place = None if holder is not None else places.get(run.queue_key)
    return RunSummary(
        id=ref.id,
        # a run that was handed back waits again, though its record still says that it is in progress
        status="queued" if place is not None else run.status,
        created_at=read_queued_at(run.queue_key),
        queue_place=place,
        attempts=run.attempts,
        handovers=run.handovers,
        is_leased=holder is not None,
        worker=holder or None,
        expires_at=read_deadline(run.queue_key) if place is not None else None,
    )


async def read_event_page(kv: KVStore, tenant: str, response_id: str, params: EventListParams) -> Page[LoggedEvent]:
    """Return a page of the events that are stored now. Raises InvalidRequest if there is no log."""
    prefix = event_prefix(tenant, response_id)
    is_reversed = params.order == "desc"
    cursor = int(params.after) if params.after is not None else None
    after, before = await _find_bounds(kv, prefix, cursor, is_reversed=is_reversed)
    events: list[tuple[int, LoggedEvent]] = []
    size_bytes = 0
    while rows := await kv.scan(
        prefix, after=after, before=before, limit=_BATCHES, reverse=is_reversed, max_bytes=PAGE_BYTES
    ):
        for number, event in _numbered_events(rows, cursor, is_reversed=is_reversed):
            size_bytes += len(event.data)
            if len(events) == params.limit or (events and size_bytes > PAGE_BYTES):
                return _page(events, has_more=True)
            events.append((number, event))
        after, before = (after, rows[-1][0]) if is_reversed else (rows[-1][0], before)
    if not events and not await kv.scan(prefix, limit=1):
        raise InvalidRequest(
            "No events are stored of this response: it was not made with `background`, or too long ago.",
            param="response_id",
            code="unsupported_value",
        )
    return _page(events, has_more=False)


async def _find_bounds(kv: KVStore, prefix: str, cursor: int | None, *, is_reversed: bool) -> tuple[str, str]:
    """Return the bounds of the scan whose first batch may hold the first event after the cursor."""
    if cursor is None:
        return "", ""
    if is_reversed:
        return "", f"{prefix}{cursor:08d}"
    # the batch that holds the next event begins with it, or before it
    rows = await kv.scan(prefix, before=f"{prefix}{cursor + 2:08d}", limit=1, reverse=True)
    first = int(rows[0][0][-8:]) if rows else 0
    return (f"{prefix}{first - 1:08d}" if first else ""), ""


def _numbered_events(
    rows: Sequence[tuple[str, Entry]], cursor: int | None, *, is_reversed: bool
) -> Iterator[tuple[int, LoggedEvent]]:
    """Yield the events after the cursor in their order, with their sequence numbers."""
    for key, entry in rows:
        numbered = [*enumerate(decode_batch(entry.value), int(key[-8:]))]
        for number, event in reversed(numbered) if is_reversed else numbered:
            if cursor is None or (number < cursor if is_reversed else number > cursor):
                yield number, event


def _page(events: Sequence[tuple[int, LoggedEvent]], *, has_more: bool) -> Page[LoggedEvent]:
    return Page([event for _, event in events], has_more, str(events[-1][0]) if events else None)
