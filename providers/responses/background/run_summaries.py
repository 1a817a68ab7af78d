"""The background responses of one tenant that have not ended, as the overview shows them: read from the keys of the
queue and the leases and the small records of runs, never from the requests."""

from collections.abc import Mapping
from typing import Final

from apis.observation.background import BackgroundOverview, RunSummary
from apis.storage.kv_store import KVStore
from apis.storage.lease import read_holder
from providers.common.state.scan import decode_or_skip, skipping_damaged
from providers.responses.background.ranks import DEFERRED_PREFIX, QUEUE_PREFIX, read_deadline, read_queued_at
from providers.responses.background.runs import ResponseRef, RunRecord
from providers.responses.background.workers import BackgroundConfig

_COUNT_LIMIT: Final = 1000
"""Runs of a tenant that are read and counted."""
_MAX_RUNS: Final = 100
"""Runs that an overview shows."""


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
